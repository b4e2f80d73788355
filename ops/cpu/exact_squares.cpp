#include "ops/cpu/exact_squares.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "ops/cpu/with_best.hpp"

namespace stepgraph::cpu {
namespace {

__extension__ using Wide = unsigned __int128;

// Floating-point format: a number is mantissa * 2^(exponent - 1) times the smallest positive number.
template <class T>
struct Format {
  using Bits                        = std::conditional_t<std::is_same_v<T, float>, std::uint32_t, std::uint64_t>;
  static constexpr int fraction     = std::numeric_limits<T>::digits - 1;
  static constexpr int max_exponent = 2 * std::numeric_limits<T>::max_exponent - 1;  // exponent of infinities and NaNs
  static constexpr int smallest     = std::numeric_limits<T>::min_exponent - 1 - fraction;  // log2 of the smallest
};

constexpr int limb_bits              = 32;
constexpr std::uint64_t limb_mask    = (std::uint64_t{1} << limb_bits) - 1;
constexpr std::int64_t at_a_time     = 32768;  // elements: sums of their 48-bit squares fit into 64 bits
constexpr std::size_t num_histograms = 4;      // so that neighbours of equal exponent do not form a dependency chain

template <class T>
using Limbs = std::array<std::int64_t, static_cast<std::size_t>(exact_size<T>)>;

// Adds sign * value * 2^position.
template <class T>
void add(Limbs<T>& limbs, Wide value, int position, std::int64_t sign = 1) {
  auto limb       = static_cast<std::size_t>(position / limb_bits);
  const int shift = position % limb_bits;
  // The bits that the shift pushes out at the top are added below.
  const Wide low = value << shift;
  Wide left      = low >> limb_bits;
  if (shift > 0) left |= (value >> (128 - shift)) << (128 - limb_bits);
  limbs[limb] += sign * static_cast<std::int64_t>(static_cast<std::uint64_t>(low) & limb_mask);
  for (; left != 0; left >>= limb_bits) {
    limbs[++limb] += sign * static_cast<std::int64_t>(static_cast<std::uint64_t>(left) & limb_mask);
  }
}

template <class T>
void count_special(Limbs<T>& limbs, typename Format<T>::Bits fraction) {
  ++limbs[static_cast<std::size_t>(exact_limbs<T> + (fraction != 0))];
}

// Squares of floats are exact in double. They are split into parts: the first is rounded to a multiple of a unit, the
// next one is what is left, rounded to a multiple of a smaller unit, and so on. Units are so large that a sum of
// `split_size` parts has no more bits than a double, so all sums are exact in any order, and vectors can add them.
constexpr std::int64_t split_size = 4096;                       // elements
constexpr int num_parts = 3, part_bits = 39, split_lanes = 16;  // 39 bits and those of split_size are below 53
constexpr double smaller_unit = 0x1p-40;

struct SplitSquares {
  double parts[num_parts][split_lanes] = {};
  double left[split_lanes]             = {};  // sums of what is left; not zero: the parts are not all of a square
};
void split_squares(const float* __restrict values, std::int64_t count, SplitSquares* __restrict out, double large) {
  SplitSquares squares;
  const auto one = [&](std::int64_t i, int lane) {
    const double value = values[i];
    double left = value * value, rounder = large;  // a sum with it is rounded to a multiple of the unit
// num_parts: then the loop over lanes is the innermost one.
#pragma GCC unroll 3
    for (int part = 0; part < num_parts; ++part, rounder *= smaller_unit) {
      const double rounded = (left + rounder) - rounder;
      squares.parts[part][lane] += rounded;
      left -= rounded;
    }
    squares.left[lane] += std::abs(left);
  };
  std::int64_t i = 0;
  for (; i + split_lanes <= count; i += split_lanes) {
#pragma GCC unroll 1  // GCC vectorises the loop over lanes only if it is still a loop
    for (int lane = 0; lane < split_lanes; ++lane) one(i + lane, lane);
  }
  for (int lane = 0; i < count; ++i, ++lane) one(i, lane);
  *out = squares;
}

// The bits of the element with the largest magnitude, without its sign.
std::uint32_t largest_bits(const float* values, std::int64_t count) {
  std::uint32_t largest = 0;
  with_best(values, count, &largest, [](const float* __restrict from, std::int64_t size, std::uint32_t* __restrict to) {
    std::uint32_t most = 0;
    for (std::int64_t i = 0; i < size; ++i) most = std::max(most, std::bit_cast<std::uint32_t>(from[i]) & 0x7fffffffU);
    *to = most;
  });
  return largest;
}

// False, and nothing is added: an element is not finite, or elements differ so much that three parts are not all of the
// smallest squares.
bool add_in_parts(Limbs<float>& limbs, const float* values, std::int64_t count) {
  using F                     = Format<float>;
  const std::uint32_t largest = largest_bits(values, count);
  const int exponent          = std::max(static_cast<int>(largest >> F::fraction), 1);
  if (exponent == F::max_exponent) return false;
  int position = 2 * (exponent + F::fraction) - part_bits;  // of the unit; squares are below 2^(position + part_bits)
  SplitSquares squares;
  const double large = std::ldexp(1.5, std::numeric_limits<double>::digits - 1 + position + 2 * F::smallest);
  with_best(values, count, &squares,
            [large](const float* __restrict from, std::int64_t size, SplitSquares* __restrict to) {
              split_squares(from, size, to, large);
            });
  if (std::any_of(std::begin(squares.left), std::end(squares.left), [](double left) { return left != 0; }))
    return false;
  for (const auto& part : squares.parts) {
    double sum = 0;
    for (const double lane : part) sum += lane;
    const int lowest = std::max(position, 0);  // no square has bits below
    const auto units = static_cast<std::int64_t>(std::ldexp(sum, -2 * F::smallest - lowest));
    add<float>(limbs, static_cast<Wide>(std::abs(units)), lowest, units < 0 ? -1 : 1);
    position -= part_bits + 1;  // what is left is at most half a unit
  }
  return true;
}

// Adds squares of equal exponent as integers. For float, and for types that widen to float.
template <class T>
void add_by_exponent(Limbs<float>& limbs, const T* values, std::int64_t count) {
  using F = Format<float>;
  std::array<std::array<std::uint64_t, F::max_exponent + 1>, num_histograms> sums{};
  const auto one = [&](std::int64_t i, std::size_t histogram) {
    const auto bits     = std::bit_cast<std::uint32_t>(wide(values[i]));
    const auto exponent = (bits >> F::fraction) & F::max_exponent;
    const std::uint64_t mantissa =
        (bits & ((1u << F::fraction) - 1)) | (static_cast<std::uint32_t>(exponent != 0) << F::fraction);
    sums[histogram][exponent] += mantissa * mantissa;
  };
  std::int64_t i = 0;
  for (; i + static_cast<std::int64_t>(num_histograms) <= count; i += num_histograms) {
    for (std::size_t k = 0; k < num_histograms; ++k) one(i + static_cast<std::int64_t>(k), k);
  }
  for (; i < count; ++i) one(i, 0);
  for (int exponent = 0; exponent < F::max_exponent; ++exponent) {
    Wide sum = 0;
    for (const auto& histogram : sums) sum += histogram[static_cast<std::size_t>(exponent)];
    if (sum != 0) add<float>(limbs, sum, 2 * (std::max(exponent, 1) - 1));
  }
  bool special = false;
  for (const auto& histogram : sums) special = special || histogram[F::max_exponent] != 0;
  if (!special) return;
  for (i = 0; i < count; ++i) {
    const float value = wide(values[i]);
    const auto bits   = std::bit_cast<std::uint32_t>(value);
    if (!std::isfinite(value)) count_special<float>(limbs, bits & ((1u << F::fraction) - 1));
  }
}

template <class T>
void add_stretch(Limbs<float>& limbs, const T* values, std::int64_t count, SquareSums) {
  add_by_exponent(limbs, values, count);
}
void add_stretch(Limbs<float>& limbs, const float* values, std::int64_t count, SquareSums how) {
  if (how == SquareSums::by_exponent) return add_by_exponent(limbs, values, count);
  for (std::int64_t at = 0; at < count; at += split_size) {
    const std::int64_t size = std::min(split_size, count - at);
    if (!add_in_parts(limbs, values + at, size)) add_by_exponent(limbs, values + at, size);
  }
}

void add_stretch(Limbs<double>& limbs, const double* values, std::int64_t count, SquareSums) {
  using F = Format<double>;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits              = std::bit_cast<std::uint64_t>(values[i]);
    const auto exponent          = static_cast<int>(bits >> F::fraction) & F::max_exponent;
    const std::uint64_t fraction = bits & ((std::uint64_t{1} << F::fraction) - 1);
    if (exponent == F::max_exponent) {
      count_special<double>(limbs, fraction);
      continue;
    }
    const Wide mantissa = fraction | (static_cast<std::uint64_t>(exponent != 0) << F::fraction);
    add<double>(limbs, mantissa * mantissa, 2 * (std::max(exponent, 1) - 1));
  }
}

// Carries until all limbs but the highest are below 2^32.
void carry(std::span<std::int64_t> limbs) {
  for (std::size_t i = 0; i + 1 < limbs.size(); ++i) {
    limbs[i + 1] += limbs[i] >> limb_bits;
    limbs[i] &= static_cast<std::int64_t>(limb_mask);
  }
}

}  // namespace

SquareSums best_square_sums() {
  return best_instructions() == Instructions::avx512 ? SquareSums::in_parts : SquareSums::by_exponent;
}

template <class T>
void add_squares(const Rows<const T>& rows, std::int64_t begin, std::int64_t end, std::span<std::int64_t> sum,
                 SquareSums how) {
  using Sum = stepgraph::Wide<T>;
  Limbs<Sum> limbs{};
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t row = at / rows.length, offset = at % rows.length;
    const std::int64_t count = std::min({rows.length - offset, end - at, at_a_time});
    add_stretch(limbs, rows.data + row * rows.stride + offset, count, how);
    at += count;
  }
  carry(std::span(limbs).first(exact_limbs<Sum>));
  for (std::size_t i = 0; i < limbs.size(); ++i) {
    if (limbs[i] != 0) std::atomic_ref(sum[i]).fetch_add(limbs[i], std::memory_order_relaxed);
  }
}

template <class T>
double rounded(std::span<const std::int64_t> sum) {
  Limbs<T> limbs{};
  std::copy(sum.begin(), sum.end(), limbs.begin());
  if (limbs[exact_limbs<T> + 1] != 0) return std::numeric_limits<double>::quiet_NaN();
  if (limbs[exact_limbs<T>] != 0) return std::numeric_limits<double>::infinity();
  carry(std::span(limbs).first(exact_limbs<T>));
  int top = exact_limbs<T> - 1;
  while (top >= 0 && limbs[static_cast<std::size_t>(top)] == 0) --top;
  if (top < 0) return 0;
  // Takes the highest limbs, of which the first may exceed 32 bits. Of the lower limbs, only whether any is nonzero
  // matters.
  const int lowest = std::max(top - 2, 0);
  Wide head        = 0;
  for (int i = top; i >= lowest; --i) {
    head = (head << limb_bits) | static_cast<std::uint64_t>(limbs[static_cast<std::size_t>(i)]);
  }
  bool below = false;
  for (int i = 0; i < lowest; ++i) below = below || limbs[static_cast<std::size_t>(i)] != 0;
  head |= static_cast<std::uint64_t>(below);
  return std::ldexp(static_cast<double>(head), limb_bits * lowest + 2 * Format<T>::smallest);
}

template void add_squares<float>(const Rows<const float>&, std::int64_t, std::int64_t, std::span<std::int64_t>,
                                 SquareSums);
template void add_squares<bf16>(const Rows<const bf16>&, std::int64_t, std::int64_t, std::span<std::int64_t>,
                                SquareSums);
template void add_squares<f16>(const Rows<const f16>&, std::int64_t, std::int64_t, std::span<std::int64_t>, SquareSums);
template void add_squares<double>(const Rows<const double>&, std::int64_t, std::int64_t, std::span<std::int64_t>,
                                  SquareSums);
template double rounded<float>(std::span<const std::int64_t>);
template double rounded<double>(std::span<const std::int64_t>);

}  // namespace stepgraph::cpu
