#pragma once
#include <optional>
#include <string>

#include "engine/graph/graph.hpp"

// What a rank does by itself between the messages of a ring or a tree, as nodes. Accesses of a list are laid end to
// end; both sides have as many bytes, and may be cut differently.
namespace stepgraph {

// to = from.
struct Copy {
  std::string name             = {};
  std::optional<LaneKind> lane = LaneKind::compute;  // none: only its accesses order it
  AccessList to                = {};
  AccessList from              = {};
  Labels labels                = {};
};
Node copy(Graph& graph, const Copy& spec);

// into = into op from, element by element, as engine/base/arithmetic.hpp has it; an average adds.
struct ReduceInto {
  std::string name             = {};
  std::optional<LaneKind> lane = LaneKind::reduce;
  AccessList into              = {};
  AccessList from              = {};
  Reduction reduction          = Reduction::sum;
  std::optional<DType> type    = {};  // of the elements; none: the buffer's
  Labels labels                = {};
};
Node reduce_into(Graph& graph, const ReduceInto& spec);

// values = values / count: the end of an average that was added up.
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
