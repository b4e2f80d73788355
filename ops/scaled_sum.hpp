#pragma once
#include <string>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// to = factor * (values[0] + values[1] + ...), all f64, added in this order. For a few numbers, such as the losses of
// the microbatches.
struct ScaledSum {
  std::string name = {};
  std::string op   = "scaled_sum";
  Access values    = {};
  Access to        = {};  // one number
  double factor    = 1;
  Labels labels    = {};
};
Node scaled_sum(Graph& graph, const ScaledSum& spec);

}  // namespace stepgraph
