#include "backends/cuda/operation.hpp"

#include <algorithm>
#include <array>

#include "backends/cuda/check.hpp"
#include "backends/cuda/kernels.hpp"
#include "backends/cuda/queues.hpp"
#include "backends/cursor.hpp"
#include "engine/base/error.hpp"

namespace stepgraph::cuda {
namespace {

class Operation {
 public:
  Operation(const Exchange& exchange, const Queue& queue)
      : what_(exchange.what), parts_(exchange.parts), stream_(queue.stream()) {
    queue.check_current();
  }

  void run() const {
    switch (what_.op) {
      case PartOp::all_reduce:
        return reduce(
            in(0).all().size, num_members(), [&](std::size_t k) { return in(k).all(); },
            [&](std::size_t k) { return out(k).all(); });
      case PartOp::reduce:
        return reduce(
            in(0).all().size, 1, [&](std::size_t k) { return in(k).all(); },
            [&](std::size_t) { return out(root()).all(); });
      case PartOp::reduce_scatter:
        for (std::size_t shard = 0; shard < num_members(); ++shard) {
          reduce(
              out(shard).all().size, 1, [&](std::size_t k) { return in(k).shard(shard); },
              [&](std::size_t) { return out(shard).all(); });
        }
        return;
      case PartOp::all_gather:
        for (std::size_t shard = 0; shard < num_members(); ++shard) {
          for (std::size_t k = 0; k < num_members(); ++k) copy(in(shard).all(), out(k).shard(shard));
        }
        return;
      case PartOp::broadcast:
        for (std::size_t k = 0; k < num_members(); ++k) copy(in(root()).all(), out(k).all());
        return;
      case PartOp::scatter:
        for (std::size_t k = 0; k < num_members(); ++k) copy(in(root()).shard(k), out(k).all());
        return;
      case PartOp::gather:
        for (std::size_t k = 0; k < num_members(); ++k) copy(in(k).all(), out(root()).shard(k));
        return;
      case PartOp::all_to_all:
        return all_to_all();
      case PartOp::permute:
        return permute();
      case PartOp::send:
      case PartOp::recv:
        return copy(parts_[0].in, parts_[1].out);
      case PartOp::barrier:
        return;
    }
  }

 private:
  [[nodiscard]] std::size_t num_members() const noexcept { return parts_.size(); }
  [[nodiscard]] PartSide in(std::size_t member) const noexcept { return {parts_[member].in, num_members()}; }
  [[nodiscard]] PartSide out(std::size_t member) const noexcept { return {parts_[member].out, num_members()}; }
  [[nodiscard]] std::size_t root() const noexcept { return place(what_.root); }
  [[nodiscard]] std::size_t place(Rank rank) const noexcept {
    const auto at =
        std::find_if(parts_.begin(), parts_.end(), [&](const LocalPart& part) { return part.rank == rank; });
    return static_cast<std::size_t>(at - parts_.begin());
  }

  void copy_range(const std::byte* from, std::byte* to, std::int64_t size) const {
    if (from == to || size == 0) return;
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(size), cudaMemcpyDefault, stream_),
          [&] { return str("copying ", size, " bytes"); });
  }
  void copy(const Stretch& from, const Stretch& to) const {
    walk<2>(from.size, {&from, &to},
            [&](std::int64_t count, const std::array<std::byte*, 2>& at) { copy_range(at[0], at[1], count); });
  }
  void copy(std::span<const Piece> from, std::span<const Piece> to) const {
    copy(PartSide(from, 1).all(), PartSide(to, 1).all());
  }

  // Calls visit(number of bytes, addresses) for pieces that are contiguous in every stretch.
  template <std::size_t n, class Visit>
  static void walk(std::int64_t size, const std::array<const Stretch*, n>& stretches, const Visit& visit) {
    if (size == 0) return;  // a cursor needs a byte to point at
    std::array<Cursor, n> cursors;
    for (std::size_t k = 0; k < n; ++k) cursors[k] = Cursor(*stretches[k], 0);
    for (std::int64_t left = size; left > 0;) {
      std::int64_t count = left;
      std::array<std::byte*, n> at;
      for (std::size_t k = 0; k < n; ++k) {
        count = std::min(count, cursors[k].length());
        at[k] = cursors[k].data();
      }
      visit(count, at);
      left -= count;
      for (Cursor& cursor : cursors) cursor.advance(count, left > 0);
    }
  }

  // In pieces that are contiguous in every member, and element by element where a member's row ends inside one.
  template <class In, class Out>
  void reduce(std::int64_t size, std::size_t num_out, const In& in_of, const Out& out_of) const {
    if (size == 0) return;
    const auto element = static_cast<std::int64_t>(size_bytes(what_.type));
    PerMember<Cursor> from(num_members()), to(num_out);
    for (std::size_t k = 0; k < from.size(); ++k) from[k] = Cursor(in_of(k), 0);
    for (std::size_t k = 0; k < to.size(); ++k) to[k] = Cursor(out_of(k), 0);
    PerMember<const std::byte*> inputs(from.size());
    PerMember<std::byte*> outputs(to.size());
    for (std::int64_t left = size; left > 0;) {
      std::int64_t count = left;
      for (const auto* list : {&from, &to}) {
        for (const Cursor& cursor : *list) count = std::min(count, cursor.length());
      }
      count -= count % element;
      if (count == 0) {
        cuda::reduce(stream_, split(from, left), split(to, left), what_.type, what_.reduction);
        left -= element;
        continue;
      }
      for (std::size_t k = 0; k < from.size(); ++k) inputs[k] = from[k].data();
      for (std::size_t k = 0; k < to.size(); ++k) outputs[k] = to[k].data();
      cuda::reduce(stream_, inputs, outputs, count, what_.type, what_.reduction);
      left -= count;
      for (auto* list : {&from, &to}) {
        for (Cursor& cursor : *list) cursor.advance(count, left > 0);
      }
    }
  }

  // The addresses of each member's next element, byte by byte, of `left` bytes in all.
  [[nodiscard]] PerMember<SplitElement> split(PerMember<Cursor>& cursors, std::int64_t left) const {
    const std::size_t element = size_bytes(what_.type);
    PerMember<SplitElement> split(cursors.size());
    for (std::size_t k = 0; k < cursors.size(); ++k) {
      for (std::size_t byte = 0; byte < element; ++byte) {
        split[k][byte] = cursors[k].data();
        cursors[k].advance(1, static_cast<std::int64_t>(byte) + 1 < left);
      }
    }
    return split;
  }

  // By pairs of members. In place, each slice lies where the other one of the pair goes, and both have one size.
  void all_to_all() const {
    for (std::size_t a = 0; a < num_members(); ++a) {
      copy(in(a).shard(a), out(a).shard(a));
      for (std::size_t b = a + 1; b < num_members(); ++b) {
        const Stretch to_b = in(a).shard(b), from_b = out(a).shard(b), to_a = in(b).shard(a), from_a = out(b).shard(a);
        if (to_b.size != to_a.size) {
          copy(to_b, from_a);
          copy(to_a, from_b);
          continue;
        }
        walk<4>(to_b.size, {&to_b, &from_b, &to_a, &from_a},
                [&](std::int64_t count, const std::array<std::byte*, 4>& at) {
                  if (at[0] == at[1] || at[2] == at[3]) {
                    cuda::exchange(stream_, at[0], at[1], at[2], at[3], count);
                  } else {
                    copy_range(at[0], at[3], count);
                    copy_range(at[2], at[1], count);
                  }
                });
      }
    }
  }

  void permute() const {
    for (const LocalPart& part : parts_) {
      if (part.peer == Rank{-1}) continue;
      copy(part.in, parts_[place(part.peer)].out);
    }
  }

  const Graph::PartView& what_;
  std::span<const LocalPart> parts_;
  cudaStream_t stream_;
};

}  // namespace

void communicate(const Exchange& exchange) {
  const auto queue_of = [](const LocalPart& part) -> Queue& { return *static_cast<Queue*>(part.queue->owner); };
  Queue& leader       = queue_of(exchange.parts.front());
  const auto others   = exchange.parts.subspan(1);
  for (const LocalPart& part : others) {
    Queue& queue = queue_of(part);
    if (&queue == &leader) continue;
    check(cudaEventRecord(queue.reached(), queue.stream()), "meeting in a communication");
    check(cudaStreamWaitEvent(leader.stream(), queue.reached(), 0), "meeting in a communication");
  }
  leader.make_current();  // the device of another part may be current
  Operation(exchange, leader).run();
  if (others.empty()) return;
  check(cudaEventRecord(leader.reached(), leader.stream()), "leaving a communication");
  for (const LocalPart& part : others) {
    Queue& queue = queue_of(part);
    if (&queue != &leader) check(cudaStreamWaitEvent(queue.stream(), leader.reached(), 0), "leaving a communication");
  }
}

}  // namespace stepgraph::cuda
