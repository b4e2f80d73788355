#include "graphs/train/broadcast_weights.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <set>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/train/trainer.hpp"
#include "ops/transfers/hash.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr sg::BatchSpec batch_of_4{.global = 4, .micro = 1, .seq = 16};

// The buffers of weights and optimizer states of a rank.
std::vector<sg::Buffer> held(const sg::StepRank& rank) {
  std::vector<sg::Buffer> all;
  for (const sg::StepWeight& weight : rank.weights) {
    for (const sg::Buffer buffer :
         {weight.value.buffer, weight.master.buffer, weight.first.buffer, weight.second.buffer}) {
      if (buffer != sg::Buffer{}) all.push_back(buffer);
    }
  }
  return all;
}

// Fills these buffers of all ranks with pseudo-random bytes.
void fill_differently(const sg::StepRun& run) {
  std::uint32_t state = 1;
  for (const sg::StepRank& rank : run.step().ranks) {
    for (const sg::Buffer buffer : held(rank)) {
      for (std::byte& byte : run.memory().bytes(buffer)) {
        state = state * 1664525u + 1013904223u;
        byte  = static_cast<std::byte>(state >> 24);
      }
    }
  }
}

std::vector<std::vector<std::byte>> bytes_of(const sg::StepRun& run, std::size_t rank) {
  std::vector<std::vector<std::byte>> all;
  for (const sg::Buffer buffer : held(run.step().ranks[rank])) {
    const auto bytes = run.memory().bytes(buffer);
    all.emplace_back(bytes.begin(), bytes.end());
  }
  return all;
}

sg::StepRun make_run(const sg::Plan& plan, sg::World& world, const sg::Model& model = sg::testing::small_gpt2()) {
  return sg::StepRun(sg::training_step(model, plan, batch_of_4), world, {.threads = 2});
}

std::size_t first_replica(const sg::Layout& layout, std::size_t rank) {
  sg::Coord coord = layout.coord(sg::Rank{static_cast<int>(rank)});
  coord.dp        = 0;
  return static_cast<std::size_t>(sg::index(layout.rank(coord)));
}

}  // namespace

TEST_CASE("after a broadcast all data-parallel ranks have the weights, masters and optimizer states of the first",
          "[graphs][weights]") {
  const auto [plan, num_states] = GENERATE(
      std::pair{sg::Plan{.layout = {.dp = 4}}, 3}, std::pair{sg::Plan{.layout = {.dp = 2, .tp = 2, .pp = 2}}, 3},
      std::pair{sg::Plan{.layout = {.dp = 2, .tp = 2, .pp = 2, .order = "dp-tp-pp"}}, 3},
      std::pair{sg::Plan{.layout = {.dp = 2, .pp = 2}, .precision = {.param = sg::DType::bf16}}, 4},
      std::pair{sg::Plan{.layout = {.dp = 2}, .optimizer = {.kind = sg::OptimizerKind::sgd}}, 2});
  CAPTURE(to_string(plan.layout), num_states);
  sg::LoopbackWorld world(sg::Layout(plan.layout).num_ranks());
  sg::StepRun run          = make_run(plan, world);
  const sg::Layout& layout = run.step().layout;
  fill_differently(run);
  std::vector<std::vector<std::vector<std::byte>>> before;
  for (std::size_t rank = 0; rank < run.step().ranks.size(); ++rank) before.push_back(bytes_of(run, rank));
  const auto& weights = run.step().ranks[0].weights;
  const auto own = std::count_if(weights.begin(), weights.end(), [](const auto& each) { return !each.first.empty(); });
  const auto shared = static_cast<std::ptrdiff_t>(weights.size()) - own;  // tied on the same rank: only a shared value
  REQUIRE(static_cast<std::ptrdiff_t>(before[0].size()) == own * num_states + shared);
  const std::size_t other = static_cast<std::size_t>(sg::index(layout.rank({.dp = 1})));
  REQUIRE(before[0] != before[other]);

  CHECK_THROWS_AS(sg::check_weights(run), sg::Error);
  const std::uint64_t hash = sg::broadcast_weights(run);
  for (std::size_t rank = 0; rank < before.size(); ++rank) {
    CAPTURE(rank);
    CHECK(bytes_of(run, rank) == before[first_replica(layout, rank)]);
  }
  CHECK(sg::check_weights(run) == hash);
  CHECK(sg::broadcast_weights(run) == hash);

  // The hash covers the buffers of one replica, in the order of its ranks.
  std::uint64_t expected = 0;
  for (const sg::StepRank& rank : run.step().ranks) {
    if (rank.coord.dp != 0) continue;
    std::set<std::uint32_t> seen;
    for (const sg::Buffer buffer : held(rank)) {
      if (seen.insert(buffer.id).second)
        expected = sg::join_hashes(expected, sg::hash_bytes(run.memory().bytes(buffer)));
    }
  }
  CHECK(hash == expected);
}

TEST_CASE("a flipped bit is found, and its weight and rank are named", "[graphs][weights]") {
  const auto layout = GENERATE(sg::LayoutSpec{.dp = 3}, sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2});
  CAPTURE(to_string(layout));
  sg::LoopbackWorld world(sg::Layout(layout).num_ranks());
  const sg::BatchSpec batch{.global = 6, .micro = 1, .seq = 16};
  sg::StepRun run(sg::training_step(sg::testing::small_llama(), {.layout = layout}, batch), world, {.threads = 2});
  sg::set_fresh_weights(run, 5);
  const std::uint64_t hash = sg::check_weights(run);
  for (std::size_t rank = 0; rank < run.step().ranks.size(); ++rank) {
    const std::size_t first  = first_replica(run.step().layout, rank);
    const auto buffers       = held(run.step().ranks[rank]);
    const std::size_t stride = std::max<std::size_t>(1, buffers.size() / 3);
    for (std::size_t i = rank % stride; i < buffers.size(); i += stride) {
      const sg::Buffer buffer = buffers[i];
      CAPTURE(rank, run.step().graph.spec(buffer).name);
      std::byte& byte = run.memory().bytes(buffer).back();
      byte ^= std::byte{0x10};
      if (rank == first) {  // all other replicas differ from it
        CHECK_THROWS_WITH(sg::check_weights(run),
                          ContainsSubstring("'" + run.step().graph.spec(buffer).name + "' on rank ") &&
                              ContainsSubstring(sg::str("but on rank ", first, " it has ")));
      } else {
        CHECK_THROWS_WITH(sg::check_weights(run), ContainsSubstring(sg::str("compare hashes of weights': weights: '",
                                                                            run.step().graph.spec(buffer).name,
                                                                            "' on rank ", rank, " has hash ")));
      }
      byte ^= std::byte{0x10};
    }
  }
  CHECK(sg::check_weights(run) == hash);  // a failed check has no lasting effect
}

TEST_CASE("the graph of a broadcast is verified, and a rank's slice can be built alone", "[graphs][weights]") {
  const bool broadcast = GENERATE(true, false);
  const sg::Plan plan{.layout = {.dp = 2, .tp = 2, .pp = 2}};
  const auto model           = sg::testing::small_gpt2();
  const sg::StepGraph step   = sg::training_step(model, plan, batch_of_4);
  const sg::WeightsGraph all = sg::weights_graph(step, {.broadcast = broadcast});
  CHECK_NOTHROW(sg::verify(all.graph));
  std::size_t broadcasts = 0, gathers = 0, checks = 0, wanted = 0;
  for (std::uint32_t i = 0; i < all.graph.num_nodes(); ++i) {
    const std::string_view op = all.graph.op(sg::Node{i});
    broadcasts += op == "broadcast";
    gathers += op == "all_gather";
    checks += op == "compare_hashes";
  }
  for (const sg::StepRank& rank : step.ranks) wanted += held(rank).size();  // both stages hold a tied weight
  CHECK(broadcasts == (broadcast ? wanted : 0));
  CHECK(all.same.size() == wanted);
  CHECK(gathers == 8);
  CHECK(checks == 8);
  for (int rank = 0; rank < 8; ++rank) {
    const auto alone = sg::training_step(model, plan, batch_of_4, {.only = sg::Rank{rank}});
    CHECK(sg::weights_graph(alone, {.broadcast = broadcast}).graph == sg::slice(all.graph, sg::Rank{rank}));
  }
}

TEST_CASE("a broadcast of equal weights changes no bit of the training", "[graphs][weights]") {
  const auto train = [](int dp, bool broadcast) {
    sg::LoopbackWorld world(dp);
    sg::Trainer trainer(sg::testing::small_gpt2(), {.layout = {.dp = dp}}, batch_of_4, world, {.threads = 2});
    sg::set_fresh_weights(trainer.run(), 3);
    std::vector<double> losses;
    for (int step = 0; step < 3; ++step) {
      if (broadcast) sg::broadcast_weights(trainer.run());
      losses.push_back(trainer.step(sg::testing::tokens_for(batch_of_4, step, 64)).loss);
    }
    losses.push_back(static_cast<double>(sg::check_weights(trainer.run()) >> 11));
    return losses;
  };
  CHECK(train(2, true) == train(2, false));
  CHECK(train(1, true) == train(1, false));
}
