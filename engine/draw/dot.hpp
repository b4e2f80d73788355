#pragma once
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

#include "engine/graph/ordered_graph.hpp"

namespace stepgraph {

// The nodes that one box of a drawing stands for.
enum class Detail {
  stage,  // nodes of a rank and lane with equal stage, phase and microbatch; merged further until it fits a page
  layer,  // nodes of a rank and lane with equal stage, phase, microbatch and layer
  op,     // one node
};
[[nodiscard]] std::string_view to_string(Detail detail) noexcept;

struct DotOptions {
  Detail detail            = Detail::stage;  // of the command too: fits a page, whatever the graph
  std::optional<Rank> rank = {};             // draw this rank only
  bool loop_edges          = true;           // draw the edges into the next run of the graph
  std::string title        = {};
};

// At stage detail a picture has at most this many nodes, legend and caption included.
inline constexpr int max_drawn_boxes = 300;

// Writes the graph as Graphviz DOT. Time runs to the right; each rank is a cluster and each lane a row in it; long
// steps wrap like text. The same graph gives the same bytes. Edges:
//   solid          data
//   light          the order of a lane only
//   dashed, grey   into the next run
//   dashed, red    reuse edges of a memory plan
//   dashed, blue   the issue order of the world
//   dashed, black  edges that the caller added to the graph's
//   dotted         parts of one communication
//
// The file contains the positions of all nodes (`layout=nop2`), so `dot -Tsvg` only draws. Graphviz's own layouts keep
// no rows and take minutes for thousands of nodes; remove the attribute to use them.
// Throws Error(config) when `options` do not fit the graph, Error(backend) when `path` cannot be written.
void write_dot(const OrderedGraph& graph, std::ostream& out, const DotOptions& options = {});
void write_dot(const OrderedGraph& graph, const std::string& path, const DotOptions& options = {});

// Writes the same picture as SVG, with Graphviz's `dot`, which must be on the PATH. Throws Error(backend) when it is
// not or when it fails; `path` is then as it was before.
void write_svg(const OrderedGraph& graph, const std::string& path, const DotOptions& options = {});

}  // namespace stepgraph
