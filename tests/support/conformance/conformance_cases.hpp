#pragma once
#include <optional>
#include <span>
#include <string_view>

#include "tests/support/conformance/world_conformance.hpp"
#include "tests/support/enumerators.hpp"
#include "tests/support/graphs/trial.hpp"

namespace stepgraph::testing {

// One graph of the conformance suite.
struct ConformanceCase {
  std::string_view name;
  void (*build)(Trial& trial, const ConformanceOptions& options);
};
[[nodiscard]] std::span<const ConformanceCase> conformance_cases() noexcept;

// Reductions of numbers that round, whose bits tell the order of the members.
void add_rank_order(Trial& trial, const ConformanceOptions& options);
// min and max of zeros of both signs, infinities and NaNs.
void add_special_numbers(Trial& trial, const ConformanceOptions& options);
// Reductions of elements in buffers of bytes: at odd addresses, and cut by the ends of rows and accesses. Of any bytes
// that the reference reduces exactly.
void add_cut_elements(Trial& trial, const ConformanceOptions& options);

// Random communications on groups of all kinds, between the same few buffers.
void add_random(Trial& trial, std::uint64_t seed, int num_communications);

[[nodiscard]] std::vector<int> everyone(const Trial& trial);
// Subsets of the ranks in various orders: all, reversed, with holes, shuffled, of one rank.
[[nodiscard]] std::vector<std::vector<int>> subsets(const Trial& trial);

// A communication with its own memory; the cases consist of these.
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
  bool touch_after         = false;  // every member changes its input and output afterwards
  std::optional<Fill> fill = {};     // of the input; none: numbers whose reduction is exact
};
void add(Trial& trial, const Exercise& exercise);

// Whether a part may read and write the same bytes.
[[nodiscard]] bool has_in_place(PartOp op) noexcept;

}  // namespace stepgraph::testing
