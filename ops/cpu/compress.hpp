#pragma once
#include <cstddef>
#include <cstdint>

#include "engine/base/types.hpp"
#include "ops/transfers/compress.hpp"

// Kernels of ops/transfers/compress.hpp, where the layout of packed ranges is described. Raw ranges are aligned to
// their elements, packed ones to packed_alignment.
namespace stepgraph::cpu {

// Elements [begin, end) of a range; `begin` is a multiple of compress_tile. Not for lossless.
inline constexpr std::int64_t compress_tile = 16384;
void compress_elements(Compression kind, DType type, const std::byte* raw, std::byte* packed, std::int64_t begin,
                       std::int64_t end);
void decompress_elements(Compression kind, DType type, std::byte* raw, const std::byte* packed, std::int64_t begin,
                         std::int64_t end);

// Lossless, in blocks. To compress: all blocks in any order and by any threads, then `close_gaps`. Blocks are first
// written to the places that they would have without compression.
inline constexpr std::int64_t lossless_block_bytes = 64 * 1024;
struct LosslessRange {
  std::int64_t raw_bytes = 0;
  int element_bytes      = 1;
  [[nodiscard]] std::int64_t num_blocks() const noexcept {
    return (raw_bytes + lossless_block_bytes - 1) / lossless_block_bytes;
  }
  [[nodiscard]] std::int64_t table_bytes() const noexcept { return 8 * num_blocks(); }
  // The raw bytes of a block.
  [[nodiscard]] std::int64_t size_of(std::int64_t block) const noexcept {
    return block + 1 < num_blocks() ? lossless_block_bytes : raw_bytes - block * lossless_block_bytes;
  }
};
[[nodiscard]] bool has_lossless() noexcept;  // false if built without lz4: then the others throw Error(config)
void compress_block(const LosslessRange& range, const std::byte* raw, std::byte* packed, std::int64_t block);
std::int64_t close_gaps(const LosslessRange& range, std::byte* packed);  // returns the bytes used
[[nodiscard]] std::int64_t lossless_bytes(const LosslessRange& range, const std::byte* packed);  // likewise
void decompress_block(const LosslessRange& range, std::byte* raw, const std::byte* packed, std::int64_t block);

}  // namespace stepgraph::cpu
