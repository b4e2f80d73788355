#pragma once
#include <cstddef>
#include <functional>

// Internal to graphs/: work between steps. Inside a step, threads belong to the executor.
namespace stepgraph {

// Calls task(0) to task(count - 1), each once, on up to `threads` threads, and returns when all calls have returned.
// After an exception no new task starts, and the first one is rethrown.
void for_tasks(std::size_t count, int threads, const std::function<void(std::size_t)>& task);

}  // namespace stepgraph
