#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/graph/access.hpp"
#include "engine/graph/body.hpp"
#include "engine/graph/part.hpp"
#include "engine/graph/rank_set.hpp"

namespace stepgraph {

class Graph;
struct Edges;      // engine/graph/edges.hpp
struct GraphData;  // engine/graph/graph_data.hpp
struct NodeRecord;

struct BufferSpec {
  std::string name        = {};
  Rank rank               = Rank{0};
  std::int64_t size_bytes = 0;
  DType type              = DType::u8;
  Space space             = Space::device;
  Lifetime lifetime       = Lifetime::step;
  bool token              = false;  // made by Graph::token: one byte, only for order, without memory
  friend bool operator==(const BufferSpec&, const BufferSpec&) = default;
};

// What the simulator and the traces count for a node.
struct Cost {
  double flops                                     = 0;
  double bytes_moved                               = 0;
  double bytes_sent                                = 0;
  friend bool operator==(const Cost&, const Cost&) = default;
};

// Names for people: the engine groups by them and prints them, nothing else. -1 or empty: none.
struct Labels {
  int stage                                            = -1;
  int microbatch                                       = -1;
  int layer                                            = -1;
  std::string phase                                    = {};
  friend bool operator==(const Labels&, const Labels&) = default;
};

// One unit of work, as declared. Its rank is that of the lane, else of the buffers it uses, else `rank`.
struct NodeSpec {
  std::string name             = {};
  std::optional<Lane> lane     = {};  // none: only its accesses order it
  AccessList reads             = {};
  AccessList writes            = {};
  AccessList accumulates       = {};
  std::optional<PartSpec> part = {};  // set: the world executes this node together with its matches
  NodeKind kind                = NodeKind::compute;
  std::string op               = {};     // the operation, for rates and drawings ("linear"); may be empty
  bool parallel                = false;  // the body may call Context::parallel_for
  bool device                  = false;  // the body can enqueue its work on a device: Context::device
  // The most bytes of DeviceQueue::workspace that the body uses on a device. The stream of the node has at least as
  // many. On the host there is no workspace.
  std::int64_t workspace_bytes = 0;
  Cost cost                    = {};
  Labels labels                = {};
  std::optional<Rank> rank     = {};
};

// A handle to a node, freely copied; valid as long as its graph.
struct Node {
  std::uint32_t id                                  = 0;
  friend auto operator<=>(const Node&, const Node&) = default;
};

// Buffers, groups and nodes of many ranks. Edges are not declared but derived (`edges()`): a node declares what it
// reads and writes and on which lane it runs. The edges are read-after-write, write-after-read and write-after-write on
// overlapping bytes, and the order of each lane, all inside one rank.
//
// A value: copies share their storage until one of them is changed. Concurrent const access is safe.
class Graph {
 public:
  explicit Graph(int num_ranks = 1);
  // A graph that holds the nodes of some ranks only, as `slice` returns it. Building it costs those ranks' nodes.
  Graph(int num_ranks, RankSet ranks);

  // The most bytes of a rank's buffers together, and of a part's accesses. Sums over all ranks may exceed std::int64_t.
  static constexpr std::int64_t most_bytes = std::int64_t{1} << 56;
  [[nodiscard]] Buffer buffer(BufferSpec spec);
  [[nodiscard]] Buffer token(Rank rank, std::string_view name = {});
  [[nodiscard]] Group group(GroupSpec spec);
  [[nodiscard]] Lane lane(Rank rank, LaneKind kind) const;

  // Adds a node. A body is anything callable with `(const Context&)` or `()`. A part has no body: the world executes
  // it.
  Node add(const NodeSpec& spec, Body body = {});
  template <NodeBody F>
  Node add(const NodeSpec& spec, F&& body) {
    return add(spec, Body(std::forward<F>(body)));
  }

  // Derived when first asked for, and kept until the graph changes.
  [[nodiscard]] const Edges& edges() const;

  // --- looking at it -------------------------------------------------------------------------------------------
  struct AccessView {
    Buffer buffer;
    AccessMode mode;
    Region region;  // normal form, `whole` resolved
  };
  struct PartView {
    Group group;
    PartOp op;
    Reduction reduction;
    DType type;
    Rank peer;
    Rank source;
    Rank root;
    std::string_view message;
    std::int32_t issue;
    std::int64_t bytes_read;     // all bytes the part sends, tokens aside
    std::int64_t bytes_written;  // all bytes it receives
  };

  [[nodiscard]] int num_ranks() const noexcept;
  [[nodiscard]] const RankSet& ranks() const noexcept;  // the graph has no nodes of other ranks
  [[nodiscard]] bool holds(Rank rank) const noexcept { return ranks().contains(rank); }
  [[nodiscard]] std::uint32_t num_nodes() const noexcept;
  [[nodiscard]] std::uint32_t num_buffers() const noexcept;
  [[nodiscard]] std::uint32_t num_groups() const noexcept;

  [[nodiscard]] std::string_view name(Node node) const;
  [[nodiscard]] Rank rank(Node node) const;
  [[nodiscard]] std::optional<Lane> lane(Node node) const;
  [[nodiscard]] std::uint32_t lane_position(Node node) const;  // 0 for the lane's first node
  [[nodiscard]] std::uint32_t lane_size(Lane lane) const;      // how many nodes it has
  [[nodiscard]] NodeKind kind(Node node) const;
  [[nodiscard]] std::string_view op(Node node) const;
  [[nodiscard]] bool parallel(Node node) const;
  [[nodiscard]] bool device(Node node) const;
  [[nodiscard]] std::int64_t workspace_bytes(Node node) const;  // logarithmic in the number of nodes that have some
  [[nodiscard]] const Cost& cost(Node node) const;
  [[nodiscard]] Labels labels(Node node) const;
  [[nodiscard]] std::size_t num_accesses(Node node) const;
  [[nodiscard]] AccessView access(Node node, std::size_t i) const;
  [[nodiscard]] bool has_part(Node node) const;
  [[nodiscard]] PartView part(Node node) const;
  [[nodiscard]] const Body& body(Node node) const;
  [[nodiscard]] NodeSpec spec(Node node) const;  // the argument of `add`, in normal form: for passes

  [[nodiscard]] const BufferSpec& spec(Buffer buffer) const;
  [[nodiscard]] const GroupSpec& spec(Group group) const;

  // The names that messages use: "rank 3 gather 'all_gather layer3'", "buffer 'weights'".
  [[nodiscard]] std::string describe(Node node) const;
  [[nodiscard]] std::string describe(Buffer buffer) const;

  // Same buffers, groups and nodes in the same order, and the same edges; bodies are not compared.
  friend bool operator==(const Graph& a, const Graph& b);

  // Its storage, for other files of engine/.
  [[nodiscard]] const GraphData& data() const noexcept { return *data_; }

 private:
  GraphData& mutate();
  [[nodiscard]] const NodeRecord& record(Node node) const;  // checked
  template <class What>
  void check_rank(Rank rank, const What& what) const;  // `what()` names the caller in the error message
  void check_part(const NodeSpec& spec, Rank rank) const;
  static void check_workspace(const NodeSpec& spec);
  [[nodiscard]] Rank rank_of(const NodeSpec& spec) const;

  std::shared_ptr<GraphData> data_;
};

// The nodes, buffers and groups of some ranks, in their order. Its edges are those that the whole graph has in these
// ranks.
[[nodiscard]] Graph slice(const Graph& graph, const RankSet& ranks);

}  // namespace stepgraph
