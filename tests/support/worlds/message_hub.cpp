#include "tests/support/worlds/message_hub.hpp"

#include <chrono>
#include <cstring>

#include "engine/base/error.hpp"

namespace stepgraph::testing {

MessageHub::MessageHub(int num_ranks, std::uint64_t seed)
    : num_ranks_(num_ranks), random_(seed), thread_([this] { deliver(); }) {}

MessageHub::~MessageHub() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::uint32_t MessageHub::number_of(const GroupSpec& group) {
  const std::lock_guard lock(mutex_);
  return numbers_.try_emplace({group.name, group.ranks}, static_cast<std::uint32_t>(numbers_.size())).first->second;
}

MessageHub::Id MessageHub::post(const Message& message) {
  const std::lock_guard lock(mutex_);
  const Id request = ++last_;
  Entry& entry     = entries_.try_emplace(request, Entry{.message = message}).first->second;
  if (waiting_.contains({message.address, message.sends})) {
    entry.done = true;
    entry.flaw = "two messages under way have the same key";
  } else if (const auto other = waiting_.find({message.address, !message.sends}); other != waiting_.end()) {
    entry.other                      = other->second;
    entries_.at(other->second).other = request;
    const Id the_send                = message.sends ? request : other->second;
    waiting_.erase(other);
    met_.push_back(the_send);
  } else {
    waiting_.emplace(std::pair(message.address, message.sends), request);
  }
  changed_.notify_all();
  return request;
}

// Picks among those that have met, so that messages overtake each other.
void MessageHub::deliver() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !met_.empty(); });
    if (stop_) return;
    if (random_() % 64 == 0) {  // late
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      lock.lock();
      if (met_.empty()) continue;
    }
    const std::size_t at = random_() % met_.size();
    Entry& sent          = entries_.at(met_[at]);
    Entry& received      = entries_.at(sent.other);
    met_.erase(met_.begin() + static_cast<std::ptrdiff_t>(at));
    sent.done = received.done = true;
    if (failed_.contains(sent.message.run) || failed_.contains(received.message.run)) {
      // Those that posted them may have left, and use the memory for something else.
    } else if (sent.message.size != received.message.size) {
      received.flaw = sent.flaw = str(sent.message.size, " bytes were sent, ", received.message.size, " expected");
    } else if (sent.message.size > 0) {
      std::memcpy(received.message.data, sent.message.data, sent.message.size);
    }
    changed_.notify_all();
  }
}

void MessageHub::wait(Id request) {
  std::unique_lock lock(mutex_);
  const std::uint64_t run = entries_.at(request).message.run;
  changed_.wait(lock, [&] { return failed_.contains(run) || entries_.at(request).done; });
  if (const auto failure = failed_.find(run); failure != failed_.end())
    throw Error(ErrorKind::backend, str("messages: the step failed elsewhere: ", failure->second));
  const std::string flaw = entries_.at(request).flaw;
  entries_.erase(request);
  if (!flaw.empty()) throw Error(ErrorKind::backend, str("messages: ", flaw));
}

void MessageHub::fail(std::uint64_t run, std::string_view why) {
  const std::lock_guard lock(mutex_);
  failed_.emplace(run, why);
  changed_.notify_all();
}

void MessageHub::forget(const RankSet& ranks, std::uint64_t before_run) {
  const std::lock_guard lock(mutex_);
  const auto is_old = [&](const Entry& entry) {
    const Rank poster = entry.message.sends ? entry.message.address.from : entry.message.address.to;
    return entry.message.run < before_run && ranks.contains(poster);
  };
  std::erase_if(met_, [&](Id send) {
    Entry &sent = entries_.at(send), &received = entries_.at(sent.other);
    if (!is_old(sent) && !is_old(received)) return false;
    sent.done = received.done = true;
    return true;
  });
  std::erase_if(waiting_, [&](const auto& each) { return is_old(entries_.at(each.second)); });
  std::erase_if(entries_, [&](const auto& each) { return is_old(each.second); });
}

std::size_t MessageHub::num_left() {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

bool MessageHubWorld::waits(LaneKind kind) const { return is_for_parts(kind); }

std::vector<std::uint32_t> MessageHubWorld::prepare(const Graph&, std::span<const Communicator> groups) {
  std::vector<std::uint32_t> numbers;
  for (const Communicator& group : groups) numbers.push_back(hub_.number_of(group.group));
  return numbers;
}

}  // namespace stepgraph::testing
