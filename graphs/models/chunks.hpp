#pragma once
#include <cstdint>
#include <functional>

namespace stepgraph {

// Calls f(begin, end) for chunks of [0, size), all of them once, on up to so many threads where there is enough to do;
// returns when all are done. For what happens outside of steps: inside, threads are the executor's. f must not throw.
void for_chunks(std::int64_t size, int threads, const std::function<void(std::int64_t begin, std::int64_t end)>& f);

}  // namespace stepgraph
