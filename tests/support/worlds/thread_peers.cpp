#include "tests/support/worlds/thread_peers.hpp"

#include <chrono>
#include <utility>

#include "engine/base/error.hpp"

namespace stepgraph::testing {

PeersHub::PeersHub(int num_processes)
    : up_(static_cast<std::size_t>(num_processes)), down_(static_cast<std::size_t>(num_processes)) {
  for (int process = 0; process < num_processes; ++process) members_.emplace_back(*this, process);
}

void PeersHub::fail(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (broken_.empty()) broken_ = why;
  changed_.notify_all();
}

void PeersHub::put(std::deque<Letter>& box, Letter letter) {
  const std::lock_guard lock(mutex_);
  box.push_back(std::move(letter));
  changed_.notify_all();
}

PeersHub::Letter PeersHub::take(std::deque<Letter>& box, const std::string& call) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::minutes(5), [&] { return !broken_.empty() || !box.empty(); });
  if (!broken_.empty()) throw Error(ErrorKind::config, broken_);
  if (box.empty()) throw Error(ErrorKind::backend, str("peers: ", call, ": no answer for five minutes"));
  Letter letter = std::move(box.front());
  box.pop_front();
  if (letter.call == call) return letter;
  broken_ = str("peers: one process calls ", call, ", another one ", letter.call, " (the same calls everywhere)");
  changed_.notify_all();
  throw Error(ErrorKind::config, broken_);
}

std::vector<Bytes> PeersHub::Member::gather(std::string_view subject, Bytes mine) {
  const std::string call = str("gather '", subject, "'");
  if (process_ > 0) {
    hub_.put(hub_.up_[static_cast<std::size_t>(process_)], {call, std::move(mine)});
    return {};
  }
  std::vector<Bytes> all{std::move(mine)};
  for (std::size_t from = 1; from < hub_.up_.size(); ++from) all.push_back(hub_.take(hub_.up_[from], call).bytes);
  return all;
}

// Process 0 waits for all, to see that all make this call.
Bytes PeersHub::Member::broadcast(std::string_view subject, Bytes of_first) {
  const std::string call = str("broadcast '", subject, "'");
  const auto own         = static_cast<std::size_t>(process_);
  if (process_ > 0) {
    hub_.put(hub_.up_[own], {call, {}});
    return hub_.take(hub_.down_[own], call).bytes;
  }
  for (std::size_t from = 1; from < hub_.up_.size(); ++from) static_cast<void>(hub_.take(hub_.up_[from], call));
  for (std::size_t to = 1; to < hub_.down_.size(); ++to) hub_.put(hub_.down_[to], {call, of_first});
  return of_first;
}

}  // namespace stepgraph::testing
