#include "graphs/models/chunks.hpp"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace stepgraph {

void for_chunks(std::int64_t size, int threads, const std::function<void(std::int64_t begin, std::int64_t end)>& f) {
  constexpr std::int64_t worth_a_thread = 1 << 17;  // elements
  const std::int64_t count              = std::clamp<std::int64_t>(size / worth_a_thread, 1, std::max(1, threads));
  const auto begin                      = [&](std::int64_t chunk) { return size * chunk / count; };
  std::vector<std::jthread> others;  // which join when they go
  std::int64_t chunk = 1;
  try {
    for (; chunk < count; ++chunk)
      others.emplace_back([&f, from = begin(chunk), to = begin(chunk + 1)] { f(from, to); });
  } catch (const std::system_error&) {  // there are no more threads: the rest is done here
  }
  f(0, begin(1));
  if (chunk < count) f(begin(chunk), size);
}

}  // namespace stepgraph
