#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#include "engine/base/half.hpp"

// Packs operands of the bf16 products into panels of `width` lanes. A panel is a sequence of blocks of `group` steps of
// k; in a block, the steps of each lane are together. Missing lanes and steps are zero. Vectors are those of the
// compiler's extension, so the same code is compiled for every processor. Everything is in an anonymous namespace,
// because each file that includes this header compiles it for other instructions.
namespace stepgraph::cpu {
namespace {

constexpr std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t rounded_up(std::int64_t size, std::int64_t to) { return (size + to - 1) / to * to; }

// A vector of `bytes` bytes of integers of `unit` bytes.
template <int unit>
struct Integer;
template <>
struct Integer<2> {
  using type = std::uint16_t;
};
template <>
struct Integer<4> {
  using type = std::uint32_t;
};
template <>
struct Integer<8> {
  using type = std::uint64_t;
};
template <int unit, int bytes>
struct Units {
  typedef typename Integer<unit>::type type __attribute__((vector_size(bytes)));  // NOLINT
  static constexpr int count = bytes / unit;
};

// The lower or upper halves of a and b, element by element in turn.
template <int half, int count, class V, int... i>
[[gnu::always_inline]] inline V zip(V a, V b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (half * count / 2 + i / 2 + i % 2 * count)...);
}

// Element j of all vectors together, for each j in turn: the transpose where there are as many vectors as elements.
template <int count, int vectors, class V>
[[gnu::always_inline]] inline void interleave(V (&v)[vectors]) {
  using Indices = std::make_integer_sequence<int, count>;
#pragma GCC unroll 5
  for (int stage = 1; stage < vectors; stage *= 2) {
    V next[vectors];
#pragma GCC unroll 16
    for (int i = 0; i < vectors / 2; ++i) {
      next[2 * i]     = zip<0, count>(v[i], v[i + vectors / 2], Indices{});
      next[2 * i + 1] = zip<1, count>(v[i], v[i + vectors / 2], Indices{});
    }
#pragma GCC unroll 32
    for (int i = 0; i < vectors; ++i) v[i] = next[i];
  }
}

// One block of lanes [0, width) whose steps of k are `along` apart and whose lanes are contiguous.
template <int group, int width, int bytes>
[[gnu::always_inline]] inline void pack_lanes(const bf16* from, std::int64_t along, std::uint16_t* to) {
  if constexpr (width > 0) {
    constexpr int lanes = bytes / 2;
    using V             = typename Units<2, bytes>::type;
    constexpr int whole = width / lanes * lanes;
    for (int lane = 0; lane < whole; lane += lanes) {
      V v[group];
#pragma GCC unroll 32
      for (int p = 0; p < group; ++p) std::memcpy(&v[p], from + p * along + lane, bytes);
      interleave<lanes>(v);
#pragma GCC unroll 32
      for (int p = 0; p < group; ++p) std::memcpy(to + lane * group + p * lanes, &v[p], bytes);
    }
    pack_lanes<group, width - whole, bytes / 2>(from + whole, along, to + whole * group);
  }
}

// `bytes / 2` steps of k of lanes [0, width), which are contiguous and whose lanes are `across` apart.
template <int group, int panel, int width, int bytes>
[[gnu::always_inline]] inline void pack_steps(const bf16* from, std::int64_t across, std::uint16_t* to) {
  if constexpr (width > 0) {
    constexpr int unit = 2 * group, count = bytes / unit, whole = width / count * count;
    using V = typename Units<unit, bytes>::type;
    for (int lane = 0; lane < whole; lane += count) {
      V v[count];
#pragma GCC unroll 16
      for (int i = 0; i < count; ++i) std::memcpy(&v[i], from + (lane + i) * across, bytes);
      interleave<count>(v);
#pragma GCC unroll 16
      for (int i = 0; i < count; ++i) std::memcpy(to + (i * panel + lane) * group, &v[i], bytes);
    }
    if constexpr (whole < width) {  // two half as long
      constexpr int rest = width - whole, blocks = count / 2;
      pack_steps<group, panel, rest, bytes / 2>(from + whole * across, across, to + whole * group);
      pack_steps<group, panel, rest, bytes / 2>(from + whole * across + bytes / 4, across,
                                                to + whole * group + blocks * panel * group);
    }
  }
}

// Steps [first, padded) of k of lanes [0, used), element by element. `first` is a multiple of `group`.
template <int group, int width>
void pack_some(const bf16* from, std::int64_t across, std::int64_t along, std::int64_t used, std::int64_t first,
               std::int64_t depth, std::int64_t padded, std::uint16_t* to) {
  for (std::int64_t p = first; p < padded; ++p) {
    std::uint16_t* const at = to + p / group * group * width + p % group;
    for (std::int64_t lane = 0; lane < width; ++lane) {
      std::uint16_t bits = 0;
      if (lane < used && p < depth) std::memcpy(&bits, from + lane * across + p * along, 2);
      at[lane * group] = bits;
    }
  }
}

// `lanes` lanes into as many panels as needed, each of width * padded elements. `padded` is depth, rounded up to a
// multiple of `group`. Uses vectors of `bytes` bytes. `group` is at most half of `bytes`.
template <int group, int width, int bytes>
void pack_panels(const bf16* from, std::int64_t across, std::int64_t along, std::int64_t lanes, std::int64_t depth,
                 std::int64_t padded, std::uint16_t* to) {
  const std::int64_t whole = lanes / width, panel_size = width * padded;
  std::int64_t packed = 0;  // steps of whole panels
  if (across == 1) {
    // All panels step by step, so that lines of the operand are read whole.
    for (; packed + group <= depth; packed += group) {
      for (std::int64_t panel = 0; panel < whole; ++panel)
        pack_lanes<group, width, bytes>(from + packed * along + panel * width, along,
                                        to + panel * panel_size + packed * width);
    }
  } else if (along == 1 && 2 * group < bytes) {
    constexpr int steps = bytes / 2;
    packed              = depth / steps * steps;
    for (std::int64_t panel = 0; panel < whole; ++panel) {
      for (std::int64_t p = 0; p < packed; p += steps) {
        if constexpr (2 * group < bytes)
          pack_steps<group, width, width, bytes>(from + panel * width * across + p, across,
                                                 to + panel * panel_size + p * width);
      }
    }
  } else if (along == 1) {
    packed = depth / group * group;
    for (std::int64_t lane = 0; lane < whole * width; ++lane) {
      std::uint16_t* const at = to + lane / width * panel_size + lane % width * group;
      for (std::int64_t p = 0; p < packed; p += group) std::memcpy(at + p * width, from + lane * across + p, 2 * group);
    }
  }
  for (std::int64_t panel = 0; panel < whole && packed < padded; ++panel)
    pack_some<group, width>(from + panel * width * across, across, along, width, packed, depth, padded,
                            to + panel * panel_size);
  if (whole * width < lanes)
    pack_some<group, width>(from + whole * width * across, across, along, lanes - whole * width, 0, depth, padded,
                            to + whole * panel_size);
}

}  // namespace
}  // namespace stepgraph::cpu
