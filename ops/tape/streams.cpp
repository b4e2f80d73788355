#include "ops/tape/streams.hpp"

#include <algorithm>
#include <cstring>

#include "engine/base/arithmetic.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/transfers/streams.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t tile_bytes = 256 * 1024;  // a multiple of every element size

// The i-th access of the given mode.
Rows<std::byte> rows_of(const Context& context, AccessMode mode, std::size_t i) {
  if (mode == AccessMode::write) return context.write_rows<std::byte>(i);
  if (mode == AccessMode::accumulate) return context.accumulate_rows<std::byte>(i);
  const Rows<const std::byte> rows = context.read_rows<std::byte>(i);
  return {const_cast<std::byte*>(rows.data), rows.length, rows.stride, rows.count};  // the result is only read from
}

// A position in the rows of several accesses, which are concatenated. Nodes run without allocations, so it keeps no
// list of the accesses: it asks for one after another.
class Stream {
 public:
  Stream(const Context& context, AccessMode mode, std::size_t count) : context_(context), mode_(mode), count_(count) {
    enter(0);
  }
  [[nodiscard]] bool done() const { return i_ == count_; }
  [[nodiscard]] std::int64_t left() const { return now_.rows.length * now_.rows.count - now_.begin; }  // of this access
  [[nodiscard]] const cuda::Stretch& now() const { return now_; }
  // The rest of the row.
  [[nodiscard]] std::span<std::byte> row() const {
    const Rows<std::byte>& rows = now_.rows;
    return rows[now_.begin / rows.length].subspan(static_cast<std::size_t>(now_.begin % rows.length));
  }
  // The bytes from here to the end.
  [[nodiscard]] std::int64_t size() const {
    std::int64_t bytes = 0;
    for (Stream at = *this; !at.done(); at.enter(at.i_ + 1)) bytes += at.left();
    return bytes;
  }
  void advance(std::int64_t bytes) {
    while (bytes > 0) {
      const std::int64_t step = std::min(bytes, left());
      now_.begin += step;
      bytes -= step;
      if (left() == 0) enter(i_ + 1);
    }
  }

 private:
  void enter(std::size_t i) {
    for (i_ = i; i_ < count_; ++i_) {
      now_ = {.rows = rows_of(context_, mode_, i_)};
      if (left() > 0) return;
    }
  }
  const Context& context_;
  AccessMode mode_;
  std::size_t count_, i_ = 0;
  cuda::Stretch now_ = {};
};

// On a device: calls work(into, from, bytes) for stretches that lie in one access on both sides.
template <class Work>
void for_stretches(Stream into, Stream from, const Work& work) {
  while (!into.done()) {
    const std::int64_t bytes = std::min(into.left(), from.left());
    work(into.now(), from.now(), bytes);
    into.advance(bytes);
    from.advance(bytes);
  }
}

// On the CPU: calls work(into, from) for stretches that are contiguous on both sides, in parallel tiles.
template <class Work>
void for_pairs(const Context& context, const Stream& into, const Stream& from, const Work& work) {
  const std::int64_t size = into.size();
  context.parallel_for((size + tile_bytes - 1) / tile_bytes, [&](std::int64_t tile) {
    const std::int64_t begin = tile * tile_bytes;
    Stream to = into, of = from;
    to.advance(begin);
    of.advance(begin);
    for (std::int64_t left = std::min(size - begin, tile_bytes); left > 0;) {
      const auto length = std::min({to.row().size(), of.row().size(), static_cast<std::size_t>(left)});
      work(to.row().first(length), of.row().first(length));
      to.advance(static_cast<std::int64_t>(length));
      of.advance(static_cast<std::int64_t>(length));
      left -= static_cast<std::int64_t>(length);
    }
  });
}

}  // namespace

Body copy_body(StreamCounts counts) {
  return Body([counts](const Context& context) {
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device()) {
        return for_stretches({context, AccessMode::write, counts.writes}, {context, AccessMode::read, counts.reads},
                             [queue](const cuda::Stretch& to, const cuda::Stretch& of, std::int64_t bytes) {
                               cuda::copy(*queue, to, of, bytes);
                             });
      }
    }
    const Stream to(context, AccessMode::write, counts.writes), from(context, AccessMode::read, counts.reads);
    for_pairs(context, to, from, [](std::span<std::byte> into, std::span<const std::byte> of) {
      std::memmove(into.data(), of.data(), into.size());
    });
  });
}

Body reduce_body(StreamCounts counts, DType type, Reduction reduction) {
  return Body([=](const Context& context) {
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device()) {
        return for_stretches({context, AccessMode::accumulate, counts.accumulates},
                             {context, AccessMode::read, counts.reads},
                             [&](const cuda::Stretch& to, const cuda::Stretch& of, std::int64_t bytes) {
                               cuda::reduce_into(*queue, to, of, bytes, type, reduction);
                             });
      }
    }
    const Stream into(context, AccessMode::accumulate, counts.accumulates),
        from(context, AccessMode::read, counts.reads);
    for_pairs(context, into, from,
              [&](std::span<std::byte> to, std::span<const std::byte> of) { reduce_into(to, of, type, reduction); });
  });
}

Body divide_body(StreamCounts counts, DType type, std::int64_t count) {
  return Body([=](const Context& context) {
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device()) {
        const Stream all(context, AccessMode::accumulate, counts.accumulates);
        return for_stretches(all, all, [&](const cuda::Stretch& to, const cuda::Stretch&, std::int64_t bytes) {
          cuda::divide(*queue, to, bytes, type, count);
        });
      }
    }
    const Stream values(context, AccessMode::accumulate, counts.accumulates);
    for_pairs(context, values, values,
              [&](std::span<std::byte> to, std::span<const std::byte>) { divide(to, type, count); });
  });
}

std::int64_t num_bytes(const Graph& graph, const Access& access) {
  return access.region.length == Access::whole ? graph.spec(access.buffer).size_bytes : access.region.num_bytes();
}

std::int64_t num_bytes(const Graph& graph, const AccessList& accesses) {
  std::int64_t total = 0;
  for (const Access& access : accesses.view()) total += num_bytes(graph, access);
  return total;
}

AccessList cut(const Graph& graph, const AccessList& accesses, std::int64_t begin, std::int64_t length) {
  AccessList out;
  const auto add = [&](Buffer buffer, std::int64_t offset, std::int64_t bytes, std::int64_t stride, std::int64_t rows) {
    if (bytes > 0 && rows > 0)
      out.push_back(rows == 1 ? buffer.range(offset, bytes) : buffer.strided(offset, bytes, stride, rows));
  };
  for (const Access& access : accesses.view()) {
    const std::int64_t size = num_bytes(graph, access);
    const std::int64_t from = std::max<std::int64_t>(0, begin), to = std::min(size, begin + length);
    begin -= size;
    if (from >= to) continue;
    Region region = access.region;
    if (region.length == Access::whole) region = {.length = size};
    // The end of a first row, whole rows, and the beginning of a last row.
    const std::int64_t first = from / region.length, last = (to - 1) / region.length;
    const auto at = [&](std::int64_t row) { return region.offset + row * region.stride; };
    if (first == last) {
      add(access.buffer, at(first) + from % region.length, to - from, 0, 1);
      continue;
    }
    const bool whole_first = from % region.length == 0, whole_last = to % region.length == 0;
    if (!whole_first) add(access.buffer, at(first) + from % region.length, region.length - from % region.length, 0, 1);
    const std::int64_t low = whole_first ? first : first + 1, high = whole_last ? last : last - 1;
    add(access.buffer, at(low), region.length, region.stride, high - low + 1);
    if (!whole_last) add(access.buffer, at(last), to % region.length, 0, 1);
  }
  return out;
}

}  // namespace stepgraph
