#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/train/broadcast_weights.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr sg::BatchSpec batch_of_4{.global = 4, .micro = 1, .seq = 16};

sg::Plan sharded(sg::Shard strategy, bool flat) {
  return {.layout = {.dp = 2, .tp = 2}, .shard = {.strategy = strategy, .flat = flat}};
}

// Fills the stored weights and optimizer states of all ranks with pseudo-random bytes.
void fill_differently(const sg::StepRun& run) {
  std::uint32_t state = 1;
  for (const sg::StepRank& rank : run.step().ranks) {
    for (const sg::StepWeight& weight : rank.weights) {
      for (const sg::StoredRange& part : {weight.value, weight.master, weight.first, weight.second}) {
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

TEST_CASE("a broadcast leaves shards unchanged and copies the tensors that every data-parallel rank has whole",
          "[graphs][weights]") {
  const auto strategy = GENERATE(sg::Shard::zero1, sg::Shard::grad_op, sg::Shard::full);
  const bool flat     = GENERATE(true, false);
  CAPTURE(to_string(strategy), flat);
  sg::LoopbackWorld world(4);
  sg::StepRun run(sg::training_step(sg::testing::small_gpt2(), sharded(strategy, flat), batch_of_4), world,
                  {.threads = 2});
  const sg::Layout& layout = run.step().layout;
  const auto copy          = [&](const sg::StoredRange& part) {
    const auto bytes = run.memory().bytes(part.buffer);
    const auto size  = sg::size_bytes(run.step().graph.spec(part.buffer).type);
    const auto own =
        bytes.subspan(static_cast<std::size_t>(part.offset) * size, static_cast<std::size_t>(part.size()) * size);
    return std::vector<std::byte>(own.begin(), own.end());
  };
  using Copies         = std::vector<std::vector<std::byte>>;
  const auto copies_of = [&](sg::StoredRange sg::StepWeight::*which) {
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
        std::int64_t held = 0;  // elements on both replicas together
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

namespace {

sg::Plan hybrid(bool flat, int group = 2) {
  return {.layout = {.dp = 4, .tp = 2}, .shard = {.strategy = sg::Shard::hybrid, .flat = flat, .group = group}};
}

// The value and both moments of each weight of a rank.
std::vector<std::vector<std::byte>> kept(const sg::StepRun& run, std::size_t rank) {
  std::vector<std::vector<std::byte>> all;
  for (const sg::StepWeight& weight : run.step().ranks[rank].weights) {
    for (const sg::StoredRange& part : {weight.value, weight.first, weight.second}) {
      all.emplace_back();
      if (part.empty()) continue;
      const auto bytes = run.memory().bytes(part.buffer);
      all.back().assign(bytes.begin(), bytes.end());
    }
  }
  return all;
}

}  // namespace

TEST_CASE("with hybrid sharding the first group broadcasts its shards to the other groups",
          "[graphs][weights][shard]") {
  const bool flat = GENERATE(true, false);
  CAPTURE(flat);
  sg::LoopbackWorld world(8);
  sg::StepRun run(sg::training_step(sg::testing::small_gpt2(), hybrid(flat), batch_of_4), world, {.threads = 2});
  const sg::Layout& layout = run.step().layout;
  fill_differently(run);
  CHECK_THROWS_AS(sg::check_weights(run), sg::Error);
  std::vector<std::vector<std::vector<std::byte>>> before, after;
  for (std::size_t rank = 0; rank < 8; ++rank) before.push_back(kept(run, rank));
  const std::uint64_t hash = sg::broadcast_weights(run);
  for (std::size_t rank = 0; rank < 8; ++rank) after.push_back(kept(run, rank));
  int whole = 0, shards = 0;
  for (std::size_t rank = 0; rank < 8; ++rank) {
    sg::Coord coord = layout.coord(sg::Rank{static_cast<int>(rank)});
    coord.dp %= 2;
    const auto first = static_cast<std::size_t>(sg::index(layout.rank(coord)));
    std::size_t i    = 0;
    for (const sg::StepWeight& weight : run.step().ranks[rank].weights) {
      for (const sg::StoredRange& part : {weight.value, weight.first, weight.second}) {
        CAPTURE(rank, run.step().spec(weight).name);
        const std::size_t from = part.sharded ? first : first_replica(layout, rank);
        const bool same        = after[rank][i] == before[from][i];
        CHECK(same);
        if (!part.empty()) ++(part.sharded ? shards : whole);
        ++i;
      }
    }
  }
  CHECK(whole > 0);
  CHECK(shards > 0);
  CHECK(sg::check_weights(run) == hash);
}

TEST_CASE("a flipped bit of a shard is found if another group has the same shard", "[graphs][weights][shard]") {
  const bool flat = GENERATE(true, false);
  sg::LoopbackWorld world(8);
  sg::Trainer trainer(sg::testing::small_gpt2(), hybrid(flat), batch_of_4, world, {.threads = 2});
  for (int step = 0; step < 3; ++step) trainer.step(sg::testing::tokens_for(batch_of_4, step, 64));
  const sg::StepRun& run   = trainer.run();
  const std::uint64_t hash = sg::check_weights(trainer.run());  // replicas are equal after training
  for (std::size_t rank = 0; rank < 8; ++rank) {
    const sg::Coord coord = run.step().ranks[rank].coord;
    for (const sg::StepWeight& weight : run.step().ranks[rank].weights) {
      if (!weight.first.sharded || weight.first.empty() || weight.block % 3 != 1) continue;
      const std::string& name = run.step().graph.spec(weight.first.buffer).name;
      CAPTURE(flat, rank, name);
      std::byte& byte = run.memory().bytes(weight.first.buffer)[0];
      byte ^= std::byte{0x04};
      sg::Coord other      = coord;
      other.dp             = coord.dp < 2 ? coord.dp + 2 : coord.dp - 2;
      const sg::Rank named = coord.dp < 2 ? run.step().layout.rank(other) : sg::Rank{static_cast<int>(rank)};
      CHECK_THROWS_WITH(sg::check_weights(trainer.run()),
                        ContainsSubstring(sg::str("weights: '", name, "' on rank ", named, " has hash ")));
      byte ^= std::byte{0x04};
      break;
    }
  }
  CHECK(sg::check_weights(trainer.run()) == hash);
}

TEST_CASE("the hash of weights covers all shards of one group", "[graphs][weights][shard]") {
  sg::LoopbackWorld world(8);
  sg::StepRun run(sg::training_step(sg::testing::small_gpt2(), hybrid(true), batch_of_4), world, {.threads = 2});
  sg::set_fresh_weights(run, 5);
  const std::uint64_t hash = sg::check_weights(run);
  const auto flip          = [&](int place) {  // the same bit in both groups
    for (const int dp : {place, place + 2}) {
               const auto rank = static_cast<std::size_t>(sg::index(run.step().layout.rank({.dp = dp})));
               for (const sg::StepWeight& weight : run.step().ranks[rank].weights) {
                 if (!weight.value.sharded || weight.value.empty()) continue;
        run.memory().bytes(weight.value.buffer)[0] ^= std::byte{0x04};
                 break;
      }
    }
  };
  for (const int place : {0, 1}) {
    CAPTURE(place);
    flip(place);
    CHECK(sg::check_weights(run) != hash);
    flip(place);
  }
  CHECK(sg::check_weights(run) == hash);
}

TEST_CASE("the broadcast graph of a rank built alone is the slice of the whole graph", "[graphs][weights]") {
  const auto strategy =
      GENERATE(sg::Shard::none, sg::Shard::zero1, sg::Shard::grad_op, sg::Shard::full, sg::Shard::hybrid);
  const bool flat = GENERATE(true, false);
  CAPTURE(to_string(strategy), flat);
  const auto model    = sg::testing::small_gpt2();
  const sg::Plan plan = strategy == sg::Shard::hybrid ? hybrid(flat) : sharded(strategy, flat);
  const auto all      = sg::weights_graph(sg::training_step(model, plan, batch_of_4));
  for (int rank = 0; rank < sg::Layout(plan.layout).num_ranks(); ++rank) {
    CAPTURE(rank);
    const auto alone = sg::training_step(model, plan, batch_of_4, {.only = sg::Rank{rank}});
    CHECK((sg::weights_graph(alone).graph == sg::slice(all.graph, sg::Rank{rank})));
  }
}
