#include "backends/loopback/world.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/context.hpp"
#include "engine/error.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t tile_bytes = 64 * 1024;

std::int64_t num_bytes(std::span<const Piece> pieces) {
  std::int64_t total = 0;
  for (const Piece& piece : pieces) total += piece.region.num_bytes();
  return total;
}

// Calls visit(pointer, offset in the tile, length) for bytes [begin, begin + length) of pieces laid end to end.
template <class Visit>
void for_ranges(std::span<const Piece> pieces, std::int64_t begin, std::int64_t length, const Visit& visit) {
  std::int64_t done = 0;
  for (const Piece& piece : pieces) {
    const std::int64_t size = piece.region.num_bytes();
    if (begin >= size) {
      begin -= size;
      continue;
    }
    while (begin < size && done < length) {
      const std::int64_t row = begin / piece.region.length, within = begin % piece.region.length;
      const std::int64_t count = std::min(piece.region.length - within, length - done);
      visit(piece.data + row * piece.region.stride + within, done, count);
      begin += count;
      done += count;
    }
    if (done == length) return;
    begin = 0;
  }
}

void copy_from(std::span<const Piece> pieces, std::int64_t begin, std::span<std::byte> tile) {
  for_ranges(pieces, begin, std::ssize(tile), [&](const std::byte* data, std::int64_t at, std::int64_t count) {
    std::memcpy(tile.data() + at, data, static_cast<std::size_t>(count));
  });
}

void copy_to(std::span<const Piece> pieces, std::int64_t begin, std::span<const std::byte> tile) {
  for_ranges(pieces, begin, std::ssize(tile), [&](std::byte* data, std::int64_t at, std::int64_t count) {
    if (data != tile.data() + at) std::memmove(data, tile.data() + at, static_cast<std::size_t>(count));
  });
}

// Integers wrap around, as they do elsewhere: no overflow is undefined.
template <class T, class Op>
T wrap(T a, T b, Op op) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(op(static_cast<std::uint64_t>(a), static_cast<std::uint64_t>(b)));
  } else {
    return op(a, b);
  }
}

template <class T>
void reduce_into(std::span<std::byte> total, std::span<const std::byte> next, Reduction reduction) {
  const auto fold = [&](auto op) {
    for (std::size_t i = 0; i < total.size(); i += sizeof(T)) {
      T a, b;
      std::memcpy(&a, total.data() + i, sizeof(T));
      std::memcpy(&b, next.data() + i, sizeof(T));
      a = op(a, b);
      std::memcpy(total.data() + i, &a, sizeof(T));
    }
  };
  switch (reduction) {
    case Reduction::sum:
    case Reduction::average:
      return fold([](T a, T b) { return wrap<T>(a, b, [](auto x, auto y) { return x + y; }); });
    case Reduction::min:
      return fold([](T a, T b) { return std::min(a, b); });
    case Reduction::max:
      return fold([](T a, T b) { return std::max(a, b); });
    case Reduction::product:
      return fold([](T a, T b) { return wrap<T>(a, b, [](auto x, auto y) { return x * y; }); });
  }
}

template <class T>
void divide(std::span<std::byte> total, int count) {
  for (std::size_t i = 0; i < total.size(); i += sizeof(T)) {
    T a;
    std::memcpy(&a, total.data() + i, sizeof(T));
    if constexpr (std::is_integral_v<T>) {
      a = static_cast<T>(static_cast<std::int64_t>(a) / count);
    } else {
      a /= static_cast<T>(count);
    }
    std::memcpy(total.data() + i, &a, sizeof(T));
  }
}

using ReduceInto = void (*)(std::span<std::byte>, std::span<const std::byte>, Reduction);
using Divide     = void (*)(std::span<std::byte>, int);
struct Arithmetic {
  ReduceInto reduce_into;
  Divide divide;
};

Arithmetic arithmetic(DType type) {
  switch (type) {
    case DType::u8:
      return {reduce_into<std::uint8_t>, divide<std::uint8_t>};
    case DType::i32:
      return {reduce_into<std::int32_t>, divide<std::int32_t>};
    case DType::i64:
      return {reduce_into<std::int64_t>, divide<std::int64_t>};
    case DType::f32:
      return {reduce_into<float>, divide<float>};
    case DType::f64:
      return {reduce_into<double>, divide<double>};
    case DType::f16:
    case DType::bf16:
      break;
  }
  throw Error(ErrorKind::config,
              str("loopback: reductions of ", type, " are not supported (f32, f64, i32, i64, u8 are)"));
}

// One communication, cut into tiles that the pool's threads share.
class Operation {
 public:
  Operation(const Context& context, const Exchange& exchange) : context_(context), exchange_(exchange) {}

  void run() {
    const std::span<const LocalPart> parts = exchange_.parts;
    switch (exchange_.what.op) {
      case PartOp::barrier:
        return;
      case PartOp::send:
      case PartOp::recv:
        return copy(parts[0].in, 0, {&parts[1], 1}, 0, num_bytes(parts[0].in));
      case PartOp::broadcast: {
        for (const LocalPart& part : parts) {
          if (part.rank == exchange_.what.root) copy(part.in, 0, parts, 0, num_bytes(part.in));
        }
        return;
      }
      case PartOp::all_gather: {
        std::int64_t offset = 0;
        for (const LocalPart& part : parts) {
          const std::int64_t size = num_bytes(part.in);
          copy(part.in, 0, parts, offset, size);
          offset += size;
        }
        return;
      }
      case PartOp::all_reduce:
        return reduce(0, parts, num_bytes(parts[0].in));
      case PartOp::reduce_scatter: {
        std::int64_t offset = 0;
        for (const LocalPart& part : parts) {
          const std::int64_t size = num_bytes(part.out);
          reduce(offset, {&part, 1}, size);
          offset += size;
        }
        return;
      }
    }
  }

 private:
  template <class Tile>
  void for_tiles(std::int64_t size, const Tile& tile) const {
    const std::int64_t count = (size + tile_bytes - 1) / tile_bytes;
    context_.parallel_for(count, [&](std::int64_t i) {
      thread_local std::vector<std::byte> scratch(2 * tile_bytes);
      const std::int64_t begin = i * tile_bytes, length = std::min(tile_bytes, size - begin);
      tile(begin, std::span(scratch).first(static_cast<std::size_t>(length)),
           std::span(scratch).subspan(tile_bytes, static_cast<std::size_t>(length)));
    });
  }

  // Bytes [from, from + size) of `in` to bytes [to, to + size) of each receiver's `out`.
  void copy(std::span<const Piece> in, std::int64_t from, std::span<const LocalPart> receivers, std::int64_t to,
            std::int64_t size) const {
    for_tiles(size, [&](std::int64_t begin, std::span<std::byte> tile, std::span<std::byte>) {
      copy_from(in, from + begin, tile);
      for (const LocalPart& receiver : receivers) copy_to(receiver.out, to + begin, tile);
    });
  }

  // Reduces bytes [from, from + size) of every member's `in`, in rank order, to the start of each receiver's `out`.
  void reduce(std::int64_t from, std::span<const LocalPart> receivers, std::int64_t size) const {
    const Arithmetic type = arithmetic(exchange_.what.type);
    for_tiles(size, [&](std::int64_t begin, std::span<std::byte> total, std::span<std::byte> next) {
      copy_from(exchange_.parts[0].in, from + begin, total);
      for (std::size_t member = 1; member < exchange_.parts.size(); ++member) {
        copy_from(exchange_.parts[member].in, from + begin, next);
        type.reduce_into(total, next, exchange_.what.reduction);
      }
      if (exchange_.what.reduction == Reduction::average) type.divide(total, static_cast<int>(exchange_.parts.size()));
      for (const LocalPart& receiver : receivers) copy_to(receiver.out, begin, total);
    });
  }

  const Context& context_;
  const Exchange& exchange_;
};

// What every member gives and takes must add up; the verifier says so before, this is the last line.
void check_sizes(const Exchange& exchange) {
  std::int64_t all_in = 0, all_out = 0;
  for (const LocalPart& part : exchange.parts) {
    all_in += num_bytes(part.in);
    all_out += num_bytes(part.out);
  }
  const auto n = static_cast<std::int64_t>(exchange.parts.size());
  for (const LocalPart& part : exchange.parts) {
    const std::int64_t in = num_bytes(part.in), out = num_bytes(part.out);
    bool fits = true;
    switch (exchange.what.op) {
      case PartOp::barrier:
        break;
      case PartOp::send:
      case PartOp::recv:
        fits = num_bytes(exchange.parts[0].in) == num_bytes(exchange.parts[1].out);
        break;
      case PartOp::broadcast:
        fits = out * n == all_out && (part.rank != exchange.what.root || in == out);
        break;
      case PartOp::all_gather:
        fits = out == all_in;
        break;
      case PartOp::all_reduce:
        fits = in == out && in * n == all_in;
        break;
      case PartOp::reduce_scatter:
        fits = in == all_out;
        break;
    }
    if (fits) continue;
    throw Error(ErrorKind::graph, str("loopback: ", to_string(exchange.what.op), " '", exchange.what.message,
                                      "' on group '", exchange.group.name, "': rank ", part.rank, " sends ", in,
                                      " and receives ", out, " bytes, all together ", all_in, " and ", all_out));
  }
}

}  // namespace

LoopbackWorld::LoopbackWorld(int num_ranks) : num_ranks_(num_ranks) {
  if (num_ranks < 1) throw Error(ErrorKind::config, str("loopback: ", num_ranks, " ranks (at least 1)"));
}

void LoopbackWorld::communicate(const Context& context, const Exchange& exchange) {
  check_sizes(exchange);
  Operation(context, exchange).run();
}

}  // namespace stepgraph
