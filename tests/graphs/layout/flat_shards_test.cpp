#include "graphs/layout/flat_shards.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <random>

#include "engine/base/error.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;

TEST_CASE("flat shards are equal, and padding is at the end", "[graphs][partition][flat]") {
  const sg::FlatShards shards(10, 4);
  CHECK(shards.shard_elements() == 3);
  CHECK(shards.padded_elements() == 12);
  CHECK(shards.padding() == 2);
  CHECK(shards.padding(2) == 0);
  CHECK(shards.padding(3) == 2);
  CHECK(sg::to_string(shards) == "10 elements over 4: shards of 3, 2 of padding");
  using MemberRange = sg::FlatShards::MemberRange;
  CHECK(shards.member_ranges(2, 7) ==
        std::vector{MemberRange{0, 2, 0, 1}, MemberRange{1, 0, 1, 3}, MemberRange{2, 0, 4, 1}});
  const sg::FlatShards few(2, 4);
  CHECK(few.shard_elements() == 1);
  CHECK(few.padding(1) == 0);
  CHECK(few.padding(2) == 1);
  CHECK(few.begin(3) == few.end(3));
  CHECK(sg::FlatShards(0, 3).padded_elements() == 0);
}

TEST_CASE("flat shards cover every element once and have the least padding", "[graphs][partition][flat]") {
  std::mt19937 random(5);
  for (int i = 0; i < sg::testing::cases(1000); ++i) {
    const sg::FlatShards shards(static_cast<std::int64_t>(random() % 60), static_cast<int>(1 + random() % 9));
    INFO(shards);
    CHECK(shards.padded_elements() >= shards.num_elements());
    CHECK(shards.padding() < shards.num_members());
    std::int64_t at = 0, padding = 0;
    for (int member = 0; member < shards.num_members(); ++member) {
      CHECK(shards.begin(member) == at);
      for (; at < shards.end(member); ++at) {
        CHECK(shards.owner(at) == member);
        CHECK(shards.local_index(at) == at - member * shards.shard_elements());
      }
      padding += shards.padding(member);
    }
    CHECK(at == shards.num_elements());
    CHECK(padding == shards.padding());
    // The ranges of a parameter give the place of each of its elements.
    const auto end           = static_cast<std::int64_t>(random() % static_cast<unsigned>(shards.num_elements() + 1));
    const std::int64_t begin = end / 3;
    std::int64_t offset      = 0;
    for (const sg::FlatShards::MemberRange& piece : shards.member_ranges(begin, end)) {
      CHECK(piece.offset == offset);
      CHECK(piece.num_elements > 0);
      for (std::int64_t k = 0; k < piece.num_elements; ++k, ++offset) {
        CHECK(shards.owner(begin + offset) == piece.member);
        CHECK(shards.local_index(begin + offset) == piece.local_begin + k);
      }
    }
    CHECK(offset == end - begin);
  }
}

TEST_CASE("impossible flat shards are refused with their numbers", "[graphs][partition][flat][refuses]") {
  const auto says = [](const char* what) { return Message(what); };
  CHECK_THROWS_MATCHES(sg::FlatShards(-1, 2), sg::Error, says("flat shards: -1 elements (0 or more, fewer than 2^60)"));
  CHECK_THROWS_MATCHES(sg::FlatShards(4, 0), sg::Error, says("flat shards: over 0 members (at least 1)"));
  const sg::FlatShards shards(5, 2);
  CHECK_THROWS_MATCHES(shards.begin(2), sg::Error, says("flat shards: member 2 (0 to 1)"));
  CHECK_THROWS_MATCHES(shards.owner(5), sg::Error,
                       says("flat shards: element 5 of 5 (from 0 on, and none of the padding)"));
  CHECK_THROWS_MATCHES(shards.member_ranges(3, 6), sg::Error, says("flat shards: elements 3 to 6 (inside 0 to 5)"));
}
