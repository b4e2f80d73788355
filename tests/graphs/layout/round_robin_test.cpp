#include "graphs/layout/round_robin.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>

#include "engine/base/error.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;

TEST_CASE("partition i belongs to rank i mod world", "[graphs][partition][round-robin]") {
  for (int world = 1; world <= 7; ++world) {
    for (int partitions = 0; partitions <= 20; ++partitions) {
      const sg::RoundRobin ownership(partitions, world);
      INFO(ownership);
      std::vector<std::int64_t> counted(static_cast<std::size_t>(world));
      for (int i = 0; i < partitions; ++i) {
        const sg::Rank owner = ownership.owner(i);
        CHECK(sg::index(owner) == i % world);
        CHECK(ownership.local_index(i) == counted[static_cast<std::size_t>(sg::index(owner))]++);
        CHECK(ownership.global_index(owner, ownership.local_index(i)) == i);
      }
      for (int rank = 0; rank < world; ++rank) {
        CHECK(ownership.num_owned(sg::Rank{rank}) == counted[static_cast<std::size_t>(rank)]);
        std::vector<std::int64_t> own;
        for (int i = rank; i < partitions; i += world) own.push_back(i);
        CHECK(ownership.owned(sg::Rank{rank}) == own);
      }
    }
  }
}

TEST_CASE("parameters are assigned to ranks in the order of the list", "[graphs][partition][round-robin]") {
  const std::vector<std::string> names{"wte", "wpe", "ln_f"};
  using Owners = std::vector<std::pair<std::string, sg::Rank>>;
  CHECK(sg::round_robin_owners(names, 2) == Owners{{"wte", sg::Rank{0}}, {"wpe", sg::Rank{1}}, {"ln_f", sg::Rank{0}}});
  CHECK(sg::to_string(sg::RoundRobin(5, 2)) == "5 partitions round-robin over 2 ranks");
}

TEST_CASE("an impossible ownership is refused with its numbers", "[graphs][partition][round-robin][refuses]") {
  const auto says = [](const char* what) { return Message(what); };
  CHECK_THROWS_MATCHES(sg::RoundRobin(-1, 2), sg::Error, says("round-robin: -1 partitions (0 or more)"));
  CHECK_THROWS_MATCHES(sg::RoundRobin(4, 0), sg::Error, says("round-robin: over 0 ranks (at least 1)"));
  const sg::RoundRobin ownership(5, 2);
  CHECK_THROWS_MATCHES(ownership.owner(5), sg::Error, says("round-robin: partition 5 of 5 (from 0 on)"));
  CHECK_THROWS_MATCHES(ownership.num_owned(sg::Rank{2}), sg::Error,
                       says("round-robin: rank 2 is not in the world (0 to 1)"));
  CHECK_THROWS_MATCHES(ownership.global_index(sg::Rank{1}, 2), sg::Error,
                       says("round-robin: local index 2 of rank 1, which owns 2 of 5 partitions"));
}
