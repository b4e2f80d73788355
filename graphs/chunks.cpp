#include "graphs/chunks.hpp"

#include <algorithm>
#include <thread>
#include <vector>

namespace stepgraph {

void for_chunks(std::int64_t size, const std::function<void(std::int64_t begin, std::int64_t end)>& f) {
  constexpr std::int64_t worth_a_thread = 1 << 17;  // elements
  const auto cores                      = static_cast<std::int64_t>(std::max(1u, std::thread::hardware_concurrency()));
  const std::int64_t count              = std::clamp<std::int64_t>(size / worth_a_thread, 1, cores);
  const auto begin                      = [&](std::int64_t chunk) { return size * chunk / count; };
  std::vector<std::jthread> threads;  // which join when they go
  for (std::int64_t chunk = 1; chunk < count; ++chunk)
    threads.emplace_back([&f, from = begin(chunk), to = begin(chunk + 1)] { f(from, to); });
  f(0, begin(1));
}

}  // namespace stepgraph
