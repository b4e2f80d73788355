#include "graphs/layout/divisibility.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <numeric>

#include "engine/base/error.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;

TEST_CASE("layers are split evenly, balanced or as listed", "[graphs][divisibility]") {
  CHECK(sg::split_layers(12, 4) == std::vector{3, 3, 3, 3});
  CHECK(sg::split_layers(14, 4, sg::LayerSplit::balanced) == std::vector{4, 4, 3, 3});
  CHECK(sg::split_layers(14, 4, {2, 4, 4, 4}) == std::vector{2, 4, 4, 4});
  CHECK(sg::split_layers(4, 3, {0, 2, 2}) == std::vector{0, 2, 2});
  for (const auto split : {sg::LayerSplit::even, sg::LayerSplit::balanced})
    CHECK(sg::parse_layer_split(sg::to_string(split)) == split);
  for (int layers = 1; layers < 40; ++layers) {
    for (int stages = 1; stages <= layers; ++stages) {
      const std::vector<int> counts = sg::split_layers(layers, stages, sg::LayerSplit::balanced);
      CHECK(static_cast<int>(counts.size()) == stages);
      CHECK(std::accumulate(counts.begin(), counts.end(), 0) == layers);
      CHECK(std::is_sorted(counts.rbegin(), counts.rend()));
      CHECK(counts.front() - counts.back() <= 1);
      if (layers % stages == 0) CHECK(sg::split_layers(layers, stages) == counts);
    }
  }
}

TEST_CASE("layers that do not fit the stages are refused with the numbers", "[graphs][divisibility][refuses]") {
  const auto says = [](const char* what) { return Message(what); };
  CHECK_THROWS_MATCHES(sg::split_layers(14, 4), sg::Error,
                       says("pipeline: 14 layers do not divide over 4 stages (12 or 16 layers, 2 or 7 stages, a "
                            "balanced split, or an explicit list)"));
  CHECK_THROWS_MATCHES(
      sg::split_layers(2, 4, sg::LayerSplit::balanced), sg::Error,
      says("pipeline: 2 layers over 4 stages leave stages without layers (at most 2 stages, or an explicit list)"));
  CHECK_THROWS_MATCHES(sg::split_layers(0, 4), sg::Error, says("pipeline: layers is 0 (at least 1)"));
  CHECK_THROWS_MATCHES(sg::split_layers(4, 0), sg::Error, says("pipeline: stages is 0 (at least 1)"));
  CHECK_THROWS_MATCHES(
      sg::split_layers(4, 2, {1, 1, 2}), sg::Error,
      says("pipeline: the list of layers (1, 1, 2) has 3 entries, but there are 2 stages (one entry for each stage)"));
  CHECK_THROWS_MATCHES(sg::split_layers(4, 2, {1, 2}), sg::Error,
                       says("pipeline: the list of layers (1, 2) adds up to 3, but the model has 4"));
  CHECK_THROWS_MATCHES(sg::split_layers(4, 2, {5, -1}), sg::Error,
                       says("pipeline: the list of layers (5, -1) has -1 (0 or more)"));
  CHECK_THROWS_MATCHES(sg::parse_layer_split("uneven"), sg::Error,
                       says("pipeline: unknown split of layers 'uneven' (known: even, balanced)"));
}

TEST_CASE("microbatches are global / dp / micro, or refused with the numbers", "[graphs][divisibility]") {
  CHECK(sg::num_microbatches({.global = 32, .micro = 2, .dp = 4}) == 4);
  CHECK(sg::num_microbatches({.global = 3, .micro = 1, .dp = 3}) == 1);
  const auto says = [](const char* what) { return Message(what); };
  CHECK_THROWS_MATCHES(sg::num_microbatches({.global = 30, .micro = 2, .dp = 4}), sg::Error,
                       says("batch: global 30 does not divide over dp 4 (global 24 or 32, or dp 3 or 5)"));
  CHECK_THROWS_MATCHES(sg::num_microbatches({.global = 28, .micro = 2, .dp = 4}), sg::Error,
                       says("batch: the 7 sequences of a data-parallel rank (global 28 / dp 4) do not divide into "
                            "microbatches of 2 (global 24 or 32, or micro 1 or 7)"));
  CHECK_THROWS_MATCHES(sg::num_microbatches({.global = 2, .micro = 1, .dp = 4}), sg::Error,
                       says("batch: global 2 does not divide over dp 4 (global 4, or dp 2)"));
  CHECK_THROWS_MATCHES(
      sg::num_microbatches({.global = 2147483647, .micro = 1, .dp = 2}), sg::Error,  // a prime
      says("batch: global 2147483647 does not divide over dp 2 (global 2147483646 or 2147483648, or dp "
           "1 or 2147483647)"));
  CHECK_THROWS_MATCHES(sg::num_microbatches({.global = 2, .micro = 0}), sg::Error,
                       says("batch: micro is 0 (at least 1)"));
  CHECK_THROWS_MATCHES(sg::num_microbatches({.global = 0}), sg::Error, says("batch: global is 0 (at least 1)"));
  CHECK_THROWS_MATCHES(sg::num_microbatches({.dp = -1}), sg::Error, says("batch: dp is -1 (at least 1)"));
}

TEST_CASE("heads and a vocabulary that tp does not divide are refused with the numbers", "[graphs][divisibility]") {
  CHECK_NOTHROW(sg::check_tensor_parallel({.tp = 4, .heads = 12, .kv_heads = 4, .vocab = 50260}));
  CHECK_NOTHROW(sg::check_tensor_parallel({.tp = 4}));
  CHECK_NOTHROW(sg::check_tensor_parallel({.heads = 25, .vocab = 50257}));
  const auto says = [](const char* what) { return Message(what); };
  CHECK_THROWS_MATCHES(sg::check_tensor_parallel({.tp = 8, .heads = 12}), sg::Error,
                       says("tensor parallel: heads 12 is not divisible by tp 8 (heads 8 or 16, or tp 6 or 12)"));
  CHECK_NOTHROW(sg::check_tensor_parallel({.tp = 4, .heads = 8, .kv_heads = 2}));  // two ranks hold each kv head
  CHECK_THROWS_MATCHES(
      sg::check_tensor_parallel({.tp = 4, .heads = 12, .kv_heads = 3}), sg::Error,
      says("tensor parallel: tp 4 is not divisible by kv_heads 3 (kv_heads that divides tp or is a multiple of tp)"));
  CHECK_THROWS_MATCHES(sg::check_tensor_parallel({.tp = 4, .heads = 12, .kv_heads = 6}), sg::Error,
                       says("tensor parallel: kv_heads 6 is not divisible by tp 4 (kv_heads 4 or 8, or tp 3 or 6)"));
  CHECK_THROWS_MATCHES(sg::check_tensor_parallel({.tp = 2, .heads = 12, .vocab = 50257}), sg::Error,
                       says("tensor parallel: vocab 50257 is not divisible by tp 2 (vocab 50256 or 50258, or tp 1)"));
  CHECK_THROWS_MATCHES(sg::check_tensor_parallel({.heads = 12, .kv_heads = 5}), sg::Error,
                       says("tensor parallel: heads 12 is not divisible by kv_heads 5 (heads 10 or 15)"));
  CHECK_THROWS_MATCHES(sg::check_tensor_parallel({.tp = 0}), sg::Error, says("tensor parallel: tp is 0 (at least 1)"));
  CHECK_THROWS_MATCHES(sg::check_tensor_parallel({.heads = -1}), sg::Error,
                       says("tensor parallel: heads is -1 (0 or more)"));
}
