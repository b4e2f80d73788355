#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/draw/dot.hpp"

// The content of a drawing: boxes that represent nodes, and links between them. Internal to engine/.
namespace stepgraph::drawing {

// The meaning of a colour: the kind of a node, or of a communication.
enum class Shade : std::uint8_t {
  compute,
  host,
  copy,
  all_gather,
  reduce_scatter,
  all_reduce,
  reduce,
  broadcast,
  scatter,
  gather,
  all_to_all,
  permute,
  barrier,
  send,
  recv,
  communicate,  // a communicate node without a part
};
inline constexpr std::size_t num_shades = 16;
[[nodiscard]] std::string_view to_string(Shade shade) noexcept;

struct Box {
  int cluster                                  = 0;   // into Drawing::clusters
  int lane                                     = -1;  // LaneKind, or -1
  std::uint32_t level                          = 0;   // the earliest level of its nodes, in unit steps from the start
  std::uint32_t first_node                     = 0;
  std::uint32_t num_nodes                      = 0;
  std::array<std::uint32_t, num_shades> shades = {};  // number of nodes of each shade
  double bytes = 0, flops = 0;
  std::array<bool, 3> reads = {}, writes = {};  // by Space: where its nodes have buffers
  std::vector<std::string> title = {};          // lines
  std::vector<std::string> facts = {};          // lines in smaller print
  std::string tooltip            = {};
  [[nodiscard]] bool only_parts() const noexcept;
};

enum class LinkKind : std::uint8_t {
  data,   // an edge between conflicting accesses
  lane,   // an edge that only expresses lane order
  loop,   // an edge into the next run
  match,  // parts of one communication
  reuse,  // an edge that a memory plan added
  issue,  // an edge that only the issue order of the world needs
  added,  // an edge that the caller added to the graph's
};

inline constexpr std::size_t num_link_kinds = 7;

// The edges between two boxes; `count` is their number.
struct Link {
  std::uint32_t from = 0, to = 0;
  LinkKind kind       = LinkKind::data;
  Shade shade         = Shade::compute;  // match: which communication
  std::uint32_t count = 0;
  bool both           = false;  // some edges lead from `to` to `from`
};

// Consecutive ranks drawn together.
struct Cluster {
  int first_rank = 0, last_rank = 0;
  int stage = -1;  // common stage of all its nodes; -1: none, or several
};

struct Drawing {
  std::vector<Cluster> clusters;
  std::vector<Box> boxes;    // by level, then by first node
  std::vector<Link> links;   // sorted
  bool keep_levels = false;  // columns follow the levels, which include ranks that are not drawn
  std::string caption;       // what is drawn, and what was merged
};

// Throws Error(config) if `options` do not fit the graph.
[[nodiscard]] Drawing group(const OrderedGraph& ordered, const DotOptions& options);

}  // namespace stepgraph::drawing
