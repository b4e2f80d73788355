// Recompute::automatic: which layers are kept, recomputed and offloaded.
#include "graphs/step/offload/choose/layers.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <set>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/recompute.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/predict/offload_report.hpp"
#include "graphs/step/memory_requirement.hpp"
#include "graphs/step/training_step.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::ActivationMode;
using sg::LayerCounts;
using sg::testing::small_gpt2;
using sg::testing::small_llama;

namespace {

// 48 layers of 100 bytes. A recomputed layer keeps 10 bytes, and one of them is whole during its backward pass. An
// offloaded layer keeps none, beside two slots. The backward pass begins in the middle of the step, so an offloaded
// layer costs no time as long as its two copies take less than the compute.
struct Alike {
  sg::LayerCase of;
  std::set<LayerCounts> tried;
  Alike(std::int64_t budget, int most_offloaded, double copy_s) {
    of.num_layers     = 48;
    of.most_offloaded = most_offloaded;
    of.budget_bytes   = budget;
    of.budget_key     = "offload.device_bytes";
    of.subject        = "rank 0";
    of.attempt        = [this, copy_s](const LayerCounts& counts) -> sg::LayerTrial {
      tried.insert(counts);
      return {bytes(counts), std::max(144.0 + counts.recomputed, 2 * copy_s * counts.offloaded)};
    };
  }
  Alike(const Alike&) = delete;
  static std::int64_t bytes(const LayerCounts& counts) {
    const int kept = 48 - counts.offloaded - counts.recomputed;
    return 1000 + 100 * kept + 10 * counts.recomputed + (counts.recomputed > 0 ? 90 : 0) +
           100 * std::min(counts.offloaded, 2);
  }
};

std::string refusal(const auto& call) {
  try {
    static_cast<void>(call());
    return {};
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::config);
    return error.what();
  }
}

constexpr int steps = 3;
constexpr sg::BatchSpec batch{.global = 8, .micro = 4, .seq = 16};

// The bytes of the largest rank with all layers kept, and with all of them recomputed.
struct Range {
  std::int64_t kept, recomputed;
  explicit Range(sg::Plan plan, const sg::BatchSpec& of = batch) {
    const auto bytes = [&](sg::Recompute kind) {
      plan.recompute = kind;
      return sg::largest(sg::memory_requirements(small_gpt2(), plan, of)).peak_bytes;
    };
    kept       = bytes(sg::Recompute::none);
    recomputed = bytes(sg::Recompute::full);
  }
  [[nodiscard]] std::int64_t at(double share) const {  // of the way from recomputed to kept
    return recomputed + static_cast<std::int64_t>(share * static_cast<double>(kept - recomputed));
  }
};

sg::Plan automatic(sg::Plan plan, std::int64_t limit) {
  plan.recompute          = sg::Recompute::automatic;
  plan.memory_limit_bytes = limit;
  return plan;
}

std::set<int> layers_with(const sg::StepGraph& step, std::string_view phase) {
  std::set<int> found;
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    if (step.graph.labels(sg::Node{i}).phase == phase) found.insert(step.graph.labels(sg::Node{i}).layer);
  }
  return found;
}

std::vector<double> losses(sg::StepGraph step) {
  sg::LoopbackWorld world(step.layout.num_ranks());
  const auto tokens = sg::testing::tokens_for(step.batch, 0, step.model.vocab);
  sg::StepRun run(std::move(step), world, {.threads = 2});
  sg::set_fresh_weights(run, 7);
  run.set_tokens(tokens);
  for (const sg::StepRank& rank : run.step().ranks) {
    for (const sg::Buffer number : {rank.num_updates, rank.step_number}) {
      if (number != sg::Buffer{}) run.memory().set_first(number, std::int64_t{1});
    }
  }
  run.run();
  return {run.loss(), run.grad_norm()};
}

}  // namespace

TEST_CASE("all layers are kept where they fit, after one attempt", "[graphs][offload][layers]") {
  Alike all(5800, 48, 1);
  CHECK(sg::choose_layers(all.of).counts == LayerCounts{});
  CHECK(all.tried.size() == 1);
}

TEST_CASE("as few layers as fit are recomputed", "[graphs][offload][layers]") {
  const std::int64_t budget = GENERATE(5799, 5700, 4000, 2222, 1570);
  CAPTURE(budget);
  Alike some(budget, 0, 1);
  const sg::LayerChoice choice = sg::choose_layers(some.of);
  CHECK(choice.counts.offloaded == 0);
  CHECK(Alike::bytes(choice.counts) <= budget);
  CHECK(Alike::bytes({.recomputed = choice.counts.recomputed - 1}) > budget);
  CHECK(choice.num_trials == static_cast<int>(some.tried.size()));
  CHECK(choice.num_trials <= 6);
}

TEST_CASE("layers are offloaded as far as transfers are hidden, and recomputed beyond", "[graphs][offload][layers]") {
  // Copies are free: 20 layers are offloaded, so that 28 and two slots fit.
  Alike free(4000, 48, 0.001);
  CHECK(sg::choose_layers(free.of).counts == LayerCounts{.offloaded = 20});
  CHECK(free.tried.size() <= 14);
  // Copies are slow: none pays.
  Alike slow(4000, 48, 1000);
  CHECK(sg::choose_layers(slow.of).counts == LayerCounts{.recomputed = 21});
  // 8 layers can be hidden.
  Alike both(2500, 48, 10);
  const sg::LayerChoice mixed = sg::choose_layers(both.of);
  CHECK(mixed.counts.offloaded > 0);
  CHECK(mixed.counts.recomputed > 0);
  CHECK(mixed.trial.device_bytes <= 2500);
  CHECK(both.tried.size() <= 16);
  for (const LayerCounts& counts : both.tried) {
    if (Alike::bytes(counts) <= 2500) CHECK(both.of.attempt(counts).time_s >= mixed.trial.time_s);
  }
  // At most so many as may be.
  Alike few(1700, 6, 0.001);
  CHECK(sg::choose_layers(few.of).counts.offloaded <= 6);
  CHECK(sg::choose_layers(few.of).trial.device_bytes <= 1700);
}

TEST_CASE("more layers are recomputed where the room is used", "[graphs][offload][layers]") {
  Alike some(6000, 0, 1);
  some.of.uses_room = true;
  some.of.attempt   = [](const LayerCounts& counts) -> sg::LayerTrial {  // 1 s for each, and 2 s saved by the first 20
    return {Alike::bytes(counts), 144.0 + counts.recomputed - 2 * std::min(counts.recomputed, 20)};
  };
  const int found = sg::choose_layers(some.of).counts.recomputed;
  CHECK(found >= 18);
  CHECK(found <= 24);
  some.of.uses_room = false;
  CHECK(sg::choose_layers(some.of).counts == LayerCounts{});
}

TEST_CASE("what fits only with offload is found", "[graphs][offload][layers]") {
  Alike tight(1300, 48, 1);
  const sg::LayerChoice choice = sg::choose_layers(tight.of);
  CHECK(choice.trial.device_bytes <= 1300);
  CHECK(choice.counts.offloaded > 40);
}

TEST_CASE("what cannot fit is refused with the bytes that are needed", "[graphs][offload][layers][refuses]") {
  Alike never(1500, 0, 1);
  CHECK_THAT(refusal([&] { return sg::choose_layers(never.of); }),
             ContainsSubstring("recompute: auto finds no choice that fits: rank 0 needs 1570 (1.5 KiB) of the device "
                               "with 0 layers offloaded and 48 recomputed of 48; offload.device_bytes is 1500"));
  const sg::Plan unknown{.recompute = sg::Recompute::automatic};
  CHECK_THAT(refusal([&] { return sg::training_step(small_gpt2(), unknown, batch); }),
             ContainsSubstring("recompute: auto needs the size of the device") &&
                 ContainsSubstring("(memory.limit_bytes or offload.device_bytes"));
  CHECK_THAT(refusal([&] { return sg::training_step(small_gpt2(), automatic({}, 100'000), batch); }),
             ContainsSubstring("with 0 layers offloaded and 4 recomputed of 4; memory.limit_bytes is 100000"));
  const std::vector<ActivationMode> three(3, ActivationMode::keep);
  CHECK_THAT(refusal([&] {
               return sg::training_step(small_gpt2(), {}, batch, {.offload = sg::OffloadAmounts{.layers = three}});
             }),
             ContainsSubstring("offload: activations of 3 layers for rank 0 (one entry for each of the 4 layers"));
}

TEST_CASE("modes by layer are in the order of the rank's layers", "[graphs][offload][layers]") {
  using enum ActivationMode;
  CHECK(sg::layer_modes({.offloaded = 1, .recomputed = 2}, {1, 2, 5, 6}, 8) ==
        std::vector{keep, offload, recompute, keep, keep, recompute, keep, keep});
  CHECK(sg::to_text({.kept = 4, .recomputed = 5, .offloaded = 3}) == "3 layers offloaded, 5 recomputed, 4 kept");
}

TEST_CASE("any mode of each layer gives the same bits, and only its own nodes", "[graphs][offload][layers]") {
  using enum ActivationMode;
  const auto modes =
      GENERATE(std::vector{offload, recompute, keep, keep}, std::vector{keep, offload, recompute, offload},
               std::vector{recompute, keep, recompute, offload}, std::vector{recompute, offload, offload, recompute});
  const bool is_llama = GENERATE(false, true);
  CAPTURE(is_llama, modes);
  const sg::Model model = is_llama ? small_llama() : small_gpt2();
  const sg::Plan plan{.layout = GENERATE(sg::LayoutSpec{}, sg::LayoutSpec{.tp = 2}, sg::LayoutSpec{.pp = 2})};
  const sg::StepGraph usual = sg::training_step(model, plan, batch);
  const sg::StepGraph step  = sg::training_step(model, plan, batch, {.offload = sg::OffloadAmounts{.layers = modes}});
  sg::verify(step);
  std::set<int> recomputed, offloaded;
  for (int layer = 0; layer < 4; ++layer) {
    const ActivationMode mode = modes[static_cast<std::size_t>(layer)];
    if (mode == recompute) recomputed.insert(layer);
    if (mode == offload) offloaded.insert(layer);
  }
  CHECK(layers_with(step, sg::recompute_phase) == recomputed);
  std::set<int> with_homes;
  for (const sg::OffloadedUnit& unit : step.offload.units) {
    CHECK(unit.of == sg::OffloadClass::activations);
    with_homes.insert(std::stoi(unit.unit.substr(std::string("layer").size())));
  }
  // Layers that the backward pass needs again too soon stay on the device, and do not count as offloaded.
  CHECK(std::includes(offloaded.begin(), offloaded.end(), with_homes.begin(), with_homes.end()));
  CHECK(with_homes.empty() == (sg::transfer_bytes(step.graph).h2d == 0));
  const auto num_recomputed = static_cast<int>(recomputed.size()), num_offloaded = static_cast<int>(with_homes.size());
  CHECK(step.activations() == sg::ActivationCounts{.kept       = 4 - num_recomputed - num_offloaded,
                                                   .recomputed = num_recomputed,
                                                   .offloaded  = num_offloaded});
  CHECK_FALSE(usual.activations().has_value());
  CHECK(losses(step) == losses(usual));
}

TEST_CASE("activations of a few layers leave the device too", "[graphs][offload][layers]") {
  constexpr int layers  = 12;
  const sg::Model deep  = sg::gpt2({.layers = layers, .width = 16, .heads = 2, .context = 32, .vocab = 16});
  const int offloaded   = GENERATE(1, 2, 3);
  const int slots       = GENERATE(1, 2, 4);
  const int recomputed  = GENERATE(0, 2);
  const int microbatch  = GENERATE(4, 2);
  const auto compress   = GENERATE(sg::Compression::none, sg::Compression::fp16);
  const bool overlapped = GENERATE(true, false);
  if (sg::testing::sanitized() && (slots != 2 || recomputed > 0)) return;
  if ((microbatch == 2 || compress != sg::Compression::none || !overlapped) && (slots != 2 || recomputed > 0)) return;
  const sg::BatchSpec four{.global = 4, .micro = microbatch, .seq = 32};
  CAPTURE(offloaded, slots, recomputed, microbatch, compress, overlapped);
  const auto of = [&](int moved) {
    std::vector modes(layers, ActivationMode::keep);
    for (int i = 0; i < moved + recomputed; ++i)
      modes[static_cast<std::size_t>(i)] = i < moved ? ActivationMode::offload : ActivationMode::recompute;
    return sg::training_step(
        deep, {.offload = {.activations = true, .slots = slots, .async = overlapped, .compress = compress}}, four,
        {.offload = sg::OffloadAmounts{.layers = modes}});
  };
  const sg::StepGraph step = of(offloaded), kept = of(0);
  sg::verify(step);
  CHECK(step.activations()->offloaded == offloaded);
  std::int64_t moved = 0;  // of one microbatch
  for (const sg::OffloadedUnit& unit : step.offload.units) moved += unit.unit.ends_with("mb0") ? unit.bytes : 0;
  const auto planned = [](const sg::StepGraph& graph) {
    return sg::plan_memory(graph.graph).arena(sg::Rank{0}).size_bytes;
  };
  // All of them are away when the last layer computes.
  if (microbatch == 4) CHECK(planned(step) <= planned(kept) - moved * 3 / 4);
  const sg::TransferBytes bytes = sg::transfer_bytes(step.graph);
  CHECK(bytes.d2h > 0);
  CHECK(bytes.h2d == bytes.d2h);
  if (compress == sg::Compression::none) CHECK(losses(step) == losses(kept));
}

TEST_CASE("recompute auto fits its budget with the bits of no recomputation", "[graphs][offload][layers]") {
  struct Setting {
    std::string name;
    sg::Plan plan;
    sg::BatchSpec of = batch;
  };
  std::vector<Setting> settings{
      {"one rank", {}},
      {"tp 2", {.layout = {.tp = 2}}},
      {"pp 2", {.layout = {.pp = 2}}},
      {"zero bubble", {.layout = {.pp = 2}, .pipeline = {.schedule = "zb-h1"}}, {.global = 8, .micro = 1, .seq = 16}},
      {"interleaved", {.layout = {.pp = 2}, .pipeline = {.schedule = "interleaved", .chunks = 2}}},
      {"zero1", {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::zero1}}},
      {"full", {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full}}},
      {"bf16", {.precision = {.param = sg::DType::bf16}}},
      {"optimizer offloaded", {.offload = {.optimizer = true}}},
  };
  if (sg::testing::sanitized()) settings.resize(3);
  for (const Setting& setting : settings) {
    CAPTURE(setting.name);
    const auto usual = sg::testing::train(small_gpt2(), setting.plan, setting.of, steps);
    const Range range(setting.plan, setting.of);
    for (const auto& [may_offload, share] : {std::pair(false, 0.5), std::pair(true, 0.8)}) {
      sg::Plan plan            = automatic(setting.plan, range.at(share));
      plan.offload.activations = may_offload;
      CAPTURE(plan.offload.activations, plan.memory_limit_bytes);
      const sg::StepGraph step = sg::training_step(small_gpt2(), plan, setting.of);
      const auto counts        = step.activations();
      REQUIRE(counts.has_value());
      INFO(to_text(*counts));
      CHECK(counts->recomputed + counts->offloaded > 0);
      if (!may_offload) CHECK(counts->offloaded == 0);
      const sg::MemoryPlan memory = sg::plan_memory(step.graph);
      for (const sg::Rank rank : step.graph.ranks()) CHECK(memory.device_bytes(rank) <= plan.memory_limit_bytes);
      CHECK(sg::testing::train(small_gpt2(), plan, setting.of, steps) == usual);
    }
  }
}

TEST_CASE("with enough memory, recompute auto is recompute none", "[graphs][offload][layers]") {
  const Range range({});
  sg::Plan plan            = automatic({}, range.kept);
  plan.offload.activations = GENERATE(false, true);
  const sg::StepGraph step = sg::training_step(small_gpt2(), plan, batch);
  CHECK(step.graph == sg::training_step(small_gpt2(), {}, batch).graph);
  CHECK(step.activations() == sg::ActivationCounts{.kept = 4});
  CHECK(sg::memory_requirements(small_gpt2(), plan, batch).front().layers == sg::ActivationCounts{.kept = 4});
}

TEST_CASE("a process with one rank chooses the layers that a process with all ranks does",
          "[graphs][offload][layers]") {
  const sg::Plan plain{.layout = {.dp = 2, .tp = 2, .pp = 2}};
  const Range range(plain);
  sg::Plan plan             = automatic(plain, range.at(0.5));
  plan.offload.activations  = true;
  const sg::StepGraph whole = sg::training_step(small_gpt2(), plan, batch);
  for (const sg::Rank rank : whole.graph.ranks()) {
    const sg::StepGraph own = sg::training_step(small_gpt2(), plan, batch, {.only = rank});
    CHECK(own.offload.amounts_of.at(rank) == whole.offload.amounts_of.at(rank));
  }
}

TEST_CASE("strategies move units first, and residents come after the layers", "[graphs][offload][layers]") {
  const Range range({});
  const auto usual = sg::testing::train(small_gpt2(), {}, batch, steps);
  SECTION("a strategy that may not move enough leaves the rest to layers") {
    sg::Plan plan             = automatic({}, 0);
    plan.offload.strategy     = sg::OffloadStrategy::conservative;
    plan.offload.device_bytes = range.at(0.3);
    const sg::StepGraph step  = sg::training_step(small_gpt2(), plan, batch);
    CHECK(step.activations()->recomputed + step.activations()->offloaded > 0);
    CHECK(std::any_of(step.offload.units.begin(), step.offload.units.end(),
                      [](const auto& unit) { return unit.of == sg::OffloadClass::optimizer; }));
    CHECK(sg::plan_memory(step.graph).device_bytes(sg::Rank{0}) <= plan.offload.device_bytes);
    CHECK(sg::testing::train(small_gpt2(), plan, batch, steps) == usual);
  }
  SECTION("units of the optimizer stay where layers leave room") {
    sg::Plan plan             = automatic({}, 0);
    plan.offload.optimizer    = true;
    plan.offload.device_bytes = range.at(0.6);
    const sg::StepGraph step  = sg::training_step(small_gpt2(), plan, batch);
    CHECK(step.offload.amounts_of.at(sg::Rank{0}).layers.size() == 4);
    CHECK(step.offload.amounts_of.at(sg::Rank{0}).resident_bytes > 0);
    CHECK(sg::plan_memory(step.graph).device_bytes(sg::Rank{0}) <= plan.offload.device_bytes);
    CHECK(sg::testing::train(small_gpt2(), plan, batch, steps) == usual);
  }
}
