#include "ops/tape/streams.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

#include "engine/base/arithmetic.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/streams.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t tile_bytes = 256 * 1024;  // a multiple of every element size

// The rows of several accesses, concatenated. Nodes run without allocations, so a few accesses are kept inline.
class Stream {
 public:
  void add(const Rows<std::byte>& rows) {
    if (rows.length * rows.count == 0) return;
    const Part part{rows, size_};
    size_ += rows.length * rows.count;
    if (count_ < few_.size()) {
      few_[count_] = part;
    } else {
      if (many_.empty()) many_.assign(few_.begin(), few_.end());
      many_.push_back(part);
    }
    ++count_;
  }
  [[nodiscard]] std::int64_t size() const noexcept { return size_; }

  // The rest of the row that contains byte `at`, starting there.
  [[nodiscard]] std::span<std::byte> from(std::int64_t at) const {
    const std::span<const Part> parts = many_.empty() ? std::span(few_).first(count_) : std::span(many_);
    const auto next                   = std::upper_bound(parts.begin(), parts.end(), at,
                                                         [](std::int64_t of, const Part& part) { return of < part.begin; });
    const auto& [rows, begin]         = *std::prev(next);
    const std::int64_t row = (at - begin) / rows.length, skip = (at - begin) % rows.length;
    return rows[row].subspan(static_cast<std::size_t>(skip));
  }

 private:
  struct Part {
    Rows<std::byte> rows;
    std::int64_t begin;  // in the stream
  };
  std::array<Part, 4> few_;
  std::vector<Part> many_;  // all of them, once there are more than fit inline
  std::size_t count_ = 0;
  std::int64_t size_ = 0;
};

// The i-th access of the given mode.
Rows<std::byte> rows_of(const Context& context, AccessMode mode, std::size_t i) {
  if (mode == AccessMode::write) return context.write_rows<std::byte>(i);
  if (mode == AccessMode::accumulate) return context.accumulate_rows<std::byte>(i);
  const Rows<const std::byte> rows = context.read_rows<std::byte>(i);
  return {const_cast<std::byte*>(rows.data), rows.length, rows.stride, rows.count};  // the result is only read from
}

Stream stream(const Context& context, AccessMode mode, std::size_t count) {
  Stream out;
  for (std::size_t i = 0; i < count; ++i) out.add(rows_of(context, mode, i));
  return out;
}

// The rows of several accesses, one access after another, for device kernels.
class DeviceStream {
 public:
  DeviceStream(const Context& context, AccessMode mode, std::size_t count)
      : context_(context), mode_(mode), count_(count) {
    enter(0);
  }
  [[nodiscard]] bool done() const { return i_ == count_; }
  [[nodiscard]] std::int64_t left() const { return now_.rows.length * now_.rows.count - now_.begin; }  // of this access
  [[nodiscard]] const cuda::Stretch& now() const { return now_; }
  void advance(std::int64_t bytes) {
    now_.begin += bytes;
    if (left() == 0) enter(i_ + 1);
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

// Calls work(into, from, bytes) for stretches that lie in one access on both sides.
template <class Work>
void for_stretches(DeviceStream into, DeviceStream from, const Work& work) {
  while (!into.done()) {
    const std::int64_t bytes = std::min(into.left(), from.left());
    work(into.now(), from.now(), bytes);
    into.advance(bytes);
    from.advance(bytes);
  }
}

// Calls work(into, from) for stretches that are contiguous on both sides, in parallel tiles.
template <class Work>
void for_pairs(const Context& context, const Stream& into, const Stream& from, const Work& work) {
  const std::int64_t size = into.size();
  context.parallel_for((size + tile_bytes - 1) / tile_bytes, [&](std::int64_t tile) {
    const std::int64_t end = std::min(size, (tile + 1) * tile_bytes);
    for (std::int64_t at = tile * tile_bytes; at < end;) {
      const std::span<std::byte> to = into.from(at), of = from.from(at);
      const auto length = std::min({to.size(), of.size(), static_cast<std::size_t>(end - at)});
      work(to.first(length), of.first(length));
      at += static_cast<std::int64_t>(length);
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
    const Stream to   = stream(context, AccessMode::write, counts.writes),
                 from = stream(context, AccessMode::read, counts.reads);
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
    const Stream into = stream(context, AccessMode::accumulate, counts.accumulates),
                 from = stream(context, AccessMode::read, counts.reads);
    for_pairs(context, into, from,
              [&](std::span<std::byte> to, std::span<const std::byte> of) { reduce_into(to, of, type, reduction); });
  });
}

Body divide_body(StreamCounts counts, DType type, std::int64_t count) {
  return Body([=](const Context& context) {
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device()) {
        const DeviceStream all(context, AccessMode::accumulate, counts.accumulates);
        return for_stretches(all, all, [&](const cuda::Stretch& to, const cuda::Stretch&, std::int64_t bytes) {
          cuda::divide(*queue, to, bytes, type, count);
        });
      }
    }
    const Stream values = stream(context, AccessMode::accumulate, counts.accumulates);
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
