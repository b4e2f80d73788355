// Strategies of offload: when they act, how much they move, and what they refuse.
#include "graphs/step/offload/choose/strategy.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/plan/memory_preset.hpp"
#include "graphs/step/memory_limit.hpp"
#include "graphs/step/training_step.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::OffloadAmounts;
using sg::OffloadStrategy;

namespace {

// 100 units of 10 bytes each: 40 of the optimizer, and 20 of each other class. 200 bytes cannot be moved.
struct Bytes {
  int num_plans = 0;
  sg::StrategyCase of;
  explicit Bytes(OffloadStrategy strategy, std::int64_t budget) {
    of.plan.strategy = strategy;
    of.subject       = "rank 0";
    of.budget_bytes  = budget;
    of.budget_key    = "offload.device_bytes";
    of.units         = {40, 20, 20, 20};
    of.moved_share   = [](const OffloadAmounts& a) {
      return 0.4 * a.optimizer + 0.2 * (a.grads + a.params + a.activations);
    };
    of.device_bytes = [this](const OffloadAmounts& a) {
      ++num_plans;
      return static_cast<std::int64_t>(1200.5 - 1000 * of.moved_share(a));
    };
  }
  Bytes(const Bytes&) = delete;
};

std::string refusal(const sg::StrategyCase& of) {
  try {
    static_cast<void>(sg::choose_amounts(of));
    return {};
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::config);
    return error.what();
  }
}

constexpr sg::BatchSpec batch{.global = 4, .micro = 2, .seq = 8};

std::int64_t device_bytes(const sg::StepGraph& step, const sg::Plan& plan) {
  const sg::MemoryPlan memory = sg::plan_memory(step.graph, {.reuse = plan.reuse});
  std::int64_t most           = 0;
  for (const sg::Rank rank : step.graph.ranks()) most = std::max(most, memory.device_bytes(rank));
  return most;
}
std::int64_t device_bytes(const sg::Plan& plan) {
  return device_bytes(sg::training_step(sg::testing::small_gpt2(), plan, batch), plan);
}
std::int64_t moved_bytes(const sg::StepGraph& step) {
  std::int64_t sum = 0;
  for (const sg::OffloadedUnit& unit : step.offload.units) sum += unit.bytes;
  return sum;
}

sg::Plan with(sg::Plan plan, OffloadStrategy strategy, std::int64_t device_bytes) {
  plan.offload.strategy     = strategy;
  plan.offload.device_bytes = device_bytes;
  return plan;
}
std::int64_t scaled(std::int64_t bytes, double by) {
  return static_cast<std::int64_t>(static_cast<double>(bytes) * by);
}

std::string refusal(const sg::Plan& plan, const sg::StepOptions& options = {}) {
  try {
    static_cast<void>(sg::training_step(sg::testing::small_gpt2(), plan, batch, options));
    return {};
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::config);
    return error.what();
  }
}

}  // namespace

TEST_CASE("a strategy does nothing below its threshold", "[graphs][offload][strategy]") {
  for (const auto strategy : {OffloadStrategy::conservative, OffloadStrategy::balanced, OffloadStrategy::aggressive,
                              OffloadStrategy::extreme}) {
    CAPTURE(strategy);
    const auto enough = static_cast<std::int64_t>(1200 / sg::pressure_threshold(strategy)) + 1;
    Bytes below(strategy, enough);
    CHECK_FALSE(sg::choose_amounts(below.of).acts());
    CHECK(below.num_plans == 1);
    Bytes above(strategy, enough - 3);
    const sg::StrategyChoice choice = sg::choose_amounts(above.of);
    CHECK(choice.acts());
    CHECK(choice.bytes_before == 1200);
    CHECK(choice.device_bytes < 1200);
  }
}

TEST_CASE("a strategy moves the fewest units that are enough, optimizer first", "[graphs][offload][strategy]") {
  // 0.75 * 1400 = 1050: 150 bytes have to go.
  Bytes some(OffloadStrategy::balanced, 1400);
  const sg::StrategyChoice choice = sg::choose_amounts(some.of);
  CHECK(choice.amounts == OffloadAmounts{.optimizer = 15.0 / 40});
  CHECK(choice.device_bytes == 1050);
  CHECK(some.num_plans <= 9);
  // 0.6 * 1000 = 600: 600 bytes, which are the optimizer and all gradients.
  Bytes more(OffloadStrategy::aggressive, 1000);
  CHECK(sg::choose_amounts(more.of).amounts == OffloadAmounts{.optimizer = 1, .grads = 1});
  Bytes most(OffloadStrategy::extreme, 750);
  CHECK(sg::choose_amounts(most.of).amounts ==
        OffloadAmounts{.optimizer = 1, .grads = 1, .params = 1, .activations = 0.5});
}

TEST_CASE("a strategy moves at most its share, and is content if the step then fits", "[graphs][offload][strategy]") {
  // 0.9 * 1100 = 990 would need 210 bytes; 0.2 of 1000 may be moved.
  Bytes most(OffloadStrategy::conservative, 1100);
  const sg::StrategyChoice choice = sg::choose_amounts(most.of);
  CHECK(choice.amounts == OffloadAmounts{.optimizer = 0.5});
  CHECK(choice.moved_share <= 0.2 + 1e-9);
  CHECK(choice.device_bytes == 1000);
}

TEST_CASE("a strategy that cannot move enough is refused", "[graphs][offload][strategy][refuses]") {
  CHECK(
      refusal(Bytes(OffloadStrategy::conservative, 900).of) ==
      "offload.strategy: conservative moves at most 0.2 of what may be offloaded, and rank 0 then needs 1000 (1000 B) "
      "of the device; offload.device_bytes is 900 (900 B)");
  CHECK_THAT(refusal(Bytes(OffloadStrategy::extreme, 199).of),
             ContainsSubstring("extreme can move all of what may be offloaded, and rank 0 then needs 200 (200 B)"));
  // Half of the units have no place in host memory.
  Bytes crowded(OffloadStrategy::extreme, 300);
  const auto share        = crowded.of.moved_share;
  crowded.of.moved_share  = [share](const OffloadAmounts& a) { return share(a) > 0.5 ? 2 : share(a); };
  crowded.of.device_bytes = [share](const OffloadAmounts& a) {
    return static_cast<std::int64_t>(1200.5 - 1000 * share(a));
  };
  CHECK_THAT(refusal(crowded.of), ContainsSubstring("needs 700 (700 B)"));
}

TEST_CASE("planned steps follow their strategies", "[graphs][offload][strategy]") {
  const sg::Plan plain;
  const std::int64_t before = device_bytes(plain);
  for (const auto strategy : {OffloadStrategy::conservative, OffloadStrategy::balanced, OffloadStrategy::aggressive,
                              OffloadStrategy::extreme}) {
    CAPTURE(strategy);
    const double threshold = sg::pressure_threshold(strategy);
    // Just enough: nothing is moved, and the step is that without offload.
    const sg::Plan idle         = with(plain, strategy, scaled(before, 1 / threshold) + 2);
    const sg::StepGraph as_ever = sg::training_step(sg::testing::small_gpt2(), idle, batch);
    CHECK(as_ever.offload.units.empty());
    CHECK(as_ever.graph == sg::training_step(sg::testing::small_gpt2(), plain, batch).graph);
    // 3% too little.
    const sg::Plan acts      = with(plain, strategy, scaled(before, 0.97 / threshold));
    const sg::StepGraph step = sg::training_step(sg::testing::small_gpt2(), acts, batch);
    CHECK_FALSE(step.offload.units.empty());
    CHECK(device_bytes(step, acts) <= scaled(acts.offload.device_bytes, threshold));
    for (const sg::OffloadedUnit& unit : step.offload.units) CHECK(unit.of == sg::OffloadClass::optimizer);
    // Less memory moves more.
    const sg::Plan less = with(plain, strategy, scaled(before, 0.9 / threshold));
    CHECK(moved_bytes(sg::training_step(sg::testing::small_gpt2(), less, batch)) >= moved_bytes(step));
  }
}

TEST_CASE("a process with one rank chooses what a process with all ranks does", "[graphs][offload][strategy]") {
  const sg::BatchSpec of_three{.global = 6, .micro = 1, .seq = 8};
  const auto shard = GENERATE(sg::Shard::none, sg::Shard::zero1, sg::Shard::full);
  CAPTURE(to_string(shard));
  const sg::Plan plain{.layout = {.dp = 3, .pp = 2}, .shard = {.strategy = shard, .min_params = 50}};
  const sg::StepGraph without = sg::training_step(sg::testing::small_gpt2(), plain, of_three);
  const std::int64_t most     = sg::plan_memory(without.graph).arena(sg::Rank{0}).size_bytes;
  sg::Plan manual             = plain;
  manual.offload              = {.optimizer = true, .device_bytes = scaled(most, 0.96)};
  for (const sg::Plan& plan : {with(plain, OffloadStrategy::balanced, scaled(most, 1.2)), manual}) {
    const auto units_of = [](const sg::StepGraph& step, sg::Rank rank) {
      std::vector<std::string> names;
      for (const sg::OffloadedUnit& unit : step.offload.units) {
        if (unit.rank == rank) names.push_back(sg::str(to_string(unit.of), " ", unit.unit, " ", unit.bytes));
      }
      return names;
    };
    const sg::StepGraph whole = sg::training_step(sg::testing::small_gpt2(), plan, of_three);
    CHECK_FALSE(whole.offload.units.empty());
    for (const sg::Rank rank : whole.graph.ranks()) {
      CAPTURE(rank);
      const sg::StepGraph own = sg::training_step(sg::testing::small_gpt2(), plan, of_three, {.only = rank});
      CHECK(own.offload.amounts_of.at(rank) == whole.offload.amounts_of.at(rank));
      CHECK(units_of(own, rank) == units_of(whole, rank));
    }
  }
}

TEST_CASE("fields say what a strategy may move", "[graphs][offload][strategy]") {
  sg::Plan plan           = with({}, OffloadStrategy::extreme, scaled(device_bytes(sg::Plan{}), 0.95 / 0.4));
  plan.offload.params     = true;
  const sg::StepGraph one = sg::training_step(sg::testing::small_gpt2(), plan, batch);
  REQUIRE_FALSE(one.offload.units.empty());
  for (const sg::OffloadedUnit& unit : one.offload.units) CHECK(unit.of == sg::OffloadClass::params);
}

TEST_CASE("pressure is on device_bytes, else on the device's memory, and on the host it must be given",
          "[graphs][offload][strategy]") {
  const std::int64_t before = device_bytes(sg::Plan{});
  const sg::Plan plan       = with({}, OffloadStrategy::balanced, 0);
  CHECK(refusal(plan) ==
        "offload.strategy: balanced needs the size of the device, which is not known here (offload.device_bytes, such "
        "as \"16GiB\")");
  const auto units = [&](const sg::Plan& of, std::int64_t memory) {
    return sg::training_step(sg::testing::small_gpt2(), of, batch, {.device_memory_bytes = memory})
        .offload.units.size();
  };
  CHECK(units(plan, 2 * before) == 0);
  CHECK(units(plan, before) > 0);
  CHECK(units(with({}, OffloadStrategy::balanced, 2 * before), before) == 0);
  CHECK(units(with({}, OffloadStrategy::balanced, before), 2 * before) > 0);
}

TEST_CASE("device_bytes is a limit with every strategy, and the smaller of it and memory.limit_bytes counts",
          "[graphs][offload][strategy][memory]") {
  const std::int64_t needed = device_bytes(sg::Plan{});
  const auto limited        = [&](std::int64_t device, std::int64_t memory) {
    sg::Plan plan           = with({}, OffloadStrategy::manual, device);
    plan.memory_limit_bytes = memory;
    return plan;
  };
  CHECK(sg::device_limit(limited(0, 0)).bytes == 0);
  CHECK(sg::device_limit(limited(5, 0)).bytes == 5);
  CHECK(sg::device_limit(limited(5, 7)).key == "offload.device_bytes");
  CHECK(sg::device_limit(limited(7, 5)).key == "memory.limit_bytes");
  CHECK(sg::device_limit(limited(0, 5)).bytes == 5);

  CHECK(refusal(limited(needed, 0)).empty());
  CHECK_THAT(refusal(limited(needed - 1, 0)), ContainsSubstring("offload.device_bytes: rank 0 needs ") &&
                                                  ContainsSubstring(" (offload.optimizer=true needs "));
  CHECK_THAT(refusal(limited(needed, needed - 1)), ContainsSubstring("memory.limit_bytes: rank 0 needs "));
  CHECK_THAT(refusal(limited(needed - 1, 2 * needed)), ContainsSubstring("offload.device_bytes: rank 0 needs "));
  // Offload is a way to fit.
  sg::Plan offloaded          = limited(needed - 1, 0);
  offloaded.offload.optimizer = true;
  CHECK(refusal(offloaded).empty());
  // A strategy looks at the smaller one too.
  sg::Plan strategy           = with({}, OffloadStrategy::balanced, 4 * needed);
  strategy.memory_limit_bytes = needed;
  CHECK_FALSE(sg::training_step(sg::testing::small_gpt2(), strategy, batch).offload.units.empty());
}

TEST_CASE("a strategy starts from what a memory preset leaves", "[graphs][offload][strategy][memory]") {
  const sg::Plan basic{.layout = {.dp = 2}}, saves = sg::with_preset(basic, sg::MemoryPreset::aggressive);
  const std::int64_t large = device_bytes(basic), small = device_bytes(saves);
  REQUIRE(small < large);
  // Between both: the preset is enough, and nothing is offloaded.
  const std::int64_t budget = scaled(small, 1 / 0.75) + 2;
  REQUIRE(budget < scaled(large, 1 / 0.75));
  const auto units = [&](const sg::Plan& plan) {
    return sg::training_step(sg::testing::small_gpt2(), with(plan, OffloadStrategy::balanced, budget), batch)
        .offload.units.size();
  };
  CHECK(units(saves) == 0);
  CHECK(units(basic) > 0);
}

TEST_CASE("a strategy changes no bit, and an evaluation has the weights where training has them",
          "[graphs][offload][strategy]") {
  const sg::LayoutSpec layout = GENERATE(sg::LayoutSpec{}, sg::LayoutSpec{.pp = 2}, sg::LayoutSpec{.dp = 2});
  const sg::Plan plain{.layout = layout};
  const sg::Plan plan = with(plain, OffloadStrategy::extreme, scaled(device_bytes(plain), 1.2));
  REQUIRE_FALSE(sg::training_step(sg::testing::small_gpt2(), plan, batch).offload.units.empty());
  CHECK(sg::testing::train(sg::testing::small_gpt2(), plan, batch, 3) ==
        sg::testing::train(sg::testing::small_gpt2(), plain, batch, 3));

  std::vector<std::int32_t> tokens(static_cast<std::size_t>(batch.global * batch.seq + 1));
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i % 7);
  std::vector<double> losses;
  for (const sg::Plan& each : {plain, plan}) {
    sg::LoopbackWorld world(sg::Layout(layout).num_ranks());
    sg::Trainer trainer(sg::testing::small_gpt2(), each, batch, world, {.threads = 2, .seed = 3});
    sg::Evaluator evaluator(trainer, batch);
    static_cast<void>(trainer.step(tokens));
    losses.push_back(evaluator.loss(tokens));
  }
  CHECK(losses[0] == losses[1]);
}
