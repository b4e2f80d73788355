#include "backends/loopback/operation.hpp"

#include <algorithm>
#include <vector>

#include "backends/loopback/bytes.hpp"
#include "engine/base/arithmetic.hpp"

namespace stepgraph::loopback {
namespace {

constexpr std::int64_t tile_bytes   = 64 * 1024;   // per stretch
constexpr std::int64_t block_bytes  = 4 * 1024;    // of data assembled in scratch memory
constexpr std::int64_t shared_bytes = 256 * 1024;  // smaller communications run on one thread

// A thread's memory, kept between communications.
struct Scratch {
  std::vector<const std::byte*> in;
  std::vector<std::byte*> out;
  std::vector<std::byte> bytes;

  std::byte* block(std::size_t i) {
    const std::size_t end = (i + 1) * static_cast<std::size_t>(block_bytes);
    if (bytes.size() < end) bytes.resize(end);
    return bytes.data() + end - block_bytes;
  }
};

Scratch& scratch() {
  thread_local Scratch mine;
  return mine;
}

bool apart(const std::byte* a, const std::byte* b, std::int64_t length) {
  const auto x = reinterpret_cast<std::uintptr_t>(a), y = reinterpret_cast<std::uintptr_t>(b);
  const auto size = static_cast<std::uintptr_t>(length);
  return x + size <= y || y + size <= x;
}

// Exchanges the messages of members a and b. Each message may be sent from where the other one is received.
void exchange(const Stretch& to_b, const Stretch& from_b, const Stretch& to_a, const Stretch& from_a,
              std::int64_t length_to_b, std::int64_t length_to_a, std::int64_t begin) {
  const std::int64_t both = std::min(length_to_b, length_to_a);
  const auto away         = [&](const Stretch& sent, const Stretch& received) {
    const std::byte *x = range(sent, begin, both), *y = range(received, begin, both);
    return x && y && apart(x, y, both);
  };
  std::int64_t done = 0;
  if (both > 0 && !(away(to_b, from_b) && away(to_a, from_a))) {
    std::byte* const kept = scratch().block(0);
    for (; done < both; done += block_bytes) {
      const std::int64_t length = std::min(block_bytes, both - done);
      copy_out(to_b, begin + done, length, kept);
      copy(to_a, from_b, begin + done, length);
      copy_in(kept, from_a, begin + done, length);
    }
    done = both;
  }
  if (length_to_b > done) copy(to_b, from_a, begin + done, length_to_b - done);
  if (length_to_a > done) copy(to_a, from_b, begin + done, length_to_a - done);
}

}  // namespace

void Operation::run() const {
  switch (what_.op) {
    case PartOp::all_reduce:
      return all_reduce();
    case PartOp::reduce:
      return reduce();
    case PartOp::all_gather:
      return all_gather();
    case PartOp::reduce_scatter:
      return reduce_scatter();
    case PartOp::broadcast:
      return broadcast();
    case PartOp::scatter:
      return scatter();
    case PartOp::gather:
      return gather();
    case PartOp::all_to_all:
      return all_to_all();
    case PartOp::permute:
      return permute();
    case PartOp::barrier:
      return;
    case PartOp::send:
    case PartOp::recv:
      return message();
  }
}

std::size_t Operation::root() const noexcept {
  const auto is_root = [&](const LocalPart& part) { return part.rank == what_.root; };
  return static_cast<std::size_t>(std::find_if(parts_.begin(), parts_.end(), is_root) - parts_.begin());
}

// Calls tile(stretch, begin) for every tile of `num_stretches` stretches, the longest of `longest` bytes. The tile
// function must skip bytes beyond the end of a shorter stretch. `bytes_each`: bytes accessed per byte of a stretch.
template <class Tile>
void Operation::for_tiles(std::size_t num_stretches, std::int64_t longest, std::int64_t bytes_each,
                          const Tile& tile) const {
  const std::int64_t tiles = (longest + tile_bytes - 1) / tile_bytes;
  const std::int64_t count = tiles * static_cast<std::int64_t>(num_stretches);
  const auto one           = [&](std::int64_t i) { tile(static_cast<std::size_t>(i / tiles), i % tiles * tile_bytes); };
  if (static_cast<std::int64_t>(num_stretches) * longest * bytes_each <= shared_bytes) {
    for (std::int64_t i = 0; i < count; ++i) one(i);
  } else {
    context_.parallel_for(count, [&one](std::int64_t i) { one(i); });
  }
}

// Reduces bytes [begin, begin + length) of in(member), in group order, to those of out(0) ... out(num_out - 1).
template <class In, class Out>
void Operation::reduce_tile(std::int64_t begin, std::int64_t length, std::size_t num_out, const In& in,
                            const Out& out) const {
  Scratch& mine = scratch();
  mine.in.resize(num_members());
  mine.out.resize(num_out);
  bool ranges = true;
  for (std::size_t k = 0; k < num_members() && ranges; ++k) ranges = (mine.in[k] = range(in(k), begin, length));
  for (std::size_t k = 0; k < num_out && ranges; ++k) ranges = (mine.out[k] = range(out(k), begin, length));
  if (ranges)
    return stepgraph::reduce(mine.in, mine.out, static_cast<std::size_t>(length), what_.type, what_.reduction);

  // Rows and pieces: block by block, through scratch memory where a block is not contiguous.
  (void)mine.block(num_members() + num_out);
  for (std::int64_t done = 0; done < length; done += block_bytes) {
    const std::int64_t at = begin + done, size = std::min(block_bytes, length - done);
    for (std::size_t k = 0; k < num_members(); ++k) {
      mine.in[k] = range(in(k), at, size);
      if (mine.in[k]) continue;
      copy_out(in(k), at, size, mine.block(k));
      mine.in[k] = mine.block(k);
    }
    for (std::size_t k = 0; k < num_out; ++k) {
      mine.out[k] = range(out(k), at, size);
      if (!mine.out[k]) mine.out[k] = mine.block(num_members() + k);
    }
    stepgraph::reduce(mine.in, mine.out, static_cast<std::size_t>(size), what_.type, what_.reduction);
    for (std::size_t k = 0; k < num_out; ++k) {
      if (mine.out[k] == mine.block(num_members() + k)) copy_in(mine.out[k], out(k), at, size);
    }
  }
}

void Operation::all_reduce() const {
  const std::int64_t size = in(0).all().size;
  for_tiles(1, size, 2 * static_cast<std::int64_t>(num_members()), [&](std::size_t, std::int64_t begin) {
    reduce_tile(
        begin, std::min(tile_bytes, size - begin), num_members(), [&](std::size_t k) { return in(k).all(); },
        [&](std::size_t k) { return out(k).all(); });
  });
}

void Operation::reduce() const {
  const std::int64_t size = in(0).all().size;
  const Stretch to        = out(root()).all();
  for_tiles(1, size, 1 + static_cast<std::int64_t>(num_members()), [&](std::size_t, std::int64_t begin) {
    reduce_tile(
        begin, std::min(tile_bytes, size - begin), 1, [&](std::size_t k) { return in(k).all(); },
        [&](std::size_t) { return to; });
  });
}

void Operation::reduce_scatter() const {
  std::int64_t longest = 0;
  for (std::size_t k = 0; k < num_members(); ++k) longest = std::max(longest, out(k).all().size);
  for_tiles(num_members(), longest, 1 + static_cast<std::int64_t>(num_members()),
            [&](std::size_t shard, std::int64_t begin) {
              const Stretch to        = out(shard).all();
              const std::int64_t size = std::min(tile_bytes, to.size - begin);
              if (size <= 0) return;
              reduce_tile(
                  begin, size, 1, [&](std::size_t k) { return in(k).shard(shard); }, [&](std::size_t) { return to; });
            });
}

void Operation::broadcast() const {
  const Stretch from = in(root()).all();
  for_tiles(1, from.size, 1 + static_cast<std::int64_t>(num_members()), [&](std::size_t, std::int64_t begin) {
    for (std::size_t k = 0; k < num_members(); ++k)
      copy(from, out(k).all(), begin, std::min(tile_bytes, from.size - begin));
  });
}

void Operation::all_gather() const {
  std::int64_t longest = 0;
  for (std::size_t k = 0; k < num_members(); ++k) longest = std::max(longest, in(k).all().size);
  for_tiles(num_members(), longest, 1 + static_cast<std::int64_t>(num_members()),
            [&](std::size_t shard, std::int64_t begin) {
              const Stretch from      = in(shard).all();
              const std::int64_t size = std::min(tile_bytes, from.size - begin);
              for (std::size_t k = 0; k < num_members() && size > 0; ++k) copy(from, out(k).shard(shard), begin, size);
            });
}

void Operation::gather() const {
  const PartSide all   = out(root());
  std::int64_t longest = 0;
  for (std::size_t k = 0; k < num_members(); ++k) longest = std::max(longest, in(k).all().size);
  for_tiles(num_members(), longest, 2, [&](std::size_t shard, std::int64_t begin) {
    const Stretch from      = in(shard).all();
    const std::int64_t size = std::min(tile_bytes, from.size - begin);
    if (size > 0) copy(from, all.shard(shard), begin, size);
  });
}

void Operation::scatter() const {
  const PartSide all   = in(root());
  std::int64_t longest = 0;
  for (std::size_t k = 0; k < num_members(); ++k) longest = std::max(longest, out(k).all().size);
  for_tiles(num_members(), longest, 2, [&](std::size_t shard, std::int64_t begin) {
    const Stretch to        = out(shard).all();
    const std::int64_t size = std::min(tile_bytes, to.size - begin);
    if (size > 0) copy(all.shard(shard), to, begin, size);
  });
}

// By pairs of members, a <= b, so that the two slices of a pair can be exchanged in place.
void Operation::all_to_all() const {
  const std::size_t n  = num_members();
  std::int64_t longest = 0;
  for (std::size_t a = 0; a < n; ++a) {
    for (std::size_t b = 0; b < n; ++b) longest = std::max(longest, in(a).shard(b).size);
  }
  for_tiles(n * n, longest, 2, [&](std::size_t pair, std::int64_t begin) {
    const std::size_t a = pair / n, b = pair % n;
    if (a > b) return;
    const Stretch to_b = in(a).shard(b), to_a = in(b).shard(a);
    const std::int64_t length_to_b = std::clamp<std::int64_t>(to_b.size - begin, 0, tile_bytes);
    const std::int64_t length_to_a = std::clamp<std::int64_t>(to_a.size - begin, 0, tile_bytes);
    if (a == b) {
      if (length_to_b > 0) copy(to_b, out(a).shard(a), begin, length_to_b);
    } else {
      exchange(to_b, out(a).shard(b), to_a, out(b).shard(a), length_to_b, length_to_a, begin);
    }
  });
}

void Operation::permute() const {
  const std::size_t n  = num_members();
  std::int64_t longest = 0;
  for (std::size_t k = 0; k < n; ++k) longest = std::max(longest, in(k).all().size);
  for_tiles(n, longest, 2, [&](std::size_t member, std::int64_t begin) {
    const Stretch from      = in(member).all();
    const std::int64_t size = std::min(tile_bytes, from.size - begin);
    if (size <= 0) return;
    const auto is_peer = [&](const LocalPart& part) { return part.source == parts_[member].rank; };
    // Most permutations are rings: look at the neighbours first.
    for (std::size_t step = 1; step < n; ++step) {
      const std::size_t near = (member + (step % 2 == 1 ? (step + 1) / 2 : n - step / 2)) % n;
      if (is_peer(parts_[near])) return copy(from, out(near).all(), begin, size);
    }
  });
}

void Operation::message() const {
  const Stretch from = in(0).all(), to = out(1).all();
  for_tiles(1, from.size, 2,
            [&](std::size_t, std::int64_t begin) { copy(from, to, begin, std::min(tile_bytes, from.size - begin)); });
}

}  // namespace stepgraph::loopback
