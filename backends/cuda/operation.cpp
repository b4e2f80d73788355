#include "backends/cuda/operation.hpp"

#include <algorithm>
#include <vector>

#include "backends/cuda/check.hpp"
#include "backends/cuda/queues.hpp"
#include "backends/cuda/reduce.hpp"
#include "backends/cursor.hpp"
#include "engine/base/error.hpp"

namespace stepgraph::cuda {
namespace {

class Operation {
 public:
  Operation(const Exchange& exchange, cudaStream_t stream)
      : what_(exchange.what), parts_(exchange.parts), stream_(stream) {}

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
          str("copying ", size, " bytes"));
  }
  void copy(const Stretch& from, const Stretch& to) const {
    std::int64_t left = from.size;
    if (left == 0) return;
    Cursor source(from, 0), target(to, 0);
    while (left > 0) {
      const std::int64_t count = std::min({left, source.length(), target.length()});
      copy_range(source.data(), target.data(), count);
      left -= count;
      source.advance(count, left > 0);
      target.advance(count, left > 0);
    }
  }
  void copy(std::span<const Piece> from, std::span<const Piece> to) const {
    copy(PartSide(from, 1).all(), PartSide(to, 1).all());
  }

  // In pieces that are contiguous in every member.
  template <class In, class Out>
  void reduce(std::int64_t size, std::size_t num_out, const In& in_of, const Out& out_of) const {
    if (size == 0) return;
    std::vector<Cursor> from, to;
    for (std::size_t k = 0; k < num_members(); ++k) from.emplace_back(in_of(k), 0);
    for (std::size_t k = 0; k < num_out; ++k) to.emplace_back(out_of(k), 0);
    std::vector<const std::byte*> inputs(from.size());
    std::vector<std::byte*> outputs(to.size());
    for (std::int64_t left = size; left > 0;) {
      std::int64_t count = left;
      for (const auto* list : {&from, &to}) {
        for (const Cursor& cursor : *list) count = std::min(count, cursor.length());
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

  // A slice that overwrites a slice still to be sent would need a temporary copy; that is not supported.
  void all_to_all() const {
    for (std::size_t from = 0; from < num_members(); ++from) {
      for (std::size_t to = 0; to < num_members(); ++to) {
        const Stretch source = in(from).shard(to), target = out(to).shard(from);
        if (source.size > 0 && Cursor(in(to).shard(from), 0).data() == Cursor(target, 0).data() && from != to) {
          throw Error(ErrorKind::backend,
                      str("cuda: all_to_all '", what_.message, "' in place (use another output buffer on a device)"));
        }
        copy(source, target);
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

void communicate(const Exchange& exchange, std::span<Queue* const> queues) {
  Queue& leader = *queues.front();
  for (Queue* const queue : queues.subspan(1)) {
    if (queue == &leader) continue;
    check(cudaEventRecord(queue->reached(), queue->stream()), "meeting in a communication");
    check(cudaStreamWaitEvent(leader.stream(), queue->reached(), 0), "meeting in a communication");
  }
  Operation(exchange, leader.stream()).run();
  if (queues.size() == 1) return;
  check(cudaEventRecord(leader.reached(), leader.stream()), "leaving a communication");
  for (Queue* const queue : queues.subspan(1)) {
    if (queue != &leader) check(cudaStreamWaitEvent(queue->stream(), leader.reached(), 0), "leaving a communication");
  }
}

}  // namespace stepgraph::cuda
