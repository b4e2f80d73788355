#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"

// The storage of a Graph: internal to engine/. Derivation and lowering read it without copies.
namespace stepgraph {

inline constexpr std::uint32_t no_node      = ~std::uint32_t{0};
inline constexpr std::uint32_t whole_region = 0;  // the first two entries of GraphData::regions
inline constexpr std::uint32_t empty_region = 1;

// Small numbers for strings; 0 is the empty string.
class Interner {
 public:
  std::uint32_t intern(std::string_view text);
  [[nodiscard]] std::string_view operator[](std::uint32_t id) const { return texts_[id]; }

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
  };
  std::vector<std::string> texts_{std::string()};
  std::unordered_map<std::string, std::uint32_t, Hash, std::equal_to<>> ids_;
};

struct AccessRecord {
  std::uint32_t buffer_and_mode;
  std::uint32_t region;  // into GraphData::regions, or whole_region, or empty_region
  [[nodiscard]] std::uint32_t buffer() const noexcept { return buffer_and_mode >> 2; }
  [[nodiscard]] AccessMode mode() const noexcept { return static_cast<AccessMode>(buffer_and_mode & 3); }
};

struct NodeRecord {
  std::uint32_t name_begin;    // into GraphData::names; ends where the next node's begins
  std::uint32_t access_begin;  // into GraphData::accesses; likewise
  std::int32_t rank;
  std::uint32_t place;  // of the rank, in GraphData::ranks
  std::int32_t lane;    // LaneKind, or -1
  std::uint32_t lane_position;
  std::int32_t part;  // into GraphData::parts, or -1
  std::uint32_t op;
  std::uint32_t phase;
  std::int32_t stage;
  std::int32_t microbatch;
  std::int32_t layer;
  NodeKind kind;
  bool parallel;
  bool device;
  Cost cost;
};

struct PartRecord {
  std::uint32_t node;
  std::uint32_t group;
  PartOp op;
  Reduction reduction;
  DType type;
  Rank peer;
  Rank source;
  Rank root;
  std::uint32_t message;
  std::int32_t issue;
  std::int64_t bytes_read;
  std::int64_t bytes_written;
};

// The workspace of a node's body. Few nodes have one, so it is not in NodeRecord.
struct WorkspaceRecord {
  std::uint32_t node;
  std::int64_t bytes;
  friend bool operator==(const WorkspaceRecord&, const WorkspaceRecord&) = default;
};

// The accesses of a buffer so far: none, all with one region, or with different regions.
struct BufferUse {
  enum class State : std::uint8_t { untouched, uniform, mixed };
  std::uint32_t region = 0;
  State state          = State::untouched;
};

struct GraphData {
  int num_ranks = 1;
  RankSet ranks = RankSet::all(1);
  std::vector<BufferSpec> buffers;
  std::vector<BufferUse> uses;  // one per buffer
  std::vector<GroupSpec> groups;
  std::vector<NodeRecord> nodes;
  std::vector<Body> bodies;  // one per node; empty for parts
  std::vector<AccessRecord> accesses;
  std::vector<Region> regions{Region{}, Region{}};
  std::vector<PartRecord> parts;
  std::vector<WorkspaceRecord> workspaces;  // by node; more than 0 bytes
  std::vector<std::uint32_t> lane_sizes;    // by lane_index
  std::vector<std::int32_t> parts_on_rank;  // by place in `ranks`: next default issue position
  std::vector<std::int64_t> bytes_on_rank;  // by place in `ranks`: of its buffers
  std::string names;
  Interner strings;

  mutable std::mutex edges_mutex;  // guards `edges`
  mutable std::unique_ptr<const Edges> edges;

  GraphData() = default;
  GraphData(const GraphData& other);

  // Lanes have numbers by place of their rank, so that a graph of one rank has few.
  [[nodiscard]] std::size_t num_lanes() const noexcept { return lane_sizes.size(); }
  [[nodiscard]] static std::size_t lane_index(std::size_t place, std::size_t kind) noexcept {
    return place * num_lane_kinds + kind;
  }
  [[nodiscard]] static std::size_t lane_index(const NodeRecord& node) noexcept {  // of a node with a lane
    return lane_index(node.place, static_cast<std::size_t>(node.lane));
  }
  [[nodiscard]] std::uint32_t access_end(std::uint32_t node) const noexcept {
    return node + 1 < nodes.size() ? nodes[node + 1].access_begin : static_cast<std::uint32_t>(accesses.size());
  }
  [[nodiscard]] std::string_view name(std::uint32_t node) const noexcept {
    const std::size_t begin = nodes[node].name_begin;
    const std::size_t end   = node + 1 < nodes.size() ? nodes[node + 1].name_begin : names.size();
    return std::string_view(names).substr(begin, end - begin);
  }
  [[nodiscard]] Region region(const AccessRecord& access) const noexcept {
    return access.region == whole_region ? Region{.length = buffers[access.buffer()].size_bytes}
                                         : regions[access.region];
  }
};

}  // namespace stepgraph
