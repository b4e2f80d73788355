#include "tests/support/worlds/hub_world.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>
#include <utility>

#include "engine/base/arithmetic.hpp"
#include "engine/base/error.hpp"
#include "engine/run/context.hpp"

namespace stepgraph::testing {
namespace {

using Bytes   = std::vector<std::byte>;
using Letters = std::vector<Hub::Letter>;  // by member

template <class Visit>
void for_rows(std::span<const Piece> pieces, const Visit& visit) {
  for (const Piece& piece : pieces) {
    for (std::int64_t row = 0; row < piece.region.count; ++row)
      visit(piece.data + row * piece.region.stride, static_cast<std::size_t>(piece.region.length));
  }
}

std::int64_t num_bytes(std::span<const Piece> pieces) {
  std::int64_t total = 0;
  for (const Piece& piece : pieces) total += piece.region.num_bytes();
  return total;
}

Bytes pack(std::span<const Piece> pieces) {
  Bytes bytes;
  for_rows(pieces, [&](const std::byte* data, std::size_t size) { bytes.insert(bytes.end(), data, data + size); });
  return bytes;
}

void unpack(const Bytes& bytes, std::span<const Piece> pieces) {
  if (std::ssize(bytes) != num_bytes(pieces))
    throw Error(ErrorKind::backend, str("hub: ", bytes.size(), " bytes came, ", num_bytes(pieces), " were expected"));
  const std::byte* next = bytes.data();
  for_rows(pieces, [&](std::byte* data, std::size_t size) {
    if (size > 0) std::memcpy(data, next, size);
    next += size;
  });
}

// The library's reduction is in the order of its inputs: that of the group.
Bytes reduce(const Letters& letters, const Graph::PartView& what) {
  Bytes out(letters[0].bytes.size());
  std::vector<const std::byte*> in;
  for (const Hub::Letter& letter : letters) in.push_back(letter.bytes.data());
  stepgraph::reduce(in, std::array{out.data()}, out.size(), what.type, what.reduction);
  return out;
}

// The next `size` bytes of a letter.
Bytes cut_off(const Bytes& bytes, std::int64_t& begin, std::int64_t size) {
  const auto first = bytes.begin() + std::exchange(begin, begin + size);
  return Bytes(first, first + size);
}

// Computes the outputs of all members from the letters of all members.
std::vector<Bytes> work_out(const Graph::PartView& what, const GroupSpec& group, const Letters& letters) {
  const std::size_t n = letters.size();
  const auto member   = [&](Rank rank) {
    return static_cast<std::size_t>(std::find(group.ranks.begin(), group.ranks.end(), rank) - group.ranks.begin());
  };
  const auto share_out = [&](const Bytes& bytes, std::vector<Bytes>& out) {
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < n; ++i) out[i] = cut_off(bytes, begin, letters[i].wanted);
  };
  std::vector<Bytes> out(n);
  switch (what.op) {
    case PartOp::all_reduce:
      std::fill(out.begin(), out.end(), reduce(letters, what));
      break;
    case PartOp::reduce:
      out[member(what.root)] = reduce(letters, what);
      break;
    case PartOp::reduce_scatter:
      share_out(reduce(letters, what), out);
      break;
    case PartOp::scatter:
      share_out(letters[member(what.root)].bytes, out);
      break;
    case PartOp::broadcast:
      std::fill(out.begin(), out.end(), letters[member(what.root)].bytes);
      break;
    case PartOp::all_gather:
    case PartOp::gather:
      for (std::size_t i = 0; i < n; ++i) {
        if (what.op == PartOp::gather && group.ranks[i] != what.root) continue;
        for (const Hub::Letter& letter : letters) out[i].insert(out[i].end(), letter.bytes.begin(), letter.bytes.end());
      }
      break;
    case PartOp::all_to_all:
      for (const Hub::Letter& letter : letters) {
        std::int64_t begin = 0;
        for (std::size_t to = 0; to < n; ++to) {
          const bool one_each = letter.piece_sizes.size() == n;
          const std::int64_t size =
              one_each ? letter.piece_sizes[to] : std::ssize(letter.bytes) / static_cast<std::int64_t>(n);
          const Bytes slice = cut_off(letter.bytes, begin, size);
          out[to].insert(out[to].end(), slice.begin(), slice.end());
        }
      }
      break;
    case PartOp::permute:
      for (std::size_t i = 0; i < n; ++i) {
        if (letters[i].source != Rank{-1}) out[i] = letters[member(letters[i].source)].bytes;
      }
      break;
    case PartOp::barrier:
    case PartOp::send:
    case PartOp::recv:
      break;
  }
  return out;
}

}  // namespace

void Hub::put(const Box& box, Letter letter) {
  const std::lock_guard lock(mutex_);
  boxes_[box].push_back(std::move(letter));
  changed_.notify_all();
}

Hub::Letter Hub::take(const Box& box) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failed_.contains(box.step) || boxes_.contains(box); });
  if (const auto failure = failed_.find(box.step); failure != failed_.end())
    throw Error(ErrorKind::backend, str("hub: the step failed elsewhere: ", failure->second));
  const auto found = boxes_.find(box);
  Letter letter    = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) boxes_.erase(found);
  return letter;
}

void Hub::fail(std::int64_t step, std::string_view why) {
  const std::lock_guard lock(mutex_);
  failed_.emplace(step, why);
  changed_.notify_all();
}

void Hub::throw_away(Rank to, std::int64_t before_step) {
  const std::lock_guard lock(mutex_);
  std::erase_if(boxes_, [&](const auto& entry) { return entry.first.to == to && entry.first.step < before_step; });
}

bool HubWorld::waits(LaneKind kind) const { return is_for_parts(kind); }

// All ranks run the same steps, so a counter identifies them. Letters carry it, so that letters of a failed step stay
// in its boxes.
void HubWorld::begin_step(std::shared_ptr<const RunView>) {
  ++step_;
  for (const Rank rank : ranks_) hub_.throw_away(rank, step_);
}

void HubWorld::abort(std::string_view why) noexcept { hub_.fail(step_, why); }

// Group numbers differ between slices; a group's name and ranks, and the turn, are the same everywhere.
Hub::Box HubWorld::box(const Exchange& exchange, const char* use, Rank from, Rank to) const {
  std::string channel = str(use, " ", exchange.turn, " ", exchange.group.name);
  for (const Rank rank : exchange.group.ranks) channel += str(" ", rank);
  return {step_, std::move(channel), from, to};
}

void HubWorld::communicate(const Context& context, const Exchange& exchange) {
  const Graph::PartView& what = exchange.what;
  const auto take             = [&](const Hub::Box& from, const std::string& about) {
    context.waiting_for(str("a letter from rank ", from.from, " about ", about));
    Hub::Letter letter = hub_.take(from);
    if (letter.about == about) return letter;
    throw Error(ErrorKind::backend,
                            str("hub: rank ", from.from, " sent '", letter.about, "' (expected '", about, "')"));
  };
  const std::string about = str(point_to_point(what.op) ? "message" : to_string(what.op), " ", what.message);
  if (point_to_point(what.op)) {  // the sender, the receiver, or both of them
    const LocalPart &front = exchange.parts.front(), &back = exchange.parts.back();
    if (what.op == PartOp::send)
      hub_.put(box(exchange, "message", front.rank, what.peer), {.about = about, .bytes = pack(front.in)});
    const Rank from = what.op == PartOp::send ? front.rank : what.peer;
    if (back.rank != from) unpack(take(box(exchange, "message", from, back.rank), about).bytes, back.out);
    return;
  }
  const Rank first = exchange.group.ranks.front();
  for (const LocalPart& part : exchange.parts) {
    Hub::Letter mine{.about = about, .bytes = pack(part.in), .source = part.source, .wanted = num_bytes(part.out)};
    for (const Piece& piece : part.in) mine.piece_sizes.push_back(piece.region.num_bytes());
    hub_.put(box(exchange, "to first", part.rank, first), std::move(mine));
  }
  if (is_local(first)) {
    Letters letters;
    for (const Rank rank : exchange.group.ranks) letters.push_back(take(box(exchange, "to first", rank, first), about));
    std::vector<Bytes> out = work_out(what, exchange.group, letters);
    for (std::size_t i = 0; i < out.size(); ++i)
      hub_.put(box(exchange, "from first", first, exchange.group.ranks[i]),
               {.about = about, .bytes = std::move(out[i])});
  }
  for (const LocalPart& part : exchange.parts)
    unpack(take(box(exchange, "from first", first, part.rank), about).bytes, part.out);
}

std::vector<std::vector<std::string>> on_every_process(
    const std::vector<RankSet>& processes, const std::function<std::vector<std::string>(const RankSet&)>& process) {
  std::vector<std::vector<std::string>> results(processes.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < processes.size(); ++i)
    threads.emplace_back([&, i] { results[i] = process(processes[i]); });
  for (std::thread& thread : threads) thread.join();
  return results;
}

}  // namespace stepgraph::testing
