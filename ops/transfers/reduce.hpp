#pragma once
#include <optional>
#include <string>

#include "engine/graph/graph.hpp"

// Local steps of ring and tree collectives, as nodes. The accesses of a list are concatenated. Both sides have the same
// number of bytes, but may be cut differently.
namespace stepgraph {

// to = from.
struct Copy {
  std::string name             = {};
  std::optional<LaneKind> lane = LaneKind::compute;  // none: only its accesses order the node
  AccessList to                = {};
  AccessList from              = {};
  Labels labels                = {};
};
Node copy(Graph& graph, const Copy& spec);

// into = into op from, element by element, as engine/base/arithmetic.hpp defines it. An average adds.
struct ReduceInto {
  std::string name             = {};
  std::optional<LaneKind> lane = LaneKind::reduce;
  AccessList into              = {};
  AccessList from              = {};
  Reduction reduction          = Reduction::sum;
  std::optional<DType> type    = {};  // of the elements; none: the type of the buffer
  Labels labels                = {};
};
Node reduce_into(Graph& graph, const ReduceInto& spec);

// values = values / count: the last step of an average.
struct DivideBy {
  std::string name             = {};
  std::optional<LaneKind> lane = LaneKind::reduce;
  AccessList values            = {};
  std::int64_t count           = 1;
  std::optional<DType> type    = {};
  Labels labels                = {};
};
Node divide(Graph& graph, const DivideBy& spec);

}  // namespace stepgraph
