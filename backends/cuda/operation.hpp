#pragma once
#include "engine/run/world.hpp"

namespace stepgraph::cuda {

// Enqueues one communication among members that all live here: every member's stream has reached it when the first
// one's works on it, and goes on when that is done.
void communicate(const Exchange& exchange, std::span<class Queue* const> queues);

}  // namespace stepgraph::cuda
