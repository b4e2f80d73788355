#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "backends/loopback/world.hpp"
#include "engine/verify.hpp"
#include "graphs/broadcast_weights.hpp"
#include "graphs/weights.hpp"
#include "tests/support/short_training.hpp"

namespace sg = stepgraph;

namespace {

constexpr sg::BatchSpec batch_of_4{.global = 4, .micro = 1, .seq = 16};

sg::Plan sharded(sg::Shard strategy, bool flat) {
  return {.layout = {.dp = 2, .tp = 2}, .shard = {.strategy = strategy, .flat = flat}};
}

// Every byte of what ranks keep of weights another one.
void fill_differently(const sg::StepRun& run) {
  std::uint32_t state = 1;
  for (const sg::StepRank& rank : run.step().ranks) {
    for (const sg::StepWeight& weight : rank.weights) {
      for (const sg::WeightPart& part : {weight.value, weight.master, weight.first, weight.second}) {
        if (part.empty()) continue;
        for (std::byte& byte : run.memory().bytes(part.buffer)) {
          state = state * 1664525u + 1013904223u;
          byte  = static_cast<std::byte>(state >> 24);
        }
      }
    }
  }
}

std::size_t first_replica(const sg::Layout& layout, std::size_t rank) {
  sg::Coord coord = layout.coord(sg::Rank{static_cast<int>(rank)});
  coord.dp        = 0;
  return static_cast<std::size_t>(sg::index(layout.rank(coord)));
}

}  // namespace

TEST_CASE("what data-parallel ranks share between them is left as it is, and what each has whole is broadcast",
          "[graphs][weights]") {
  const auto strategy = GENERATE(sg::Shard::zero1, sg::Shard::grad_op, sg::Shard::full);
  const bool flat     = GENERATE(true, false);
  CAPTURE(to_string(strategy), flat);
  sg::LoopbackWorld world(4);
  sg::StepRun run(sg::training_step(sg::testing::small_gpt2(), sharded(strategy, flat), batch_of_4), world,
                  {.threads = 2});
  const sg::Layout& layout = run.step().layout;
  const auto copy          = [&](const sg::WeightPart& part) {
    const auto bytes = run.memory().bytes(part.buffer);
    const auto size  = sg::size_bytes(run.step().graph.spec(part.buffer).type);
    const auto own =
        bytes.subspan(static_cast<std::size_t>(part.offset) * size, static_cast<std::size_t>(part.size()) * size);
    return std::vector<std::byte>(own.begin(), own.end());
  };
  using Copies         = std::vector<std::vector<std::byte>>;
  const auto copies_of = [&](sg::WeightPart sg::StepWeight::*which) {
    std::vector<Copies> all;
    for (const sg::StepRank& rank : run.step().ranks) {
      all.emplace_back();
      for (const sg::StepWeight& weight : rank.weights) {
        all.back().push_back((weight.*which).empty() ? std::vector<std::byte>() : copy(weight.*which));
      }
    }
    return all;
  };
  int shared = 0, whole = 0;
  for (const auto which : {&sg::StepWeight::value, &sg::StepWeight::first}) {
    fill_differently(run);
    const auto before = copies_of(which);
    sg::broadcast_weights(run);
    const auto after = copies_of(which);
    for (std::size_t rank = 0; rank < 4; ++rank) {
      const std::size_t first = first_replica(layout, rank);
      for (std::size_t i = 0; i < after[rank].size(); ++i) {
        CAPTURE(rank, run.step().spec(run.step().ranks[rank].weights[i]).name);
        std::int64_t held = 0;  // by both replicas together
        for (const sg::StepRank& other : run.step().ranks) {
          if (other.coord.tp == layout.coord(sg::Rank{static_cast<int>(rank)}).tp)
            held += (other.weights[i].*which).size();
        }
        const sg::WeightSpec& spec = run.step().spec(run.step().ranks[rank].weights[i]);
        const bool by_each = held == 2 * sg::num_elements(sg::local_shape(spec, 2, run.step().ranks[rank].coord.tp));
        CHECK(after[rank][i] == before[by_each ? first : rank][i]);
        ++(by_each ? whole : shared);
      }
    }
  }
  CHECK(whole > 0);
  CHECK(shared > 0);
}

TEST_CASE("a rank that is built alone broadcasts what it does in the whole", "[graphs][weights]") {
  const auto strategy = GENERATE(sg::Shard::none, sg::Shard::zero1, sg::Shard::grad_op, sg::Shard::full);
  const bool flat     = GENERATE(true, false);
  CAPTURE(to_string(strategy), flat);
  const auto model = sg::testing::small_gpt2();
  const auto all   = sg::weights_graph(sg::training_step(model, sharded(strategy, flat), batch_of_4));
  for (int rank = 0; rank < 4; ++rank) {
    CAPTURE(rank);
    const auto alone = sg::training_step(model, sharded(strategy, flat), batch_of_4, {.only = sg::Rank{rank}});
    CHECK((sg::weights_graph(alone).graph == sg::slice(all.graph, sg::Rank{rank})));
  }
}
