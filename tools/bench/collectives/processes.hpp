#pragma once
#include "tools/bench/collectives/collectives.hpp"

namespace stepgraph::bench {

// Collectives over processes, of which this is one: all run it at the same time. Times are those of process 0, which
// prints. An all-reduce is timed beside the library's own, in turn, on the same buffers. Results are checked bit by bit
// in every process.
void process_collectives(const CollectivesOptions& options);

}  // namespace stepgraph::bench
