#pragma once
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

#include "engine/graph/ordered_graph.hpp"

namespace stepgraph {

// How much of a graph one box of a drawing stands for.
enum class Detail {
  stage,  // nodes of a rank and lane with equal stage, phase and microbatch; merged further until it fits a page
  layer,  // nodes of a rank and lane with equal stage, phase, microbatch and layer
  op,     // one node
};
[[nodiscard]] std::string_view to_string(Detail detail) noexcept;

struct DotOptions {
  Detail detail            = Detail::op;
  std::optional<Rank> rank = {};    // draw this rank only
  bool loop_edges          = true;  // draw the edges into the next run of the graph
  std::string title        = {};
};

// No picture at stage detail has more nodes than this, legend and caption included, whatever the graph is.
inline constexpr int max_drawn_boxes = 300;

// The graph as Graphviz DOT: time runs right, every rank is a cluster and every lane a row in it, long steps wrap like
// text. Solid edges carry data, light ones are a lane's order alone, dashed ones lead into the next run or, in red,
// keep tenants of the same bytes apart or, in blue, are the issue order of the world, dotted ones join the parts of one
// communication. The same graph gives the same bytes.
//
// Places are part of the file (`layout=nop2`), because Graphviz's own layouts keep no rows and take minutes for
// thousands of nodes: `dot -Tsvg` only draws. Delete that attribute to have Graphviz place the nodes.
// Throws Error(config) when `options` do not fit the graph, Error(backend) when `path` cannot be written.
void write_dot(const OrderedGraph& graph, std::ostream& out, const DotOptions& options = {});
void write_dot(const OrderedGraph& graph, const std::string& path, const DotOptions& options = {});

// The same picture as SVG, by Graphviz's `dot`, which must be on the PATH. Throws Error(backend) when it is not or when
// it fails. Either the whole file is there afterwards or `path` is as it was.
void write_svg(const OrderedGraph& graph, const std::string& path, const DotOptions& options = {});

}  // namespace stepgraph
