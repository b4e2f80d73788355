#pragma once
#include <cstdint>
#include <functional>

namespace stepgraph {

// Divides [0, size) into ranges and calls f(begin, end) once for each, on up to `threads` threads; small sizes use
// fewer. Returns when all calls have returned. For work between steps: inside a step, threads belong to the executor. f
// must not throw.
void for_ranges(std::int64_t size, int threads, const std::function<void(std::int64_t begin, std::int64_t end)>& f);

}  // namespace stepgraph
