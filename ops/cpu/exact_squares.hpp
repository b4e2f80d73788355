#pragma once
#include <cstdint>
#include <span>

#include "engine/run/context.hpp"
#include "ops/tape/number.hpp"

// Sums of squares without rounding: elements are added as integers, so that the sum has the same bits in whatever order
// and on however many ranks it is made.
namespace stepgraph::cpu {

// A sum is limbs, each worth 2^32 times the one before it, and a count of infinities and one of NaNs. Limbs may be
// larger than 2^32: two sums are added limb by limb.
template <class T>
inline constexpr std::int64_t exact_limbs = 0;
template <>
inline constexpr std::int64_t exact_limbs<float> = 18;
template <>
inline constexpr std::int64_t exact_limbs<double> = 132;
template <class T>
inline constexpr std::int64_t exact_size = exact_limbs<T> + 2;

// Adds the squares of elements [begin, end) of rows laid end to end, to a sum of their wide type. Several threads may
// add to one sum.
template <class T>
void add_squares(const Rows<const T>& rows, std::int64_t begin, std::int64_t end, std::span<std::int64_t> sum);

// The sum, rounded once: infinity and NaN where one was added.
template <class T>
[[nodiscard]] double rounded(std::span<const std::int64_t> sum);

}  // namespace stepgraph::cpu
