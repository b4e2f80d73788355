#include "tests/support/ops/elements.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace stepgraph::testing {
namespace {

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
template <class T>
void store(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof(T));
}

// A 16-bit float format with the given number of mantissa bits.
struct Half {
  int mantissa;
  int bias;
  [[nodiscard]] double decode(std::uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> mantissa, fraction = bits & ((1 << mantissa) - 1);
    double value;
    if (exponent == 2 * bias + 1) {
      value = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    } else if (exponent == 0) {
      value = std::ldexp(fraction, 1 - bias - mantissa);
    } else {
      value = std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa);
    }
    return bits & 0x8000 ? -value : value;
  }
  // Magnitudes grow with their bits, so the nearest one is found by bisection. `values` has decode() of all bits.
  [[nodiscard]] std::uint16_t encode(double value, const std::vector<double>& values) const {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude   = std::abs(value);
    const auto infinity      = static_cast<std::uint16_t>((2 * bias + 1) << mantissa);
    if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity | (1 << (mantissa - 1)));
    std::uint16_t below = 0, above = infinity;  // decode(below) <= magnitude < value of `above`
    while (above - below > 1) {
      const auto middle                             = static_cast<std::uint16_t>((below + above) / 2);
      (values[middle] <= magnitude ? below : above) = middle;
    }
    const double low  = values[below];
    const double high = above == infinity ? std::ldexp(1.0, bias + 1) : values[above];  // the next value if the format
                                                                                        // had no limit
    const bool up = magnitude - low > high - magnitude || (magnitude - low == high - magnitude && below % 2 == 1);
    return static_cast<std::uint16_t>(sign | (up ? above : below));
  }
};
constexpr Half f16_format{10, 15};
constexpr Half bf16_format{7, 127};

// Tables of the values of all bits: faster than computing each.
std::vector<double> all_values(const Half& format) {
  std::vector<double> values;
  for (int bits = 0; bits < 1 << 16; ++bits) values.push_back(format.decode(static_cast<std::uint16_t>(bits)));
  return values;
}
const std::vector<double>& f16_values() {
  static const std::vector<double> values = all_values(f16_format);
  return values;
}
const std::vector<double>& bf16_values() {
  static const std::vector<double> values = all_values(bf16_format);
  return values;
}

std::int64_t wrapped(double value) { return static_cast<std::int64_t>(value); }

// Rounds like the arithmetic of the type. A sum, product or quotient of two floats that is computed in double and
// rounded once more equals that of float: a double has more than twice as many bits.
double rounded(DType type, double value) {
  switch (type) {
    case DType::u8:
      return static_cast<std::uint8_t>(wrapped(value));
    case DType::i32:
      return static_cast<std::int32_t>(wrapped(value));
    case DType::i64:
      return static_cast<double>(wrapped(value));
    case DType::f64:
      return value;
    case DType::f16:
    case DType::bf16:
    case DType::f32:
      return static_cast<float>(value);
  }
  return value;
}

double extreme(double a, double b, bool largest) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  if (a == b) return std::signbit(a) == largest ? b : a;  // differ in nothing, or in the sign of a zero
  return (a > b) == largest ? a : b;
}

double fold(DType type, Reduction reduction, double total, double next) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::average:
      return rounded(type, total + next);
    case Reduction::product:
      return rounded(type, total * next);
    case Reduction::min:
    case Reduction::max:
      return extreme(total, next, reduction == Reduction::max);
  }
  return total;
}

double value_for(Fill fill, DType type, std::uint64_t random, Rank rank, int num_ranks) {
  const auto among = [&](int count) { return static_cast<double>(random % static_cast<std::uint64_t>(count)); };
  const bool sign  = type != DType::u8;
  switch (fill) {
    case Fill::sum:
      return sign ? among(17) - 8 : among(16);
    case Fill::average:
      return num_ranks * (sign ? among(7) - 3 : among(4));
    case Fill::product: {
      const double magnitude = index(rank) < 6 ? 1 + among(2) : 1;  // at most 64: fits f16 and u8
      return sign && (random >> 32) % 2 ? -magnitude : magnitude;
    }
    case Fill::ones:
      return 1;
    case Fill::extremes:
      return sign ? among(201) - 100 : among(256);
    case Fill::rounding: {
      const double fraction = 1 + static_cast<double>(random % (1u << 23)) / (1u << 23);
      return std::ldexp((random >> 32) % 2 ? -fraction : fraction, static_cast<int>((random >> 40) % 9) - 4);
    }
    case Fill::special: {
      constexpr double infinity = std::numeric_limits<double>::infinity(),
                       nan      = std::numeric_limits<double>::quiet_NaN();
      const double values[]     = {0.0, -0.0, 0.0, -0.0, 1, -1, infinity, -infinity, nan, -nan};
      return values[random % std::size(values)];
    }
    case Fill::bits:
      break;
  }
  return 0;
}

}  // namespace

double decode(DType type, const std::byte* element) {
  switch (type) {
    case DType::u8:
      return load<std::uint8_t>(element);
    case DType::i32:
      return load<std::int32_t>(element);
    case DType::i64:
      return static_cast<double>(load<std::int64_t>(element));
    case DType::f16:
      return f16_values()[load<std::uint16_t>(element)];
    case DType::bf16:
      return bf16_values()[load<std::uint16_t>(element)];
    case DType::f32:
      return load<float>(element);
    case DType::f64:
      return load<double>(element);
  }
  return 0;
}

void encode(DType type, double value, std::byte* element) {
  switch (type) {
    case DType::u8:
      return store(static_cast<std::uint8_t>(wrapped(value)), element);
    case DType::i32:
      return store(static_cast<std::int32_t>(wrapped(value)), element);
    case DType::i64:
      return store(wrapped(value), element);
    case DType::f16:
      return store(f16_format.encode(value, f16_values()), element);
    case DType::bf16:
      return store(bf16_format.encode(value, bf16_values()), element);
    case DType::f32:
      return store(static_cast<float>(value), element);
    case DType::f64:
      return store(value, element);
  }
}

std::vector<std::byte> reduce_in_order(DType type, Reduction reduction,
                                       std::span<const std::vector<std::byte>> members) {
  std::vector<std::byte> out(members[0].size());
  for (std::size_t at = 0; at < out.size(); at += size_bytes(type)) {
    double total = decode(type, members[0].data() + at);
    for (const std::vector<std::byte>& next : members.subspan(1))
      total = fold(type, reduction, total, decode(type, next.data() + at));
    if (reduction == Reduction::average) total = rounded(type, total / static_cast<double>(members.size()));
    if (std::isnan(total)) total = std::numeric_limits<double>::quiet_NaN();  // of one member: with its own bits
    encode(type, total, out.data() + at);
  }
  return out;
}

Fill fill_for(Reduction reduction) noexcept {
  switch (reduction) {
    case Reduction::sum:
      return Fill::sum;
    case Reduction::average:
      return Fill::average;
    case Reduction::product:
      return Fill::product;
    case Reduction::min:
    case Reduction::max:
      break;
  }
  return Fill::extremes;
}

void fill(std::span<std::byte> bytes, DType type, Fill fill, Rank rank, int num_ranks, std::uint64_t seed) {
  const std::uint64_t key = mix(mix(seed) + static_cast<std::uint64_t>(index(rank)));
  const std::size_t step  = fill == Fill::bits ? sizeof(std::uint64_t) : size_bytes(type);
  for (std::size_t at = 0; at < bytes.size(); at += step) {
    const std::uint64_t random = mix(key + at);
    if (fill == Fill::bits) {
      std::memcpy(bytes.data() + at, &random, std::min(step, bytes.size() - at));
    } else {
      encode(type, value_for(fill, type, random, rank, num_ranks), bytes.data() + at);
    }
  }
}

// SplitMix64's output function (Steele, Lea and Flood, 2014).
std::uint64_t mix(std::uint64_t value) noexcept {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace stepgraph::testing
