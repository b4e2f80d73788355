#include "ops/layers/dropout.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "ops/shared/dropout_mask.hpp"
#include "tests/support/ops/op_case.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

sg::testing::OpCase dropout_case(std::int64_t rows, std::int64_t step = 4, const std::string& site = "embedding") {
  return {.inputs    = {{rows, 37}},
          .sequences = rows,
          .build =
              [site](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                return sg::dropout(tape, in[0], {.rate = 0.3, .site = site});
              },
          .step = step};
}

}  // namespace

TEST_CASE("a dropout drops the elements of its mask, indexed over the global batch, and scales the others",
          "[ops][dropout]") {
  const auto test = dropout_case(600);  // several tiles
  const auto x    = sg::testing::values(test).inputs[0];
  const auto y    = sg::testing::evaluate(test);
  const auto mask = sg::DropoutSite{.rate = 0.3, .key = sg::derived_key(5, sg::name_key("embedding"))}.mask_at(4);
  std::vector<double> expected;
  for (std::size_t i = 0; i < x.size(); ++i)  // the microbatch starts at sequence 3, one token per sequence
    expected.push_back(mask.keeps(3 * 37 + i) ? x[i] * (1 / 0.7) : 0);
  CHECK((y == expected));
}

TEST_CASE("a dropout's gradient has the same mask", "[ops][dropout]") {
  sg::testing::check_gradients(dropout_case(4));
  sg::testing::check_halves(dropout_case(600));
}

TEST_CASE("another step and another site drop other elements", "[ops][dropout]") {
  const auto here = sg::testing::evaluate(dropout_case(4));
  CHECK(here == sg::testing::evaluate(dropout_case(4)));
  CHECK(here != sg::testing::evaluate(dropout_case(4, 5)));
  CHECK(here != sg::testing::evaluate(dropout_case(4, 4, "other")));
}

TEST_CASE("a dropout that drops nothing adds no node", "[ops][dropout]") {
  sg::Graph graph;
  sg::WeightTable weights;
  sg::Tape tape({.graph = &graph, .weights = &weights});
  const sg::Tensor x = tape.tensor("x", {2, 3});
  CHECK(sg::dropout(tape, x, {.rate = 0.5, .site = "here"}).id == x.id);  // a tape that is not random
  CHECK(graph.num_nodes() == 0);
  CHECK_THROWS_MATCHES(sg::dropout(tape, x, {.rate = 1, .site = "here"}), sg::Error,
                       MessageMatches(ContainsSubstring("dropout: rate(1) (at least 0 and less than 1)")));
}
