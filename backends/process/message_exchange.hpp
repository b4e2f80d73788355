#pragma once
#include <cstdint>

#include "backends/process/transport.hpp"
#include "engine/run/world.hpp"

namespace stepgraph {

// Executes an exchange by messages, for the parts of this process. `run` counts the runs of all programs, in every
// process alike. Reductions run in group order, so results have the bits of the loopback world; an all-reduce sends
// each member's shard of a sum to that member, which adds in order and sends the result to all: the bytes of a ring.
//
// A message is cut into chunks; several are under way at a time. Bytes that are contiguous are sent from and received
// into the memory of the part itself.
void exchange_by_messages(const Exchange& exchange, Transport& transport, std::uint64_t run);

}  // namespace stepgraph
