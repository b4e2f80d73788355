#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/run/world.hpp"

// A communication as the calls of NCCL that execute it. Pure functions: nothing here knows NCCL or a device.
namespace stepgraph::nccl {

// One call. Copies and folds are work of this process alone. The others meet calls of other members: sends meet
// receives, and a collective meets the same collective of all members. `from` and `to` are device memory.
//
//   kind             from                              to                                bytes
//   copy             `rows` rows, from_stride apart    `rows` rows, to_stride apart      of a row
//   fold             inputs of all members, see below  their reduction                   of the result
//   send             the message                       not used                          of the message
//   recv             not used                          the message                       of the message
//   all_reduce       the input                         the reduction                     of the input
//   reduce           the input                         the root: the reduction           of the input
//   reduce_scatter   a shard for every member          the reduction of this one's       of one shard
//   all_gather       this member's shard               every member's shard              of one shard
//   broadcast        the root: the bytes               the bytes                         of the bytes
//
// No call has 0 bytes. Where a side is not used, its pointer is null. The collectives work in place where the table in
// engine/graph/part.hpp says so: then addresses are equal as NCCL wants them (the own shard of the other side).
struct Call {
  enum class Kind : std::uint8_t { copy, fold, send, recv, all_reduce, reduce, reduce_scatter, all_gather, broadcast };

  Kind kind             = Kind::copy;
  const std::byte* from = nullptr;
  std::byte* to         = nullptr;
  std::int64_t bytes    = 0;
  // Of elements: `bytes` are a whole number of them. Addresses of all_reduce, reduce and reduce_scatter are aligned to
  // an element; those of fold need not be. Calls that only move bytes have u8.
  DType type          = DType::u8;
  Reduction reduction = Reduction::sum;
  int peer            = -1;  // send, recv: the other member; reduce, broadcast: the root; its place in the communicator

  // copy. With one row, the strides are not used.
  std::int64_t rows = 1, from_stride = 0, to_stride = 0;

  // fold: reduces the inputs of `num_members` members, in their order, as engine/base/arithmetic.hpp defines it. That
  // of `member`, this one, is at `own`; those of the others are at `from`, `stride` apart. An input may be `to`.
  const std::byte* own = nullptr;
  std::int64_t stride  = 0;
  int member           = 0;
  int num_members      = 0;

  [[nodiscard]] const std::byte* fold_input(int place) const noexcept {
    return place == member ? own : from + (place < member ? place : place - 1) * stride;
  }
};

// First the local calls, then the group: one ncclGroupStart to ncclGroupEnd. All on one stream, which keeps the order.
struct Phase {
  std::vector<Call> local = {};  // copies and folds
  std::vector<Call> group = {};  // the others
};

struct CallOptions {
  // Reductions are exchanged and added in rank order: the bits of loopback. Otherwise NCCL reduces, where it can.
  bool exact = false;
  // Reductions that are exchanged go in chunks. What a member receives of one needs about this much workspace. Equal in
  // all processes.
  std::int64_t chunk_bytes = std::int64_t{64} << 20;
};

// Members that a fold can have.
inline constexpr int max_fold_members = 64;

// Whether NCCL reduces these: sums and averages of floating-point types. It adds in an order of its own, rounds 16-bit
// floats after every addition, and multiplies by 1 / n before an average. Everything else is exchanged and folded:
// overflow of integers, and NaN and signed zeros of min and max, would differ.
[[nodiscard]] bool is_reduced_by_nccl(Reduction reduction, DType type) noexcept;

// Why a part cannot be executed; none: it can.
[[nodiscard]] std::optional<std::string> refusal(const Graph::PartView& what, std::size_t num_members,
                                                 const CallOptions& options);

// The calls of the one part that this process has in an exchange. The k-th group of all members is made of calls that
// fit together: kind, chunks and the number of phases depend only on what all members know alike. A side that is not
// contiguous, or not aligned for a reduction of NCCL, is packed into workspace before and unpacked after. `workspace`
// is aligned to 64 bytes. Throws Error(backend) if it is smaller than workspace_bytes().
[[nodiscard]] std::vector<Phase> calls_of(const Exchange& exchange, const CallOptions& options,
                                          std::span<std::byte> workspace);

// The workspace of a part's calls: for World::part_workspace, and for tools that have no world. A multiple of 64 bytes.
// Members whose sides have the same sizes and lie in memory alike need the same, whatever their place in the group is.
// A root can need more: only the root of a reduction folds.
[[nodiscard]] std::int64_t workspace_bytes(const Graph& graph, Node part, const CallOptions& options);

// How many groups a part's calls have, at all members. A part with more than one cannot be issued together with others:
// other ranks may issue them one after another.
[[nodiscard]] int num_groups(const Graph& graph, Node part, const CallOptions& options);

}  // namespace stepgraph::nccl
