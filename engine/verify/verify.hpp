#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"

namespace stepgraph {

struct MemoryPlan;  // engine/plan/memory_plan.hpp
class World;

// What can be wrong with a step.
enum class Flaw {
  race,             // two conflicting accesses that no path inside their rank orders
  broken_lane,      // a lane that is not a chain
  mismatched_part,  // parts that meet differ in op, size, type, reduction, root, peers or message
  unmatched_part,   // a part that nobody meets
  bad_overlap,     // a part writes what it reads, elsewhere than its operation leaves that byte, or writes a byte twice
  deadlock,        // a cycle of waits: edges, communicator orders, issue positions, matched parts being one
  unwritten_read,  // a read of step memory that nothing wrote
  loop_race,       // the graph followed by itself: two conflicting accesses that nothing orders
  too_few_workers,  // more lanes that wait than workers to wait on them
  bad_place,        // a memory plan that puts a buffer outside its arena, or on bytes of a persistent one
};
[[nodiscard]] std::string_view to_string(Flaw flaw) noexcept;

struct Finding {
  Flaw flaw;
  std::string message;  // names both nodes, ranks, lanes, the buffer and the bytes, or prints the cycle
};

struct VerifyOptions {
  const World* world       = nullptr;  // given: its waiting lanes are counted against `waiting_lanes`
  int waiting_lanes        = 0;        // workers for them, as in ExecutorOptions
  std::size_t max_findings = 16;
};

// Looks for flaws in `graph` when its nodes are ordered by `edges`. Starts from nothing: shares no code with `derive`
// and trusts no clock in `edges`. What other ranks do is taken on trust in a graph that holds one rank only.
[[nodiscard]] std::vector<Finding> find_flaws(const Graph& graph, const Edges& edges,
                                              const VerifyOptions& options = {});

// The same for a graph that runs in the arenas of a memory plan, ordered by the plan's edges. Bytes that several
// buffers share must pass from one to the next: whatever touches the old tenant comes before whatever touches the new
// one, in a run and from one run to the next. What breaks that is a race.
[[nodiscard]] std::vector<Finding> find_flaws(const Graph& graph, const MemoryPlan& plan,
                                              const VerifyOptions& options = {});

// Throws Error(graph) that lists the flaws; silent when there are none.
void verify(const Graph& graph, const VerifyOptions& options = {});
void verify(const Graph& graph, const MemoryPlan& plan, const VerifyOptions& options = {});

}  // namespace stepgraph
