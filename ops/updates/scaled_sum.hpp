#pragma once
#include <optional>
#include <string>

#include "engine/graph/graph.hpp"
#include "ops/layers/cross_entropy.hpp"

namespace stepgraph {

// to = factor * (values[0] + values[1] + ...), all f64, added in this order. For a few numbers, such as the losses of
// the microbatches. If `counted` is given, the factor is divided by the number of targets that count, and 0 without
// any.
struct ScaledSum {
  std::string name                      = {};
  std::string op                        = "scaled_sum";
  Access values                         = {};
  Access to                             = {};  // one number
  double factor                         = 1;
  Labels labels                         = {};
  std::optional<CountedTargets> counted = {};
};
Node scaled_sum(Graph& graph, const ScaledSum& spec);

}  // namespace stepgraph
