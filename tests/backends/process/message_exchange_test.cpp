#include "backends/process/message_exchange.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "tests/support/conformance/world_conformance.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/worlds/hub_world.hpp"
#include "tests/support/worlds/message_hub.hpp"

namespace sg = stepgraph;
using sg::Rank;
using sg::RankSet;
using sg::testing::MessageHub;
using sg::testing::MessageHubWorld;

namespace {

using Failures = std::vector<std::string>;

std::vector<RankSet> cut(const std::vector<std::vector<int>>& processes) {
  std::vector<RankSet> sets;
  for (const std::vector<int>& process : processes) {
    std::vector<Rank> ranks;
    for (const int rank : process) ranks.push_back(Rank{rank});
    sets.emplace_back(std::move(ranks));
  }
  return sets;
}

}  // namespace

TEST_CASE("exchanges by messages that overtake each other pass the conformance suite", "[backends][messages]") {
  const auto processes =
      GENERATE(std::vector<std::vector<int>>{{0}}, std::vector<std::vector<int>>{{0}, {1}},
               std::vector<std::vector<int>>{{0}, {1}, {2}}, std::vector<std::vector<int>>{{0}, {1}, {2}, {3}, {4}},
               std::vector<std::vector<int>>{{0, 1}, {2, 3}}, std::vector<std::vector<int>>{{1, 4}, {0}, {2, 3, 5}});
  static int seen = 1;
  if (sg::testing::left_out(seen, 5)) return;  // sanitized: two processes of two ranks
  int num_ranks = 0;
  for (const auto& process : processes) num_ranks += static_cast<int>(process.size());
  CAPTURE(processes.size(), num_ranks);
  MessageHub hub(num_ranks);
  const auto failures = sg::testing::on_every_process(cut(processes), [&](const RankSet& mine) {
    MessageHubWorld world(hub, mine);
    return sg::testing::world_conformance(world, {.rank_order   = true,
                                                  .large_bytes  = 3'000'000 / sg::testing::scale(),
                                                  .num_random   = sg::testing::cases(4),
                                                  .threads      = 1,
                                                  .step_timeout = std::chrono::seconds(20) * sg::testing::slowness()});
  });
  CHECK(failures == std::vector<Failures>(processes.size()));
  CHECK(hub.num_left() == 0);
}
