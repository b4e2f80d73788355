// What stays on a device that has room left, and how much the host updates.
#include "graphs/step/offload/choose/fill_device.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/short_training.hpp"

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
        step_of({.optimizer = true, .device_bytes = device_bytes(all) + 700'000},
                {.simulator = &machine,
                 .offload_rates =
                     sg::OffloadRates{.h2d_bytes_per_s = 1e9, .d2h_bytes_per_s = 1e9, .host_elements_per_s = assumed}});
    const auto moved = static_cast<double>(units_of(step, sg::OffloadClass::optimizer).size());
    return std::pair(static_cast<double>(on_host(step)) / moved, step.offload.amounts_of.at(sg::Rank{0}).host_scale);
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
  // A limit that all of it fits is none.
  CHECK(reuses(step_of({.optimizer = true, .host_bytes = 2 * host_bytes(free)})) == 0);
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

TEST_CASE("gradients that only the host needs leave the device once", "[graphs][offload]") {
  constexpr sg::BatchSpec two{.global = 4, .micro = 2, .seq = 16};  // microbatches
  const auto of = [&](const sg::OffloadPlan& offload) {
    return sg::training_step(model_of(), {.offload = offload}, two);
  };
  const std::int64_t most   = device_bytes(of({}));
  const std::int64_t least  = device_bytes(of({.grads = true, .optimizer = true}));
  const std::int64_t budget = least + (most - least) / 2;
  const sg::StepGraph step  = of({.optimizer = true, .device_bytes = budget});
  sg::verify(step);
  CHECK(device_bytes(step) <= budget);
  CHECK(step.offload.amounts_of.at(sg::Rank{0}).host_gradients);
  const auto states = units_of(step, sg::OffloadClass::optimizer), gradients = units_of(step, sg::OffloadClass::grads);
  CHECK(states == gradients);  // on loopback the host updates all units that do not stay
  CHECK(states.size() > 1);
  CHECK(states.size() < units_of(of({.optimizer = true}), sg::OffloadClass::optimizer).size());
  // Each element is copied down once, and never up.
  std::map<std::uint32_t, std::int64_t> down;  // bytes by home
  for (const sg::HomeFormat& home : step.homes) {
    const bool lasts =
        step.graph.spec(home.home).lifetime == sg::Lifetime::persistent;  // that of a tied weight does not
    if (lasts && step.role(home.home) == sg::MemoryRole::gradients) down[home.home.id] = 0;
  }
  CHECK_FALSE(down.empty());
  for (std::uint32_t node = 0; node < step.graph.num_nodes(); ++node) {
    for (std::size_t i = 0; i < step.graph.num_accesses(sg::Node{node}); ++i) {
      const auto access = step.graph.access(sg::Node{node}, i);
      const auto home   = down.find(access.buffer.id);
      if (home == down.end()) continue;
      if (sg::writes(access.mode)) home->second += access.region.num_bytes();
      if (!sg::writes(access.mode)) CHECK(step.graph.lane(sg::Node{node}) == sg::Lane{sg::Rank{0}, sg::LaneKind::host});
    }
  }
  for (const auto& [home, bytes] : down) CHECK(bytes == step.graph.spec(sg::Buffer{home}).size_bytes);
  CHECK(sg::testing::train(model_of(), {.offload = {.optimizer = true, .device_bytes = budget}}, two, 4) ==
        sg::testing::train(model_of(), {}, two, 4));
}

TEST_CASE("gradients stay where host memory has no room for them, and where the update ends the step",
          "[graphs][offload]") {
  const sg::StepGraph all   = step_of({.optimizer = true});
  const std::int64_t budget = device_bytes(all);
  CHECK_FALSE(units_of(step_of({.optimizer = true, .device_bytes = budget}), sg::OffloadClass::grads).empty());
  const auto stays = [](const sg::StepGraph& step) {
    sg::verify(step);
    return units_of(step, sg::OffloadClass::grads).empty();
  };
  const std::int64_t at_end = device_bytes(step_of({.optimizer = true, .overlap = false}));
  CHECK(stays(step_of({.optimizer = true, .device_bytes = at_end, .overlap = false})));
  // Room for the states of all units, with staging that is shared, but not for the gradients of all of them.
  const std::int64_t streamed = budget + (std::int64_t{1} << 19);  // with slots, because the host may have no room
  std::int64_t states         = 0;
  for (const sg::OffloadedUnit& unit : all.offload.units) states += unit.bytes;
  const sg::StepGraph tight =
      step_of({.optimizer = true, .device_bytes = streamed, .host_bytes = states + states / 16});
  CHECK(device_bytes(tight) <= streamed);
  CHECK(host_bytes(tight) <= states + states / 16);
  sg::verify(tight);
  // With a disk they would take the room of states, so they move only if the device is too small otherwise.
  const sg::testing::TempFolder folder;
  const auto with_disk = [&](std::int64_t device_bytes) {
    return step_of({.optimizer    = true,
                    .device_bytes = device_bytes,
                    .host_bytes   = states + states / 16,
                    .disk         = folder.path().string()});
  };
  CHECK(stays(with_disk(streamed + (std::int64_t{1} << 19))));
  CHECK_FALSE(stays(with_disk(streamed)));
}

TEST_CASE("filled devices train with the bits of no offload in every layout", "[graphs][offload]") {
  constexpr sg::BatchSpec two{.global = 8, .micro = 2, .seq = 16};
  struct Setting {
    const char* name;
    sg::Plan plan;
  };
  std::vector<Setting> settings{
      {"zero1", {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::zero1}}},
      {"full", {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full}}},
      {"dp 2", {.layout = {.dp = 2}}},
      {"tp 2", {.layout = {.tp = 2}}},
      {"pp 2", {.layout = {.pp = 2}}},
      {"zero bubble", {.layout = {.pp = 2}, .pipeline = {.schedule = "zb-h1"}}},
      {"bf16", {.precision = {.param = sg::DType::bf16}}},
      {"fp16", {.precision = {.param = sg::DType::f16}}},
  };
  if (sg::testing::sanitized()) settings.resize(2);
  for (const auto& [name, plan] : settings) {
    CAPTURE(name);
    const auto bytes = [&](const sg::OffloadPlan& offload) {
      sg::Plan with = plan;
      with.offload  = offload;
      return device_bytes(sg::training_step(model_of(), with, two));
    };
    sg::Plan filled          = plan;
    filled.offload           = {.optimizer = true, .device_bytes = (bytes({}) + bytes({.optimizer = true})) / 2};
    const sg::StepGraph step = sg::training_step(model_of(), filled, two);
    sg::verify(step);
    CHECK_FALSE(step.offload.units.empty());
    CHECK(sg::testing::train(model_of(), filled, two, 3) == sg::testing::train(model_of(), plan, two, 3));
  }
}
