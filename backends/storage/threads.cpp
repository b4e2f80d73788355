#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>

#include "backends/storage/requests.hpp"

namespace stepgraph {
namespace {

std::optional<Failure> run_one(Request& request) {
  const Request given = request;
  while (request.size > 0) {
    const auto size     = static_cast<std::size_t>(request.size);
    const ssize_t moved = request.writes ? pwrite(request.file, request.bytes, size, request.offset)
                                         : pread(request.file, request.bytes, size, request.offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) {
      return Failure{.error  = moved < 0 ? errno : 0,
                     .writes = given.writes,
                     .offset = given.offset,
                     .size   = given.size,
                     .done   = given.size - request.size};
    }
    request.bytes += moved;
    request.offset += moved;
    request.size -= moved;
  }
  return std::nullopt;
}

}  // namespace

std::optional<Failure> run_with_threads(std::vector<Request>& requests, int threads) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;  // guards `first`
  std::optional<Failure> first;
  const auto work = [&] {
    for (std::size_t i; !failed.load() && (i = next.fetch_add(1)) < requests.size();) {
      if (const std::optional<Failure> failure = run_one(requests[i])) {
        failed.store(true);
        const std::lock_guard lock(mutex);
        if (!first) first = failure;
      }
    }
  };
  std::vector<std::jthread> helpers;
  try {
    for (std::size_t i = 1; i < std::min(requests.size(), static_cast<std::size_t>(threads)); ++i)
      helpers.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads: this one does the rest
  }
  work();
  helpers.clear();  // joins them
  return first;
}

}  // namespace stepgraph
