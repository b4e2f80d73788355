#include "backends/nccl/links.hpp"

#include <algorithm>
#include <utility>

#include "engine/base/error.hpp"

namespace stepgraph::nccl {
namespace {

constexpr auto between_looks = std::chrono::milliseconds(10);  // for errors of NCCL

// A number for the library: a group can have two communicators.
std::uint32_t number_in_library(std::uint32_t group, bool has_all_ranks) { return 2 * group + (has_all_ranks ? 1 : 0); }

}  // namespace

NcclLinks::NcclLinks(Job& job, ProcessWorld::Hooks hooks, std::chrono::milliseconds timeout, NcclWorld::Parts parts,
                     bool can_capture)
    : capture(can_capture), job_(job), hooks_(std::move(hooks)), timeout_(timeout), parts_(std::move(parts)) {}

void NcclLinks::set_capture(bool on) {
  capture = on;
  if (parts_.set_capture) parts_.set_capture(on);
}

Patience NcclLinks::patience() const { return {Clock::now() + timeout_, interrupt_.get()}; }

bool NcclLinks::is_aborted() {
  const std::lock_guard lock(mutex_);
  if (failed_) throw Error(ErrorKind::backend, *why_);
  return why_.has_value();
}

NcclLinks::Member NcclLinks::member(const NumberedGroup& group) const {
  const RankList& ranks = group.group->ranks;
  return {number_in_library(group.number, false), group.group->name, index(ranks[0]),
          member_of(*group.group, Rank{job_.rank()}), static_cast<int>(ranks.size())};
}

void NcclLinks::connect(const Connections& connections) {
  std::vector<Member> fresh;
  for (const NumberedGroup& each : connections.groups) {
    if (each.group->ranks.size() > 1) fresh.push_back(member(each));
  }
  for (const std::uint32_t number : connections.partial) {
    partial_.insert(number);
    if (job_.size() > 1)
      fresh.push_back({number_in_library(number, true), str("messages ", number), 0, job_.rank(), job_.size()});
  }
  add(std::move(fresh));
}

void NcclLinks::complete(std::span<const NumberedGroup> groups) {
  std::vector<Member> fresh;
  for (const NumberedGroup& each : groups) {
    const auto number = number_in_library(each.number, false);
    const auto is_it  = [&](const Member& known) { return known.number == number; };
    if (partial_.contains(each.number) && std::ranges::none_of(members_, is_it)) fresh.push_back(member(each));
  }
  add(std::move(fresh));
}

// All processes make the same ones in the same order: by number.
void NcclLinks::add(std::vector<Member> fresh) {
  if (fresh.empty()) return;
  std::ranges::sort(fresh, {}, &Member::number);
  members_.insert(members_.end(), fresh.begin(), fresh.end());
  std::ranges::sort(members_, {}, &Member::number);
  make_unless_aborted(fresh);
}

// The end of a peer's communicators can be seen here before the note that it has aborted its run.
void NcclLinks::make_unless_aborted(const std::vector<Member>& members) {
  if (is_aborted()) return;
  try {
    make(members);
  } catch (const Error& error) {
    if (is_aborted()) return;
    const std::string why = hooks_.explain(Rank{-1}, error.what());
    if (!is_aborted()) throw Error(ErrorKind::backend, why);
  }
}

void NcclLinks::make(const std::vector<Member>& members) {
  Store& store   = job_.store();
  const auto key = [&](const Member& each) { return str("nccl id ", generation_, " ", each.number); };
  for (const Member& each : members) {
    if (each.leader != job_.rank()) continue;
    const Library::Id id = library().make_id();
    store.set(key(each), Bytes(id.begin(), id.end()), patience());
  }
  for (const Member& each : members) {
    const Bytes bytes = store.get(key(each), patience());
    Library::New made{.number = each.number, .rank = each.rank, .size = each.size, .name = each.name};
    if (bytes.size() != made.id.size())
      throw Error(ErrorKind::backend, str("nccl: an id of ", bytes.size(), " bytes (", made.id.size(), ")"));
    std::ranges::copy(bytes, made.id.begin());
    library().make({&made, 1}, patience());
  }
}

void NcclLinks::interrupt(Interruption kind, const std::string& why) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return;
    why_    = why;
    failed_ = kind == Interruption::failed;
    interrupt_->raise(why);
  }
  library().abort();
}

void NcclLinks::recover(std::uint64_t generation) {
  static_cast<void>(is_aborted());
  generation_ = generation;
  parts_.device->drop_captures();
  library().reset();
  {
    const std::lock_guard lock(mutex_);
    if (failed_) throw Error(ErrorKind::backend, *why_);
    why_       = std::nullopt;
    interrupt_ = std::make_unique<Interrupt>();
    seen_      = std::nullopt;
  }
  // An abort of the new generation may have come before that.
  if (const auto why = hooks_.abort_reason()) interrupt(Interruption::aborted, *why);
  make_unless_aborted(members_);
}

// After an aborted run there is nothing left to end together.
void NcclLinks::close() {
  parts_.device->drop_captures();
  is_aborted() ? library().reset() : library().close();
}

NcclLinks::Target NcclLinks::target(const Exchange& exchange) const {
  const bool all = point_to_point(exchange.what.op) && partial_.contains(exchange.communicator);
  return {number_in_library(exchange.communicator, all), all};
}

void NcclLinks::fail(const std::string& problem) {
  std::optional<std::string> why;
  {
    const std::lock_guard lock(mutex_);
    why = why_;
  }
  throw Error(ErrorKind::backend, why ? *why : hooks_.explain(Rank{-1}, problem));
}

std::optional<std::string> NcclLinks::old_failure(std::chrono::milliseconds grace) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  if (now >= next_look_ && !seen_ && !why_) {
    next_look_ = now + between_looks;
    seen_      = library().failure();
    if (seen_) first_seen_ = now;
  }
  return seen_ && now - first_seen_ >= grace ? seen_ : std::nullopt;
}

}  // namespace stepgraph::nccl
