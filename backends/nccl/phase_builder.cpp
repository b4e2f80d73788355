#include "backends/nccl/phase_builder.hpp"

#include <algorithm>

#include "backends/cursor.hpp"

namespace stepgraph::nccl {
namespace {

using Kind = Call::Kind;

constexpr std::int64_t most_stride = (std::int64_t{1} << 31) - 1;  // of the rows of a copy, as CUDA limits it

// The first byte of a stretch that is contiguous in memory, else null. Not for empty ones.
std::byte* contiguous(const Stretch& of) {
  Cursor cursor(of, 0);
  std::byte* const first = cursor.data();
  for (std::int64_t left = of.size; left > 0;) {
    if (cursor.data() != first + (of.size - left)) return nullptr;
    const std::int64_t count = std::min(left, cursor.length());
    left -= count;
    cursor.advance(count, left > 0);
  }
  return first;
}

// Adds a row to a copy, if it fits.
bool continues(Call& call, const std::byte* from, std::byte* to, std::int64_t bytes) {
  const std::int64_t from_step = call.rows == 1 ? from - call.from : call.from_stride;
  const std::int64_t to_step   = call.rows == 1 ? to - call.to : call.to_stride;
  if (call.rows == 1 && from_step == call.bytes && to_step == call.bytes) {
    call.bytes += bytes;
    return true;
  }
  const auto fits = [&](std::int64_t step) { return step >= bytes && step <= most_stride; };
  if (bytes != call.bytes || !fits(from_step) || !fits(to_step)) return false;
  if (from != call.from + call.rows * from_step || to != call.to + call.rows * to_step) return false;
  ++call.rows;
  call.from_stride = from_step;
  call.to_stride   = to_step;
  return true;
}

}  // namespace

Phase& PhaseBuilder::phase() {
  if (phases_.empty()) phases_.emplace_back();
  return phases_.back();
}

void PhaseBuilder::next_phase() {
  phases_.emplace_back();
  for (const auto& [from, to] : std::exchange(packed_, {})) copy(whole(from, to.size), to);
}

std::vector<Phase> PhaseBuilder::finish() {
  while (!phases_.empty() && phases_.back().local.empty() && phases_.back().group.empty()) phases_.pop_back();
  return std::move(phases_);
}

std::byte* PhaseBuilder::take(std::int64_t bytes) {
  std::byte* const block = workspace_ + next_;
  next_                  = round_up(next_ + bytes, alignment);
  most_                  = std::max(most_, next_);
  return block;
}

void PhaseBuilder::copy(const Stretch& from, const Stretch& to) {
  if (to.size == 0) return;
  std::vector<Call>& calls = phase().local;
  const std::size_t begin  = calls.size();
  Cursor source(from, 0), target(to, 0);
  for (std::int64_t left = to.size; left > 0;) {
    const std::int64_t bytes = std::min({left, source.length(), target.length()});
    if (source.data() != target.data()) {
      Call* const last = calls.size() > begin ? &calls.back() : nullptr;
      if (last == nullptr || !continues(*last, source.data(), target.data(), bytes))
        calls.push_back({.kind = Kind::copy, .from = source.data(), .to = target.data(), .bytes = bytes});
    }
    left -= bytes;
    source.advance(bytes, left > 0);
    target.advance(bytes, left > 0);
  }
}

Stretch PhaseBuilder::whole(std::byte* data, std::int64_t bytes) {
  piece_ = {data, {.length = bytes}};
  return {{&piece_, 1}, 0, bytes};
}

std::byte* PhaseBuilder::usable(const Stretch& of, Needs needs) const {
  std::byte* const data = contiguous(of);
  return needs == Needs::contiguous || reinterpret_cast<std::uintptr_t>(data) % element_ == 0 ? data : nullptr;
}

const std::byte* PhaseBuilder::to_read(const Stretch& of, Needs needs) {
  const std::byte* const data = usable(of, needs);
  return data != nullptr ? data : pack(of);
}

const std::byte* PhaseBuilder::pack(const Stretch& of) {
  std::byte* const block = take(of.size);
  copy(of, whole(block, of.size));
  return block;
}

std::byte* PhaseBuilder::to_write(const Stretch& of, Needs needs) {
  if (std::byte* const data = usable(of, needs); data != nullptr) return data;
  std::byte* const block = take(of.size);
  packed_.emplace_back(block, of);
  return block;
}

void PhaseBuilder::send(const std::byte* from, std::int64_t bytes, int to) {
  if (bytes > 0) phase().group.push_back({.kind = Kind::send, .from = from, .bytes = bytes, .peer = to});
}

void PhaseBuilder::receive(std::byte* to, std::int64_t bytes, int from) {
  if (bytes > 0) phase().group.push_back({.kind = Kind::recv, .to = to, .bytes = bytes, .peer = from});
}

void PhaseBuilder::send(const Stretch& bytes, int to) {
  if (bytes.size > 0) send(to_read(bytes), bytes.size, to);
}

void PhaseBuilder::receive(const Stretch& bytes, int from) {
  if (bytes.size > 0) receive(to_write(bytes), bytes.size, from);
}

}  // namespace stepgraph::nccl
