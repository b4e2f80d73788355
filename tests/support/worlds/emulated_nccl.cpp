#include "tests/support/worlds/emulated_nccl.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

#include "engine/base/arithmetic.hpp"
#include "engine/base/error.hpp"

namespace stepgraph::testing {
namespace {

using Kind = nccl::Call::Kind;
using nccl::Call;

[[noreturn]] void fail(const std::string& why) { throw Error(ErrorKind::backend, "nccl: " + why); }

bool is_message(Kind kind) { return kind == Kind::send || kind == Kind::recv; }
bool is_reduction(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

bool is_aligned(const std::byte* at, DType type) {
  return reinterpret_cast<std::uintptr_t>(at) % size_bytes(type) == 0;
}

void copy_bytes(const std::byte* from, std::byte* to, std::int64_t bytes) {
  if (from != to) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

struct Range {
  const std::byte* begin;
  std::int64_t bytes;
};
bool overlap(const Range& a, const Range& b) { return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes; }

}  // namespace

// --- the network -----------------------------------------------------------------------------------------------------

// Adds in the opposite order of ranks: NCCL has an order of its own.
void EmulatedNetwork::execute(std::span<const PostedPtr> members) {
  const Call& first = *members.front()->call;
  const auto n      = members.size();
  const auto call   = [&](std::size_t k) -> const Call& { return *members[k]->call; };
  const auto reduce = [&](std::int64_t offset, std::vector<std::byte*> out) {
    std::vector<const std::byte*> in;
    for (std::size_t k = n; k-- > 0;) in.push_back(call(k).from + offset);
    stepgraph::reduce(in, out, static_cast<std::size_t>(first.bytes), first.type, first.reduction);
  };
  switch (first.kind) {
    case Kind::all_reduce: {
      std::vector<std::byte*> out;
      for (std::size_t k = 0; k < n; ++k) out.push_back(call(k).to);
      return reduce(0, out);
    }
    case Kind::reduce:
      return reduce(0, {call(static_cast<std::size_t>(first.peer)).to});
    case Kind::reduce_scatter:
      for (std::size_t k = 0; k < n; ++k) reduce(static_cast<std::int64_t>(k) * first.bytes, {call(k).to});
      return;
    case Kind::all_gather:
      for (std::size_t k = 0; k < n; ++k) {
        for (std::size_t j = 0; j < n; ++j)
          copy_bytes(call(j).from, call(k).to + static_cast<std::int64_t>(j) * first.bytes, first.bytes);
      }
      return;
    case Kind::broadcast:
      for (std::size_t k = 0; k < n; ++k)
        copy_bytes(call(static_cast<std::size_t>(first.peer)).from, call(k).to, first.bytes);
      return;
    default:
      fail("no collective");
  }
}

// Completes the calls whose counterparts are there. With the mutex.
void EmulatedNetwork::match(Communicator& what) {
  if (what.broken) return;
  const auto end = [](const PostedPtr& posted, const std::string& error) {
    posted->error = error;
    posted->done  = true;
  };
  while (std::ranges::all_of(what.collectives, [](const auto& queue) { return !queue.empty(); })) {
    std::vector<PostedPtr> members;
    for (auto& queue : what.collectives) {
      members.push_back(queue.front());
      queue.pop_front();
    }
    const auto same = [&](const PostedPtr& other) {
      const Call &a = *members.front()->call, &b = *other->call;
      return a.kind == b.kind && a.bytes == b.bytes && a.type == b.type && a.reduction == b.reduction &&
             a.peer == b.peer && members.front()->joins == other->joins;
    };
    const bool fits = std::ranges::all_of(members, same);
    if (fits) execute(members);
    for (const PostedPtr& each : members) end(each, fits ? "" : "the members of a communicator make different calls");
  }
  for (auto& [pair, sends] : what.sends) {
    auto& receives = what.receives[pair];
    while (!sends.empty() && !receives.empty()) {
      const PostedPtr send = sends.front(), receive = receives.front();
      sends.pop_front();
      receives.pop_front();
      const bool fits = send->call->bytes == receive->call->bytes;
      if (fits) copy_bytes(send->call->from, receive->call->to, send->call->bytes);
      for (const PostedPtr& each : {send, receive}) end(each, fits ? "" : "a message has two sizes");
    }
  }
  changed_.notify_all();
}

// --- a process -------------------------------------------------------------------------------------------------------

template <class Holds>
void EmulatedNccl::wait(std::unique_lock<std::mutex>& lock, const Patience& patience, const std::string& doing,
                        const Holds& holds) {
  while (!holds()) {
    if (aborted_) fail(doing + ": aborted");
    if (patience.interrupt != nullptr && patience.interrupt->raised()) fail(doing + ": " + patience.interrupt->why());
    if (Clock::now() >= patience.deadline) fail(doing + ": time-out");
    network_.changed_.wait_for(lock, std::chrono::milliseconds(5));
  }
}

nccl::Library::Id EmulatedNccl::make_id() {
  const std::lock_guard lock(network_.mutex_);
  Id id{};
  const std::uint64_t number = ++network_.last_id_;
  std::memcpy(id.data(), &number, sizeof number);
  return id;
}

void EmulatedNccl::make(std::span<const New> communicators, const Patience& patience) {
  for (const New& each : communicators) {
    std::unique_lock lock(network_.mutex_);
    if (aborted_ || closed) fail("a communicator is made after an abort");
    if (joined_.contains(each.number)) fail(str("communicator ", each.number, " is made twice"));
    if (each.rank < 0 || each.rank >= each.size) fail(str("rank ", each.rank, " of ", each.size));
    const std::string doing = str("making communicator '", each.name, "'");
    if (silent_in_make) wait(lock, patience, doing, [] { return false; });
    auto& shared = network_.communicators_[each.id];
    if (!shared) {
      shared       = std::make_shared<EmulatedNetwork::Communicator>();
      shared->size = each.size;
      shared->collectives.resize(static_cast<std::size_t>(each.size));
    }
    if (shared->size != each.size) fail("members give different sizes");
    const auto mine = shared;
    ++mine->num_members;
    joined_[each.number] = {mine, each.rank};
    made.push_back({each.number, each.size, each.name});
    network_.changed_.notify_all();
    if (after_join) {
      lock.unlock();
      after_join();
      lock.lock();
    }
    wait(lock, patience, doing, [&] {
      if (mine->broken) fail(doing + ": a member is gone");
      return mine->num_members == mine->size && !aborted_;
    });
  }
}

void EmulatedNccl::check(const Grouped& each) const {
  const auto at = joined_.find(each.communicator);
  if (at == joined_.end()) fail(str("communicator ", each.communicator, " was not made"));
  if (each.queue == nullptr || each.call == nullptr) fail("a call without a queue");
  const Call& call = *each.call;
  const int size = at->second.communicator->size, rank = at->second.rank;
  if (call.bytes <= 0) fail(str("a call of ", call.bytes, " bytes"));
  if (call.bytes % static_cast<std::int64_t>(size_bytes(call.type)) != 0) fail("a call with a part of an element");
  if (is_message(call.kind) && (call.peer < 0 || call.peer >= size || call.peer == rank))
    fail(str("a message to member ", call.peer));
  const bool has_root = call.kind == Kind::reduce || call.kind == Kind::broadcast;
  if (has_root && (call.peer < 0 || call.peer >= size)) fail(str("root ", call.peer));
  const bool reads  = call.kind != Kind::recv && !(call.kind == Kind::broadcast && call.peer != rank);
  const bool writes = call.kind != Kind::send && !(call.kind == Kind::reduce && call.peer != rank);
  if (reads != (call.from != nullptr) || writes != (call.to != nullptr)) fail("an address is missing, or not used");
  if (call.kind == Kind::copy || call.kind == Kind::fold) fail("local work in a group");
  if (!is_reduction(call.kind)) return;
  if (!is_aligned(call.from, call.type) || !is_aligned(call.to, call.type)) fail("an address is not aligned");
  const bool is_barrier = call.type == DType::i32 && call.reduction == Reduction::sum && call.bytes == 4;
  if (!nccl::is_reduced_by_nccl(call.reduction, call.type) && !is_barrier)
    fail(str("no reduction ", to_string(call.reduction), " of ", call.type));
}

// The calls of a group run at the same time: no byte is written that another one uses. A collective may be in place, as
// NCCL allows it.
void EmulatedNccl::check_apart(std::span<const Grouped> calls) const {
  struct Use {
    std::size_t call;
    Range range;
    bool writes;
  };
  std::vector<Use> uses;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const Call& call   = *calls[i].call;
    const Joined& on   = joined_.at(calls[i].communicator);
    const auto all     = on.communicator->size * call.bytes;
    const auto read    = call.kind == Kind::reduce_scatter ? all : call.bytes;
    const auto written = call.kind == Kind::all_gather ? all : call.bytes;
    if (call.from != nullptr) uses.push_back({i, {call.from, read}, false});
    if (call.to != nullptr) uses.push_back({i, {call.to, written}, true});
  }
  const auto in_place = [&](const Grouped& each) {
    const std::int64_t own = joined_.at(each.communicator).rank * each.call->bytes;
    const std::byte *from = each.call->from, *to = each.call->to;
    if (each.call->kind == Kind::all_gather) return from == to + own;
    if (each.call->kind == Kind::reduce_scatter) return to == from + own;
    return from == to;
  };
  for (const Use& a : uses) {
    for (const Use& b : uses) {
      if (&a == &b || !(a.writes || b.writes) || !overlap(a.range, b.range)) continue;
      if (a.call != b.call || !in_place(calls[a.call])) fail("two calls of a group use the same bytes");
    }
  }
}

void EmulatedNccl::group(std::span<const Grouped> calls) {
  if (before_group) before_group();
  if (calls.empty()) fail("an empty group");
  if (fails_in_group.exchange(false)) fail("planned error of the library");
  std::unique_lock lock(network_.mutex_);
  const Patience patience{Clock::now() + network_.patience, nullptr};
  if (aborted_) fail("a group after an abort");
  if (silent_in_group) wait(lock, patience, "a group", [] { return false; });
  std::vector<Logged> logged;
  for (const Grouped& each : calls) {
    check(each);
    logged.push_back({each.communicator, *each.call});
  }
  check_apart(calls);
  groups.push_back(std::move(logged));
  std::vector<EmulatedNetwork::PostedPtr> posted;
  std::map<std::uint32_t, int> num_collectives;
  for (const Grouped& each : calls) {
    const Joined& on = joined_.at(each.communicator);
    const bool joins = !is_message(each.call->kind) && num_collectives[each.communicator]++ > 0;
    posted.push_back(std::make_shared<EmulatedNetwork::Posted>(EmulatedNetwork::Posted{each.call, joins}));
    if (each.call->kind == Kind::send) {
      on.communicator->sends[{on.rank, each.call->peer}].push_back(posted.back());
    } else if (each.call->kind == Kind::recv) {
      on.communicator->receives[{each.call->peer, on.rank}].push_back(posted.back());
    } else {
      on.communicator->collectives[static_cast<std::size_t>(on.rank)].push_back(posted.back());
    }
  }
  for (const Grouped& each : calls) network_.match(*joined_.at(each.communicator).communicator);
  wait(lock, patience, "a group",
       [&] { return std::ranges::all_of(posted, [](const auto& each) { return each->done; }); });
  for (const auto& each : posted) {
    if (!each->error.empty()) fail(each->error);
  }
}

void EmulatedNccl::local(const Call& call, const DeviceQueue&) {
  if (call.kind == Kind::copy) {
    for (std::int64_t row = 0; row < call.rows; ++row)
      copy_bytes(call.from + row * call.from_stride, call.to + row * call.to_stride, call.bytes);
    return;
  }
  if (call.kind != Kind::fold || call.num_members > nccl::max_fold_members) fail("no local work");
  std::vector<const std::byte*> in;
  for (int k = 0; k < call.num_members; ++k) in.push_back(call.fold_input(k));
  const std::array<std::byte*, 1> out{call.to};
  reduce(in, out, static_cast<std::size_t>(call.bytes), call.type, call.reduction);
}

std::optional<std::string> EmulatedNccl::failure() {
  if (has_failed) return "nccl: planned asynchronous error";
  return std::nullopt;
}

// Peers do not notice: their calls wait until they abort too.
void EmulatedNccl::abort() noexcept {
  const std::lock_guard lock(network_.mutex_);
  aborted_ = true;
  for (auto& [number, joined] : joined_) joined.communicator->broken = true;
  network_.changed_.notify_all();
}

bool EmulatedNccl::aborted() {
  const std::lock_guard lock(network_.mutex_);
  return aborted_;
}

void EmulatedNccl::reset() {
  abort();
  const std::lock_guard lock(network_.mutex_);
  joined_.clear();
  aborted_   = false;
  has_failed = false;
  ++num_resets;
}

void EmulatedNccl::close() {
  const std::lock_guard lock(network_.mutex_);
  if (aborted_) fail("a normal end after an abort");
  joined_.clear();
  closed = true;
}

}  // namespace stepgraph::testing
