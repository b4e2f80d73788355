#include <algorithm>
#include <cstring>

#include "engine/base/error.hpp"
#include "ops/cpu/compress.hpp"

#ifdef STEPGRAPH_HAS_LZ4
#include <lz4.h>
#endif

namespace stepgraph::cpu {
namespace {

// The table has, for each block, the end of its bytes, counted from the end of the table.
std::int64_t end_of(const std::byte* packed, std::int64_t block) {
  if (block < 0) return 0;
  std::int64_t end;
  std::memcpy(&end, packed + 8 * block, sizeof(end));
  return end;
}
void set_end(std::byte* packed, std::int64_t block, std::int64_t end) {
  std::memcpy(packed + 8 * block, &end, sizeof(end));
}

struct Stored {
  std::int64_t begin, size;
};
// Where a block lies. Throws if the table cannot be one.
Stored place_of(const LosslessRange& range, const std::byte* packed, std::int64_t block) {
  const std::int64_t begin = end_of(packed, block - 1), end = end_of(packed, block);
  if (begin >= 0 && end >= begin && end - begin <= range.size_of(block) && end <= range.raw_bytes)
    return {begin, end - begin};
  throw Error(ErrorKind::run, str("decompress: block ", block, " lies at bytes [", begin, ", ", end, ") of ",
                                  range.raw_bytes, " (the packed bytes are damaged)"));
}

#ifdef STEPGRAPH_HAS_LZ4

struct alignas(64) Block {
  std::byte bytes[lossless_block_bytes];
};

// Byte k of all elements comes before byte k + 1 of any.
template <int size>
void shuffle(const std::byte* __restrict from, std::byte* __restrict to, std::int64_t bytes) {
  const std::int64_t count = bytes / size;
  for (std::int64_t i = 0; i < count; ++i) {
    for (int k = 0; k < size; ++k) to[k * count + i] = from[i * size + k];
  }
}
template <int size>
void unshuffle(const std::byte* __restrict from, std::byte* __restrict to, std::int64_t bytes) {
  const std::int64_t count = bytes / size;
  for (std::int64_t i = 0; i < count; ++i) {
    for (int k = 0; k < size; ++k) to[i * size + k] = from[k * count + i];
  }
}

template <class Call>
void with_size(int element_bytes, const Call& call) {
  switch (element_bytes) {
    case 2:
      return call(std::integral_constant<int, 2>{});
    case 4:
      return call(std::integral_constant<int, 4>{});
    case 8:
      return call(std::integral_constant<int, 8>{});
    default:
      return call(std::integral_constant<int, 1>{});
  }
}

#else

[[noreturn]] void refuse() {
  throw Error(ErrorKind::config, "compress: lossless needs lz4, but this build has none (install liblz4-dev)");
}

#endif

}  // namespace

#ifdef STEPGRAPH_HAS_LZ4

bool has_lossless() noexcept { return true; }

void compress_block(const LosslessRange& range, const std::byte* raw, std::byte* packed, std::int64_t block) {
  const std::int64_t size = range.size_of(block), begin = block * lossless_block_bytes;
  const std::byte* from = raw + begin;
  std::byte* to         = packed + range.table_bytes() + begin;
  Block shuffled;
  with_size(range.element_bytes, [&](auto element) { shuffle<element>(from, shuffled.bytes, size); });
  const int used = LZ4_compress_default(reinterpret_cast<const char*>(shuffled.bytes), reinterpret_cast<char*>(to),
                                        static_cast<int>(size), static_cast<int>(size) - 1);
  if (used <= 0) std::memcpy(to, from, static_cast<std::size_t>(size));  // it would not become smaller
  set_end(packed, block, used <= 0 ? size : used);                       // its size, of which close_gaps makes its end
}

void decompress_block(const LosslessRange& range, std::byte* raw, const std::byte* packed, std::int64_t block) {
  const auto [begin, used] = place_of(range, packed, block);
  const std::int64_t size  = range.size_of(block);
  const std::byte* from    = packed + range.table_bytes() + begin;
  std::byte* to            = raw + block * lossless_block_bytes;
  if (used == 0) {  // never written
    std::memset(to, 0, static_cast<std::size_t>(size));
    return;
  }
  if (used == size) {
    std::memcpy(to, from, static_cast<std::size_t>(size));
    return;
  }
  Block shuffled;
  const int made = LZ4_decompress_safe(reinterpret_cast<const char*>(from), reinterpret_cast<char*>(shuffled.bytes),
                                       static_cast<int>(used), static_cast<int>(size));
  if (made != size) {
    throw Error(ErrorKind::run, str("decompress: block ", block, " of ", used, " bytes does not become ", size,
                                    " bytes (the packed bytes are damaged)"));
  }
  with_size(range.element_bytes, [&](auto element) { unshuffle<element>(shuffled.bytes, to, size); });
}

#else

bool has_lossless() noexcept { return false; }
void compress_block(const LosslessRange&, const std::byte*, std::byte*, std::int64_t) { refuse(); }
void decompress_block(const LosslessRange&, std::byte*, const std::byte*, std::int64_t) { refuse(); }

#endif

std::int64_t close_gaps(const LosslessRange& range, std::byte* packed) {
  std::byte* bytes = packed + range.table_bytes();
  std::int64_t end = 0;
  for (std::int64_t block = 0; block < range.num_blocks(); ++block) {
    const std::int64_t size = end_of(packed, block);
    std::memmove(bytes + end, bytes + block * lossless_block_bytes, static_cast<std::size_t>(size));
    end += size;
    set_end(packed, block, end);
  }
  return range.table_bytes() + end;
}

std::int64_t lossless_bytes(const LosslessRange& range, const std::byte* packed) {
  const std::int64_t last = range.num_blocks() - 1;
  if (last < 0) return 0;
  const auto [begin, size] = place_of(range, packed, last);
  return range.table_bytes() + begin + size;
}

}  // namespace stepgraph::cpu
