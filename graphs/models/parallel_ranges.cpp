#include "graphs/models/parallel_ranges.hpp"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace stepgraph {

void for_ranges(std::int64_t size, int threads, const std::function<void(std::int64_t begin, std::int64_t end)>& f) {
  constexpr std::int64_t worth_a_thread = 1 << 17;  // elements
  const std::int64_t count              = std::clamp<std::int64_t>(size / worth_a_thread, 1, std::max(1, threads));
  const auto begin                      = [&](std::int64_t range) { return size * range / count; };
  std::vector<std::jthread> others;  // which join when they go
  std::int64_t range = 1;
  try {
    for (; range < count; ++range)
      others.emplace_back([&f, from = begin(range), to = begin(range + 1)] { f(from, to); });
  } catch (const std::system_error&) {  // there are no more threads: the rest is done here
  }
  f(0, begin(1));
  if (range < count) f(begin(range), size);
}

}  // namespace stepgraph
