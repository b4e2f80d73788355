#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "engine/graph/graph.hpp"

// Compression of tensors that lie in host memory or on disk. The bits are the same on the host and on a device, and do
// not depend on the number of threads.
//
// A packed range has this layout. Packed bytes that are all zero stand for elements that are all zero.
//   none              the elements
//   fp16, bf16        2 bytes for each element
//   int8, dynamic8    for each block of 256 elements, counted from the start of the range: the scale (f32), then one
//                     byte for each element. So a block has 260 bytes, the last one fewer
//   lossless          a table, then blocks of 64 KiB of elements without gaps. The table has 8 bytes for each block:
//                     where it ends, counted from the end of the table. A block whose size is its raw size is not
//                     compressed; one of size 0 is zero
//
// What is lost, where `largest` is the largest finite magnitude in a block:
//   fp16              2^-12 of a number from 6.1e-5 to 65504, 2^-25 of a smaller one; a larger one becomes infinite
//   bf16              2^-9 of a number
//   int8              half the scale, that is largest / 254, for each element. So small elements of a block become 0
//   dynamic8          6.6% of a number down to a tenth of `largest`, and 0.71% near it. About twice as much in each
//                     decade below: 12.4% down to 0.01, 22% to 0.001, 36% to 1e-4. Below 5e-7 of `largest`: 0. Signs
//                     use one of the 8 bits also for numbers that are never negative, such as second moments
// Elements of f64 are first rounded to f32. Elements of 2 bytes are rounded again when they come back.
//
// NaN and infinities: fp16 and bf16 keep them. In int8 and dynamic8 both come back as NaN, where they were; they do not
// change the scale, nor other elements.
namespace stepgraph {

enum class Compression : std::uint8_t {
  none,
  fp16,      // rounded to nearest even; larger values become infinite
  bf16,      // likewise
  int8,      // blocks of 256 elements: one f32 scale, the largest magnitude / 127; integers rounded to nearest even
  dynamic8,  // blocks of 256: one f32 scale, the largest magnitude; 8 bits with a sign and an exponent of varying
             // length (Dettmers, "8-bit Optimizers via Block-wise Quantization"), fit for running means
  lossless,  // on the host: bytes of equal significance together, then lz4, in blocks; every bit comes back
};
inline constexpr std::array all_compressions{Compression::none, Compression::fp16,     Compression::bf16,
                                             Compression::int8, Compression::dynamic8, Compression::lossless};
[[nodiscard]] std::string_view to_string(Compression kind) noexcept;

// Whether this build has a kind: lossless needs lz4. All that use it refuse it otherwise.
[[nodiscard]] bool is_built(Compression kind) noexcept;

// The kind that is really used for elements of a type: `none` where the kind saves nothing (fp16 and bf16 of 2-byte
// types, any kind but lossless of integers).
[[nodiscard]] Compression effective(Compression kind, DType type) noexcept;
// Whether bits can be lost.
[[nodiscard]] bool is_lossy(Compression kind, DType type) noexcept;
// The bytes that are reserved for `elements` of the type: of lossless those of the raw elements and of its block table.
[[nodiscard]] std::int64_t compressed_bytes(Compression kind, DType type, std::int64_t elements);
// compressed / raw bytes of many elements; 1 for lossless, whose ratio depends on the data.
[[nodiscard]] double compression_ratio(Compression kind, DType type) noexcept;
// How many raw bytes fit a budget: budget / ratio. 0 (no limit) stays 0.
[[nodiscard]] std::int64_t effective_budget(std::int64_t budget_bytes, Compression kind, DType type) noexcept;

// Nodes. `raw` is one range of elements, `packed` has compressed_bytes of them (a buffer of u8,
// from a multiple of packed_alignment on). Both are in device memory, or both in pinned memory: then the node is of
// kind host. Lossless needs pinned memory.
struct Compress {
  std::string name             = {};
  std::optional<LaneKind> lane = LaneKind::compute;
  Compression kind             = Compression::none;
  Access packed                = {};
  Access raw                   = {};
  Labels labels                = {};
  std::optional<DType> type    = {};  // of the elements of `raw`; none: the type of its buffer
};
Node compress(Graph& graph, const Compress& spec);    // packed = raw
Node decompress(Graph& graph, const Compress& spec);  // raw = packed
inline constexpr std::int64_t packed_alignment = 4;

// The same on host memory, outside of graphs: for reading and writing tensors between steps. Returns the bytes used:
// fewer than reserved where lossless has saved some. Raw bytes are aligned to their type. Throws Error(config) for
// sizes that do not fit, Error(run) for damaged bytes.
std::int64_t compress(Compression kind, DType type, std::span<const std::byte> raw, std::span<std::byte> packed);
void decompress(Compression kind, DType type, std::span<const std::byte> packed, std::span<std::byte> raw);
// The bytes used of a packed range, as `compress` returned them: for the ratio that lossless has reached.
[[nodiscard]] std::int64_t used_bytes(Compression kind, DType type, std::int64_t elements,
                                      std::span<const std::byte> packed);

}  // namespace stepgraph
