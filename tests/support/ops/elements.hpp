#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/graph/part.hpp"

// Elements of every type, one at a time and as doubles: slow, simple, and independent of the library's conversions and
// kernels, which are checked against it.
namespace stepgraph::testing {

[[nodiscard]] double decode(DType type, const std::byte* element);
void encode(DType type, double value, std::byte* element);  // round to nearest, ties to even; integers wrap around

// Reduces the members' values in order, element by element. 16-bit floats are summed as f32 and rounded once, other
// types are summed as they are; an average is the sum divided once. min and max order zeros by their sign, and give the
// quiet NaN without a sign if any value is NaN.
[[nodiscard]] std::vector<std::byte> reduce_in_order(DType type, Reduction reduction,
                                                     std::span<const std::vector<std::byte>> members);

// The content of a buffer before a step. All but `bits` and `rounding` are small integers, so that a reduction over up
// to 8 ranks is exact in every type and order.
enum class Fill : std::uint8_t {
  bits,      // any bytes, for data that is only moved
  ones,      // the number 1
  sum,       // -8 to 8
  average,   // multiples of the number of ranks that share it
  product,   // +-1, +-2
  extremes,  // for min and max
  special,   // zeros of both signs, infinities, NaNs of several bits; for min and max of floats
  rounding,  // fractions of many magnitudes: their sum depends on the order
};
[[nodiscard]] Fill fill_for(Reduction reduction) noexcept;

// Fills `bytes` for a buffer of a rank. The same `seed` gives the same bytes everywhere.
void fill(std::span<std::byte> bytes, DType type, Fill fill, Rank rank, int num_ranks, std::uint64_t seed);

// A hash with good mixing: the source of all random choices here, the same in every process.
[[nodiscard]] std::uint64_t mix(std::uint64_t value) noexcept;

}  // namespace stepgraph::testing
