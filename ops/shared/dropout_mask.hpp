#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/layers/dropout.hpp"
#include "ops/tape/counter_random.hpp"
#include "ops/tape/tape.hpp"

// Dropout masks. Internal to ops/. An op creates a DropoutSite when it is added to a tape. Its kernels, forward and
// backward, read `step` and compute the mask of that step; masks are never stored.
namespace stepgraph {

// The 2^32 elements of a mask whose indices share the high 32 bits. Branch-free 32-bit arithmetic, so that compilers
// vectorise loops over it: two multiplications per element.
struct DropoutBlock {
  std::uint32_t first, second;  // keys
  std::uint32_t dropped;        // threshold: out of 2^32

  // A bijection of the low 32 bits: the two rounds of C. Wellons' lowbias32, with a key before each round.
  [[nodiscard]] constexpr bool keeps(std::uint32_t low) const noexcept {
    std::uint32_t x = low ^ first;
    x               = (x ^ (x >> 16)) * 0x7feb352du;
    x               = (x ^ (x >> 15)) + second;
    x               = x * 0x846ca68bu;
    return (x ^ (x >> 16)) >= dropped;
  }
};

// The mask of one site at one step.
struct DropoutMask {
  std::uint64_t key;
  std::uint32_t dropped;  // threshold: out of 2^32
  double scale;           // of the kept elements

  [[nodiscard]] constexpr DropoutBlock block(std::uint64_t element) const noexcept {
    const std::uint64_t mixed = derived_key(key, element >> 32);
    return {static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32), dropped};
  }
  [[nodiscard]] constexpr bool keeps(std::uint64_t element) const noexcept {
    return block(element).keeps(static_cast<std::uint32_t>(element));
  }
  // Calls body(block, low, begin, count) for pieces of [first, first + size) that each lie in one block: mask element
  // first + begin + i, for i < count, is block.keeps(low + i). There is almost always one piece.
  template <class Body>
  constexpr void for_pieces(std::int64_t first, std::int64_t size, const Body& body) const {
    for (std::int64_t begin = 0; begin < size;) {
      const auto element       = static_cast<std::uint64_t>(first + begin);
      const auto low           = static_cast<std::uint32_t>(element);
      const std::int64_t count = std::min(size - begin, (std::int64_t{1} << 32) - std::int64_t{low});
      body(block(element), low, begin, count);
      begin += count;
    }
  }
};

// A dropout on a tape. If `active`, elements are dropped, and the nodes of the op read `step`.
struct DropoutSite {
  bool active       = false;
  double rate       = 0;
  std::uint64_t key = 0;
  Buffer step       = {};

  [[nodiscard]] DropoutMask mask_at(std::int64_t number_of_step) const noexcept {
    return {.key     = derived_key(key, static_cast<std::uint64_t>(number_of_step)),
            .dropped = static_cast<std::uint32_t>(rate * 0x1p32),
            .scale   = 1 / (1 - rate)};
  }
  // For kernels: the mask of the current step, where `step` is the node's read number `read`.
  [[nodiscard]] DropoutMask mask(const Context& context, std::size_t read) const {
    return mask_at(context.read<std::int64_t>(read)[0]);
  }
};

// Throws Error(config) if the rate is not in [0, 1), or is above 0 and the dropout has no name.
[[nodiscard]] inline DropoutSite dropout_site(const Tape& tape, const Dropout& dropout) {
  if (!(dropout.rate >= 0 && dropout.rate < 1)) {
    throw Error(ErrorKind::config, str("dropout: rate(", dropout.rate, ") (at least 0 and less than 1)"));
  }
  if (dropout.rate > 0 && dropout.site.empty()) {
    throw Error(ErrorKind::config, str("dropout: rate(", dropout.rate, ") at a site without a name (a unique name)"));
  }
  if (dropout.rate == 0 || !tape.is_random()) return {};
  return {.active = true,
          .rate   = dropout.rate,
          .key    = derived_key(tape.random().seed, name_key(dropout.site)),
          .step   = tape.random().step};
}

}  // namespace stepgraph
