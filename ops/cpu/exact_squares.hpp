#pragma once
#include <cstdint>
#include <span>

#include "engine/run/context.hpp"
#include "ops/tape/number.hpp"

// Sums of squares without rounding. Elements are added as integers, so the bits of the sum do not depend on the order
// or on the number of ranks.
namespace stepgraph::cpu {

// A sum consists of limbs, each worth 2^32 times the one before, plus a count of infinities and a count of NaNs. Limbs
// may exceed 2^32: two sums are added limb by limb.
template <class T>
inline constexpr std::int64_t exact_limbs = 0;
template <>
inline constexpr std::int64_t exact_limbs<float> = 18;
template <>
inline constexpr std::int64_t exact_limbs<double> = 132;
template <class T>
inline constexpr std::int64_t exact_size = exact_limbs<T> + 2;

// How squares of floats are added; the sum is the same. By exponent: as integers, one after the other. In parts: as
// doubles, which suits wide vectors.
enum class SquareSums { by_exponent, in_parts };
[[nodiscard]] SquareSums best_square_sums();

// Adds the squares of elements [begin, end) of concatenated rows to a sum of their wide type. Several threads may add
// to the same sum.
template <class T>
void add_squares(const Rows<const T>& rows, std::int64_t begin, std::int64_t end, std::span<std::int64_t> sum,
                 SquareSums how = best_square_sums());

// The sum, rounded once. Infinity or NaN if any element was.
template <class T>
[[nodiscard]] double rounded(std::span<const std::int64_t> sum);

}  // namespace stepgraph::cpu
