#pragma once
#include <optional>
#include <string>

#include "engine/graph.hpp"

// Reductions inside one rank, as nodes: what a ring or a tree does between its messages.
namespace stepgraph {

// into = into op from, element by element, as engine/arithmetic.hpp has it; an average adds. Both accesses are of one
// rank and of the same shape: as many rows of the same length.
struct ReduceInto {
  std::string name          = {};
  LaneKind lane             = LaneKind::reduce;
  Access into               = {};
  Access from               = {};
  Reduction reduction       = Reduction::sum;
  std::optional<DType> type = {};  // of the elements; none: the buffer's
  Labels labels             = {};
};
Node reduce_into(Graph& graph, const ReduceInto& spec);

// values = values / count: the end of an average that was added up.
struct DivideBy {
  std::string name          = {};
  LaneKind lane             = LaneKind::reduce;
  Access values             = {};
  std::int64_t count        = 1;
  std::optional<DType> type = {};
  Labels labels             = {};
};
Node divide(Graph& graph, const DivideBy& spec);

}  // namespace stepgraph
