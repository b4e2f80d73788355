// What stays on a device that has room left, and how much the host updates.
#include "graphs/step/offload/fill_device.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <set>
#include <string>

#include "engine/base/error.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

constexpr sg::BatchSpec batch{.global = 2, .micro = 2, .seq = 16};

sg::Model model_of() { return sg::gpt2({.layers = 8, .width = 64, .heads = 4, .context = 16, .vocab = 128}); }

sg::StepGraph step_of(const sg::OffloadPlan& offload, const sg::StepOptions& options = {}) {
  return sg::training_step(model_of(), {.offload = offload}, batch, options);
}

std::int64_t device_bytes(const sg::StepGraph& step) { return sg::plan_memory(step.graph).device_bytes(sg::Rank{0}); }
std::int64_t host_bytes(const sg::StepGraph& step) {
  return sg::plan_memory(step.graph).arena(sg::Rank{0}, sg::Space::pinned).size_bytes;
}

std::set<std::string> units_of(const sg::StepGraph& step, sg::OffloadClass of) {
  std::set<std::string> names;
  for (const sg::OffloadedUnit& unit : step.offload.units)
    if (unit.of == of) names.insert(unit.unit);
  return names;
}

auto on_host(const sg::StepGraph& step) {
  return std::ranges::count(step.offload.units, sg::UpdateMode::host, &sg::OffloadedUnit::update);
}

}  // namespace

TEST_CASE("states that stay on the device keep their gradients there", "[graphs][offload]") {
  const sg::StepGraph all     = step_of({.grads = true, .optimizer = true});
  const std::int64_t least    = device_bytes(all);
  const sg::StepGraph without = step_of({});
  const std::int64_t most     = device_bytes(without);
  for (const double share : {0.3, 0.7}) {
    const auto budget        = least + static_cast<std::int64_t>(share * static_cast<double>(most - least));
    const sg::StepGraph step = step_of({.grads = true, .optimizer = true, .device_bytes = budget});
    const auto states        = units_of(step, sg::OffloadClass::optimizer);
    const auto gradients     = units_of(step, sg::OffloadClass::grads);
    const auto all_states    = units_of(all, sg::OffloadClass::optimizer);
    CAPTURE(share);
    CHECK(device_bytes(step) <= budget);
    CHECK(states.size() < all_states.size());
    CHECK_FALSE(states.contains("layer0"));  // the first units stay: the next step needs them first
    for (const std::string& unit : all_states) {
      if (!states.contains(unit)) CHECK_FALSE(gradients.contains(unit));
    }
    sg::verify(step);
  }
}

TEST_CASE("gradients of streamed units fill what is left", "[graphs][offload]") {
  // A host that updates nothing: all units that do not stay are streamed.
  const sg::StepOptions options{
      .offload_rates = sg::OffloadRates{.h2d_bytes_per_s = 1e9, .d2h_bytes_per_s = 1e9, .host_elements_per_s = 0}};
  const std::int64_t least = device_bytes(step_of({.grads = true, .optimizer = true}, options));
  bool some                = false;
  for (const std::int64_t more : {40'000, 120'000, 160'000, 200'000}) {
    const sg::StepGraph step = step_of({.grads = true, .optimizer = true, .device_bytes = least + more}, options);
    CHECK(device_bytes(step) <= least + more);
    CHECK(on_host(step) == 0);
    const auto states    = units_of(step, sg::OffloadClass::optimizer),
               gradients = units_of(step, sg::OffloadClass::grads);
    for (const std::string& unit : states) some |= !gradients.contains(unit);
  }
  CHECK(some);
}

TEST_CASE("the host updates as much as makes the simulated step short", "[graphs][offload]") {
  // Rates that are wrong for the machine: the search corrects them.
  const auto share_with = [](double host_rate, double assumed) {
    const sg::Machine machine = sg::device_machine({.flops_per_s      = 1e15,
                                                    .bytes_per_s      = 1e14,
                                                    .link_bytes_per_s = 1e9,
                                                    .host_bytes_per_s = 30 * host_rate,
                                                    .launch_s         = 1e-9});
    const sg::StepGraph all   = step_of({.optimizer = true});
    const sg::StepGraph step =
        step_of({.optimizer = true, .device_bytes = device_bytes(all) + 100'000},
                {.simulator = &machine,
                 .offload_rates =
                     sg::OffloadRates{.h2d_bytes_per_s = 1e9, .d2h_bytes_per_s = 1e9, .host_elements_per_s = assumed}});
    return std::pair(on_host(step), step.offload.amounts_of.at(sg::Rank{0}).host_scale);
  };
  const auto [slow, slower] = share_with(1e6, 1e8);
  const auto [fast, faster] = share_with(1e9, 1e7);
  CHECK(slow < fast);
  CHECK(slower < 1);
  CHECK(faster > 1);
}

TEST_CASE("a device is filled from above where the host has no room for all states", "[graphs][offload]") {
  const sg::StepGraph all  = step_of({.optimizer = true});
  const std::int64_t host  = host_bytes(all) / 2;
  const std::int64_t large = device_bytes(step_of({}));
  const sg::StepGraph step = step_of({.optimizer = true, .device_bytes = large, .host_bytes = host});
  CHECK(device_bytes(step) <= large);
  CHECK(host_bytes(step) <= host);
  CHECK(units_of(step, sg::OffloadClass::optimizer).size() < units_of(all, sg::OffloadClass::optimizer).size());
  CHECK_THROWS_MATCHES(step_of({.optimizer = true, .device_bytes = device_bytes(all), .host_bytes = host / 4}),
                       sg::Error, MessageMatches(ContainsSubstring("offload.host_bytes: rank 0 needs")));
}

TEST_CASE("staging of host updates shares memory only where host memory is limited", "[graphs][offload]") {
  const auto reuses = [](const sg::StepGraph& step) {
    const sg::MemoryPlan plan = sg::plan_memory(step.graph);
    return std::ranges::count_if(plan.reuse_edges, [&](const sg::ReuseEdge& edge) {
      return step.graph.spec(edge.old_tenant).space == sg::Space::pinned;
    });
  };
  const sg::StepGraph free = step_of({.optimizer = true});
  CHECK(reuses(free) == 0);
  const sg::StepGraph limited = step_of({.optimizer = true, .host_bytes = host_bytes(free) * 9 / 10});
  CHECK(reuses(limited) > 0);
}

TEST_CASE("a filled device trains with the bits of no offload", "[graphs][offload]") {
  const sg::StepGraph all = step_of({.grads = true, .optimizer = true});
  const sg::Plan plan{.offload = {.grads        = true,
                                  .optimizer    = true,
                                  .device_bytes = (device_bytes(all) + device_bytes(step_of({}))) / 2}};
  CHECK(sg::testing::train(model_of(), plan, batch, 4) == sg::testing::train(model_of(), {}, batch, 4));
}

TEST_CASE("the host updates what cannot be streamed for want of slots", "[graphs][offload]") {
  // By the rates alone nearly everything would be streamed.
  const sg::StepOptions options{
      .offload_rates = sg::OffloadRates{.h2d_bytes_per_s = 1e12, .d2h_bytes_per_s = 1e12, .host_elements_per_s = 1e9}};
  const std::int64_t on_host_only = device_bytes(step_of({.optimizer = true}));
  const sg::StepGraph streamed    = step_of({.optimizer = true}, options);
  REQUIRE(on_host(streamed) <= 1);
  REQUIRE(device_bytes(streamed) > on_host_only + 10'000);
  const sg::StepGraph step = step_of({.optimizer = true, .device_bytes = on_host_only + 10'000}, options);
  CHECK(device_bytes(step) <= on_host_only + 10'000);
  CHECK(on_host(step) > on_host(streamed));
}
