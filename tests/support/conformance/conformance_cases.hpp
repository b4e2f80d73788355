#pragma once
#include <span>
#include <string_view>

#include "tests/support/conformance/world_conformance.hpp"
#include "tests/support/enumerators.hpp"
#include "tests/support/trial.hpp"

namespace stepgraph::testing {

// One graph of the conformance suite.
struct ConformanceCase {
  std::string_view name;
  void (*build)(Trial& trial, const ConformanceOptions& options);
};
[[nodiscard]] std::span<const ConformanceCase> conformance_cases() noexcept;

// Communications drawn at random, on groups of all kinds, between the same few buffers.
void add_random(Trial& trial, std::uint64_t seed, int num_communications);

[[nodiscard]] std::vector<int> everyone(const Trial& trial);
// Subsets of the ranks in many an order: all, reversed, with holes, shuffled, of one.
[[nodiscard]] std::vector<std::vector<int>> subsets(const Trial& trial);

// A communication of its own memory, as the cases are made of.
struct Exercise {
  PartOp op                                                        = PartOp::barrier;
  DType type                                                       = DType::i32;
  Reduction reduction                                              = Reduction::sum;
  std::vector<int> ranks                                           = {};
  int root                                                         = 0;  // a member
  int elements                                                     = 6;  // of a shard, or of all where there are none
  enum class Shards : std::uint8_t { even, uneven, sparse } shards = Shards::even;  // sparse: every other one is empty
  Placement placement                                              = Placement::tight;
  bool in_place                                                    = false;  // where the operation allows it
  bool touch_after = false;  // every member changes what it sent and what it received afterwards
  bool rounding    = false;  // numbers that round
};
void add(Trial& trial, const Exercise& exercise);

// Whether a part may read and write the same bytes.
[[nodiscard]] bool has_in_place(PartOp op) noexcept;

}  // namespace stepgraph::testing
