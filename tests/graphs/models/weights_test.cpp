#include "graphs/models/weights.hpp"

#include <bit>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <numeric>

#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "ops/tape/number.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

std::vector<float> counted(std::int64_t size) {
  std::vector<float> numbers(static_cast<std::size_t>(size));
  std::iota(numbers.begin(), numbers.end(), 1.0f);
  return numbers;
}

// Three sections of one tensor along dim 1, like the queries, keys and values of GPT-2.
const sg::WeightSpec packed{.name     = "qkv",
                            .shape    = {2, 24},
                            .dim      = 1,
                            .cut      = true,
                            .sections = {{.tensor = "qkv", .begin = 0, .size = 8, .num_heads = 4},
                                         {.tensor = "qkv", .begin = 8, .size = 8, .num_heads = 4},
                                         {.tensor = "qkv", .begin = 16, .size = 8, .num_heads = 4}}};
// Three tensors. The last two have fewer heads.
const sg::WeightSpec grouped{.name     = "qkv",
                             .shape    = {16, 3},
                             .cut      = true,
                             .sections = {{.tensor = "q", .size = 8, .num_heads = 4},
                                          {.tensor = "k", .size = 4, .num_heads = 2},
                                          {.tensor = "v", .size = 4, .num_heads = 2}}};

}  // namespace

TEST_CASE("a rank takes its share of the heads of each section", "[graphs][weights]") {
  const auto whole = counted(48);
  std::vector<float> local(static_cast<std::size_t>(sg::num_elements(sg::local_shape(packed, 2, 1))));
  for (const auto& piece : sg::tp_pieces(packed, 2, 1)) sg::take_piece<float>(packed, piece, whole, local);
  CHECK(sg::local_shape(packed, 2, 1) == sg::TensorShape{2, 12});
  CHECK(local ==
        std::vector<float>{5, 6, 7, 8, 13, 14, 15, 16, 21, 22, 23, 24, 29, 30, 31, 32, 37, 38, 39, 40, 45, 46, 47, 48});
}

TEST_CASE("the pieces of all ranks together are the whole tensors", "[graphs][weights]") {
  const int tp             = GENERATE(1, 2, 4);
  const sg::WeightSpec& of = GENERATE(true, false) ? packed : grouped;
  CAPTURE(tp, of.name);
  std::map<std::string, std::vector<float>> tensors, again;
  std::map<std::string, std::size_t> written;
  for (const auto& piece : sg::tp_pieces(of, 1, 0)) {
    tensors[piece.tensor] = counted(sg::num_elements(sg::tensor_shape(of, piece)));
    again[piece.tensor].resize(tensors[piece.tensor].size());
  }
  for (int rank = 0; rank < tp; ++rank) {
    std::vector<float> local(static_cast<std::size_t>(sg::num_elements(sg::local_shape(of, tp, rank))), -1);
    for (const auto& piece : sg::tp_pieces(of, tp, rank)) {
      sg::take_piece<float>(of, piece, tensors[piece.tensor], local);
    }
    CHECK(std::find(local.begin(), local.end(), -1.0f) == local.end());
    for (const auto& piece : sg::tp_pieces(of, tp, rank)) {
      if (!piece.first_holder) continue;
      sg::put_piece<float>(of, piece, local, again[piece.tensor]);
      written[piece.tensor] += static_cast<std::size_t>(piece.size) * tensors[piece.tensor].size() /
                               static_cast<std::size_t>(piece.tensor_size);
    }
  }
  CHECK(again == tensors);
  for (const auto& [name, numbers] : tensors) CHECK(written[name] == numbers.size());  // each element once
}

TEST_CASE("any part of a rank's weight can be taken alone", "[graphs][weights]") {
  const int tp             = GENERATE(1, 2, 4);
  const sg::WeightSpec& of = GENERATE(true, false) ? packed : grouped;
  CAPTURE(tp, of.shape);
  const auto elements = sg::num_elements(sg::local_shape(of, tp, tp - 1));
  std::vector<float> local(static_cast<std::size_t>(elements), -1);
  const auto tensor = counted(48);
  const auto pieces = sg::tp_pieces(of, tp, tp - 1);
  for (const auto& piece : pieces) sg::take_piece<float>(of, piece, tensor, local);
  for (std::int64_t begin = 0; begin < elements; ++begin) {
    for (std::int64_t end = begin; end <= elements; ++end) {
      std::vector<float> part(static_cast<std::size_t>(end - begin), -1);
      for (const auto& piece : pieces) sg::take_piece<float>(of, piece, tensor, elements, begin, part);
      REQUIRE(part == std::vector<float>(local.begin() + begin, local.begin() + end));
    }
  }
}

TEST_CASE("a part of a rank's weight is rounded as the whole tensor would be", "[graphs][weights]") {
  const int tp             = GENERATE(1, 2, 4);
  const sg::WeightSpec& of = GENERATE(true, false) ? packed : grouped;
  CAPTURE(tp, of.shape);
  const auto elements = sg::num_elements(sg::local_shape(of, tp, tp - 1));
  std::vector<double> tensor;
  std::vector<sg::bf16> rounded;
  for (int i = 0; i < 48; ++i) {
    tensor.push_back(1.0 / (i + 3));
    rounded.push_back(sg::narrow<sg::bf16>(static_cast<float>(tensor.back())));
  }
  for (std::int64_t begin = 0; begin < elements; begin += 5) {
    for (std::int64_t end = begin; end <= elements; end += 3) {
      std::vector<sg::bf16> taken(static_cast<std::size_t>(end - begin)), made = taken;
      for (const auto& piece : sg::tp_pieces(of, tp, tp - 1)) {
        sg::take_piece<sg::bf16>(of, piece, rounded, elements, begin, taken);
        sg::round_piece<sg::bf16>(of, piece, tensor, elements, begin, made);
      }
      REQUIRE(std::equal(made.begin(), made.end(), taken.begin(), [](sg::bf16 a, sg::bf16 b) {
        return std::bit_cast<std::uint16_t>(a) == std::bit_cast<std::uint16_t>(b);
      }));
    }
  }
}

TEST_CASE("with fewer heads than ranks, neighbouring ranks hold the same piece", "[graphs][weights]") {
  std::vector<std::int64_t> begins, holders;
  for (int rank = 0; rank < 4; ++rank) {
    const auto pieces = sg::tp_pieces(grouped, 4, rank);
    begins.push_back(pieces[1].begin);
    holders.push_back(pieces[1].num_holders);
    CHECK(pieces[1].first_holder == (rank % 2 == 0));
    CHECK(pieces[0].num_holders == 1);
  }
  CHECK(begins == std::vector<std::int64_t>{0, 0, 2, 2});
  CHECK(holders == std::vector<std::int64_t>{2, 2, 2, 2});
}

TEST_CASE("every rank has all of a weight that is not cut, and the first rank is its first holder",
          "[graphs][weights]") {
  const sg::WeightSpec bias{.name = "bias", .shape = {6}};
  CHECK(sg::local_shape(bias, 3, 2) == sg::TensorShape{6});
  CHECK(sg::tp_pieces(bias, 3, 0)[0].first_holder);
  CHECK_FALSE(sg::tp_pieces(bias, 3, 2)[0].first_holder);
}

TEST_CASE("indices without heads are cut as evenly as possible", "[graphs][weights]") {
  const sg::WeightSpec positions{.name = "wpe", .shape = {10, 2}, .cut = true};
  std::vector<std::int64_t> begins;
  for (int rank = 0; rank < 4; ++rank) begins.push_back(sg::tp_pieces(positions, 4, rank)[0].begin);
  CHECK(begins == std::vector<std::int64_t>{0, 3, 6, 8});
  CHECK(sg::local_shape(positions, 4, 0) == sg::TensorShape{3, 2});
  CHECK(sg::local_shape(positions, 4, 3) == sg::TensorShape{2, 2});
}

TEST_CASE("a cut through a head is refused", "[graphs][weights]") {
  CHECK_THROWS_WITH(sg::tp_pieces(grouped, 3, 0), ContainsSubstring("weight 'q': 4 heads cannot be cut over 3"));
}
