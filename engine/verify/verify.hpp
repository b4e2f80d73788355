#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "engine/graph/ordered_graph.hpp"

namespace stepgraph {

class World;  // engine/run/world.hpp

// The kinds of flaws.
enum class Flaw {
  race,             // two conflicting accesses that no path inside their rank orders
  broken_lane,      // a lane that is not a chain
  mismatched_part,  // parts that meet differ in op, size, type, reduction, root, peers or message
  unmatched_part,   // a part without a match
  bad_overlap,  // a part writes bytes that it reads, where its operation cannot work in place, or writes a byte twice
  deadlock,     // a cycle of waits: edges, communicator orders, issue positions; matched parts count as one
  unwritten_read,   // a read of step memory that no node wrote
  loop_race,        // two conflicting accesses without order, in the graph followed by itself
  too_few_workers,  // more lanes that wait than workers for them; on a device, lanes with host nodes
  bad_place,        // a memory plan puts a buffer outside its arena, or on bytes of a persistent buffer
  not_on_device,    // a body that the world's device cannot run, or a host node with memory that the host cannot use
};
[[nodiscard]] std::string_view to_string(Flaw flaw) noexcept;

struct Finding {
  Flaw flaw;
  std::string message;  // names both nodes, ranks, lanes, the buffer and the bytes, or prints the cycle
};

struct VerifyOptions {
  const World* world       = nullptr;  // if set: it can run every body, and `waiting_lanes` is enough for its lanes
  int waiting_lanes        = 0;        // as in ExecutorOptions
  std::size_t max_findings = 16;
};

// Looks for flaws in a graph whose nodes are ordered by its edges. Starts from nothing: shares no code with `derive`
// and reads no clock of the edges. In a graph that holds one rank only, the other ranks are assumed to be correct.
//
// With a memory plan, several buffers can share bytes. Then every node that touches the old tenant must come before
// every node that touches the new one, in a run and from one run to the next. Anything else is a race.
[[nodiscard]] std::vector<Finding> find_flaws(const OrderedGraph& graph, const VerifyOptions& options = {});

// Throws Error(graph) that lists the flaws; silent when there are none.
void verify(const OrderedGraph& graph, const VerifyOptions& options = {});

}  // namespace stepgraph
