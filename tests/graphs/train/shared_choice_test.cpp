// What process 0 of a job chooses for all.
#include "graphs/train/shared_choice.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/simulate/machine.hpp"
#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/memory_requirement.hpp"
#include "graphs/step/training_step.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"
#include "tests/support/worlds/thread_processes.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::Exchanges;
using sg::testing::in_processes;
using sg::testing::neighbours;
using sg::testing::small_gpt2;

namespace {

constexpr sg::BatchSpec batch{.global = 4, .micro = 2, .seq = 16};

std::int64_t bytes_of(const sg::Plan& plan) {
  std::int64_t most = 0;
  for (const auto& rank : sg::memory_requirements(small_gpt2(), plan, batch)) most = std::max(most, rank.peak_bytes);
  return most;
}

sg::Plan automatic(const sg::LayoutSpec& layout) {
  sg::Plan all{.layout = layout}, least{.layout = layout, .recompute = sg::Recompute::full};
  least.offload.optimizer = true;
  sg::Plan plan           = all;
  plan.recompute          = sg::Recompute::automatic;
  plan.offload            = {.optimizer = true, .device_bytes = (bytes_of(all) + bytes_of(least)) / 2};
  return plan;
}

// The rates of a process: which units the host updates depends on them.
sg::OffloadRates rates_of(int process) {
  return {.h2d_bytes_per_s = 1e9, .d2h_bytes_per_s = 1e9, .host_elements_per_s = process == 0 ? 1e8 : 1e6};
}

}  // namespace

TEST_CASE("process 0 chooses layers and units for all processes", "[graphs][train][offload]") {
  for (const sg::LayoutSpec& layout : {sg::LayoutSpec{.pp = 2}, sg::LayoutSpec{.tp = 2}}) {
    if (sg::testing::sanitized() && layout.tp > 1) continue;
    CAPTURE(layout.pp, layout.tp);
    const sg::Plan plan = automatic(layout);
    std::vector<sg::StepOptions> chosen(2);
    std::vector<std::map<sg::Rank, sg::OffloadAmounts>> alone(2);
    in_processes(neighbours(2, 2), Exchanges::hub, [&](sg::World& world) {
      const int process = world.peers()->process();
      // Processes with different measurements, of which the second has a faster device.
      const sg::Machine machine = sg::device_machine(
          {.ranks = 2, .flops_per_s = process == 0 ? 1e12 : 1e9, .link_bytes_per_s = process == 0 ? 1e9 : 1e12});
      const sg::StepOptions own{.only                = sg::RankSet(sg::Rank{process}),
                                .simulator           = &machine,
                                .offload_rates       = rates_of(process),
                                .device_memory_bytes = process == 0 ? 1'000'000 : 500'000};
      const auto at = static_cast<std::size_t>(process);
      chosen[at]    = sg::with_shared_choice(small_gpt2(), plan, batch, world.peers(), own);
      alone[at]     = sg::choose_offload(small_gpt2(), plan, batch, own);
      static_cast<void>(sg::training_step(small_gpt2(), plan, batch, chosen[at]));
    });
    CHECK(chosen[0].offload_of.size() == 2);
    CHECK(chosen[0].offload_of.at(sg::Rank{0}) == alone[0].at(sg::Rank{0}));
    CHECK(chosen[0].offload_of == chosen[1].offload_of);
    CHECK(chosen[0].offload_rates == chosen[1].offload_rates);
    CHECK(chosen[1].offload_rates == rates_of(0));
    CHECK(chosen[0].device_memory_bytes == 500'000);  // the smallest
    CHECK(chosen[1].device_memory_bytes == 500'000);
    // Alone the processes would differ.
    CHECK(alone[0].at(sg::Rank{0}) != alone[1].at(sg::Rank{1}));
  }
}

TEST_CASE("processes with different measurements train with the bits of one process", "[graphs][train][offload]") {
  const sg::LayoutSpec layout{.tp = 2};
  const sg::Plan plan = automatic(layout);
  const auto usual    = sg::testing::train(small_gpt2(), {.layout = layout}, batch, 3);
  std::vector<std::vector<double>> losses(2);
  std::vector<std::map<sg::Rank, sg::OffloadAmounts>> chosen(2);
  in_processes(neighbours(2, 2), Exchanges::hub, [&](sg::World& world) {
    const int process         = world.peers()->process();
    const sg::Machine machine = sg::device_machine(
        {.ranks = 2, .flops_per_s = process == 0 ? 1e12 : 1e9, .link_bytes_per_s = process == 0 ? 1e9 : 1e12});
    sg::Trainer trainer(small_gpt2(), plan, batch, world, {.threads = 1, .seed = 7, .simulator = &machine});
    const auto at = static_cast<std::size_t>(process);
    chosen[at]    = trainer.run().step().offload.amounts_of;
    for (int step = 0; step < 3; ++step)
      losses[at].push_back(trainer.step(sg::testing::tokens_for(batch, step, small_gpt2().vocab)).loss);
  });
  CHECK(chosen[0] == chosen[1]);
  CHECK_FALSE(chosen[0].empty());
  CHECK(losses[0] == losses[1]);
  CHECK(losses[0] == usual.loss);
}

TEST_CASE("a choice that process 0 cannot make is refused in all", "[graphs][train][offload]") {
  sg::Plan plan             = automatic({.dp = 2});
  plan.offload.device_bytes = 1000;
  std::vector<std::string> errors(2);
  in_processes(neighbours(2, 2), Exchanges::hub, [&](sg::World& world) {
    const int process = world.peers()->process();
    try {
      const sg::StepOptions own{.only = sg::RankSet(sg::Rank{process})};
      static_cast<void>(sg::with_shared_choice(small_gpt2(), plan, batch, world.peers(), own));
    } catch (const sg::Error& error) {
      errors[static_cast<std::size_t>(process)] = error.what();
    }
  });
  for (const std::string& error : errors) CHECK_THAT(error, ContainsSubstring("recompute: auto finds no choice"));
}
