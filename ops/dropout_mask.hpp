#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/dropout.hpp"
#include "ops/tape/counter_random.hpp"
#include "ops/tape/tape.hpp"

// Which elements a dropout keeps: internal to ops/. An op makes a DropoutSite when it is applied to a tape, reads its
// `step` and makes the step's mask in its kernel, forward and backward alike: masks are computed, never stored.
namespace stepgraph {

// 2^32 elements of a mask: those whose numbers have one high word. Plain arithmetic on 32 bits without a branch, so
// that loops over it are vectorised: an element costs two multiplications.
struct DropoutBlock {
  std::uint32_t first, second;  // keys
  std::uint32_t dropped;        // of 2^32

  // A bijection of the low word (the two rounds of C. Wellons' lowbias32) with a key before each round.
  [[nodiscard]] constexpr bool keeps(std::uint32_t low) const noexcept {
    std::uint32_t x = low ^ first;
    x               = (x ^ (x >> 16)) * 0x7feb352du;
    x               = (x ^ (x >> 15)) + second;
    x               = x * 0x846ca68bu;
    return (x ^ (x >> 16)) >= dropped;
  }
};

// One site at one step.
struct DropoutMask {
  std::uint64_t key;
  std::uint32_t dropped;  // of 2^32
  double scale;           // of what is kept

  [[nodiscard]] constexpr DropoutBlock block(std::uint64_t element) const noexcept {
    const std::uint64_t mixed = derived_key(key, element >> 32);
    return {static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32), dropped};
  }
  [[nodiscard]] constexpr bool keeps(std::uint64_t element) const noexcept {
    return block(element).keeps(static_cast<std::uint32_t>(element));
  }
  // body(block, low, begin, count) for pieces of [first, first + size) that are in one block each: element
  // first + begin + i of the mask, for i < count, is block.keeps(low + i). Nearly always that is one piece.
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

// A dropout on a tape; `active` where anything is dropped at all. Then a node of it has `step` among its reads.
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
  // In a kernel: the mask of the step that is the node's read number `read`.
  [[nodiscard]] DropoutMask mask(const Context& context, std::size_t read) const {
    return mask_at(context.read<std::int64_t>(read)[0]);
  }
};

// Refuses rates that are none, and a dropout without a name.
[[nodiscard]] inline DropoutSite dropout_site(const Tape& tape, const Dropout& dropout) {
  if (!(dropout.rate >= 0 && dropout.rate < 1)) {
    throw Error(ErrorKind::config, str("dropout: rate(", dropout.rate, ") (at least 0 and less than 1)"));
  }
  if (dropout.rate > 0 && dropout.site.empty()) {
    throw Error(ErrorKind::config,
                str("dropout: rate(", dropout.rate, ") at a site without a name (one that no other has)"));
  }
  if (dropout.rate == 0 || !tape.is_random()) return {};
  return {.active = true,
          .rate   = dropout.rate,
          .key    = derived_key(tape.random().seed, name_key(dropout.site)),
          .step   = tape.random().step};
}

}  // namespace stepgraph
