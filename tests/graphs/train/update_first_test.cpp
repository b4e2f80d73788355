// Steps that begin with the update of the step before them: the same bits as steps that end with their update.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <filesystem>
#include <limits>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/step/memory_requirement.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/checkpointed.hpp"
#include "tests/support/training/short_training.hpp"
#include "tests/support/worlds/thread_processes.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::ReduceWhen;
using sg::Shard;
using sg::testing::small_gpt2;
using sg::testing::small_llama;
using sg::testing::tokens_for;
using sg::testing::training_state;

namespace {

struct Seen {
  std::vector<double> loss, norm, rate, scale;
  std::vector<bool> skipped;
  std::vector<std::int64_t> updates;
  std::uint64_t weights                            = 0;
  std::vector<std::byte> states                    = {};
  friend bool operator==(const Seen&, const Seen&) = default;
};

struct How {
  int steps      = sg::testing::sanitized() ? 3 : 4;
  int flush_each = 0;  // flush after every so many steps; 0: never
};

Seen run_of(const sg::Model& model, const sg::Plan& plan, const sg::BatchSpec& batch, bool update_first, How how = {}) {
  sg::LoopbackWorld world(sg::Layout(plan.layout).num_ranks());
  sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .seed = 7, .update_first = update_first});
  Seen seen;
  for (int step = 0; step < how.steps; ++step) {
    const sg::StepResult result = trainer.step(tokens_for(batch, step, model.vocab));
    seen.loss.push_back(result.loss);
    seen.norm.push_back(std::isnan(result.grad_norm) ? -1 : result.grad_norm);  // a NaN equals nothing
    seen.rate.push_back(result.rate);
    seen.scale.push_back(result.loss_scale.value_or(0));
    seen.skipped.push_back(result.skipped);
    seen.updates.push_back(trainer.num_updates());
    if (how.flush_each > 0 && (step + 1) % how.flush_each == 0) trainer.flush();
  }
  seen.weights = sg::testing::hash_weights(trainer.run());
  seen.states  = training_state(trainer.run());
  return seen;
}

void check_same(const sg::Model& model, const sg::Plan& plan, const sg::BatchSpec& batch, How how = {}) {
  const Seen last = run_of(model, plan, batch, false, how), first = run_of(model, plan, batch, true, how);
  CHECK(first.loss == last.loss);
  CHECK(first.norm == last.norm);
  CHECK(first == last);
  CHECK(last.loss.front() != last.loss.back());
}

sg::BatchSpec batch_of(const sg::Plan& plan, int microbatches) {
  return {.global = plan.layout.dp * microbatches, .micro = 1, .seq = 8};
}

}  // namespace

TEST_CASE("a step that begins with the update before it has the same bits, in every layout", "[graphs][update_first]") {
  const auto model            = GENERATE(small_gpt2, small_llama)(0.1);
  const sg::LayoutSpec layout = GENERATE(sg::LayoutSpec{}, sg::LayoutSpec{.dp = 2}, sg::LayoutSpec{.tp = 2},
                                         sg::LayoutSpec{.pp = 2}, sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2});
  const auto kind             = GENERATE(sg::OptimizerKind::adamw, sg::OptimizerKind::sgd);
  CAPTURE(model.kind, to_string(layout), to_string(kind));
  if (sg::testing::scale() > 1 && (kind == sg::OptimizerKind::sgd) != (layout.pp > 1)) return;
  static int seen = 0;
  if (sg::testing::left_out(seen, 2)) return;
  const sg::Plan plan{.layout    = layout,
                      .optimizer = {.kind     = kind,
                                    .clip     = layout.dp > 1 ? 1.0 : 0.0,
                                    .schedule = {.kind = sg::RateKind::cosine, .warmup = 2, .steps = 6},
                                    .groups   = {{.match = "*.1.*.weight", .lr = 3e-3, .weight_decay = 0.0}}}};
  check_same(model, plan, batch_of(plan, 2));
}

TEST_CASE("a step that begins with the update before it has the same bits, however weights are sharded",
          "[graphs][update_first][shard]") {
  const Shard strategy = GENERATE(Shard::zero1, Shard::grad_op, Shard::full, Shard::hybrid);
  const auto reduce    = GENERATE(ReduceWhen::last, ReduceWhen::each);
  const bool flat      = GENERATE(true, false);
  if (sg::testing::sanitized() && !flat) return;
  const auto layout =
      GENERATE(sg::LayoutSpec{.dp = 4}, sg::LayoutSpec{.dp = 2, .tp = 2}, sg::LayoutSpec{.dp = 2, .pp = 2});
  CAPTURE(to_string(strategy), to_string(reduce), flat, to_string(layout));
  if (strategy == Shard::zero1 && reduce == ReduceWhen::each) return;
  if (sg::testing::scale() > 1 && flat == (layout.dp == 4)) return;
  static int seen = 0;
  if (sg::testing::left_out(seen, 5)) return;
  const sg::Plan plan{.layout = layout,
                      .shard  = {.strategy   = strategy,
                                 .reduce     = reduce,
                                 .min_params = 50,
                                 .flat       = flat,
                                 .group      = strategy == Shard::hybrid ? 2 : 0}};
  check_same(flat ? small_gpt2() : small_llama(), plan, batch_of(plan, 2));
}

TEST_CASE("a step that begins with the update before it has the same bits with pipelines, chunks and kept weights",
          "[graphs][update_first][shard]") {
  const std::string schedule = GENERATE("1f1b", "interleaved", "zb-h1");
  const bool keeps           = GENERATE(false, true);
  const auto recompute       = GENERATE(sg::Recompute::none, sg::Recompute::full);
  static int seen            = 0;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(schedule, keeps, to_string(recompute));
  const sg::Plan plan{.layout    = {.dp = 2, .pp = 2},
                      .pipeline  = {.schedule = schedule, .chunks = schedule == "interleaved" ? 2 : 1},
                      .shard     = {.strategy = Shard::full, .min_params = 50, .keep_between_microbatches = keeps},
                      .recompute = recompute};
  check_same(small_gpt2(), plan, batch_of(plan, 4), {.steps = 3});
}

TEST_CASE("a step that begins with the update before it has the same bits in bf16, with gradients of any type",
          "[graphs][update_first][precision]") {
  const Shard strategy = GENERATE(Shard::none, Shard::zero1, Shard::full);
  const auto travel    = GENERATE(sg::DType::f32, sg::DType::bf16);
  const bool keep      = GENERATE(false, true);
  const bool views     = GENERATE(true, false);
  CAPTURE(to_string(strategy), travel, keep, views);
  if ((keep && travel == sg::DType::f32) || (!views && strategy != Shard::none)) return;
  static int seen = 0;
  if (sg::testing::left_out(seen, 5)) return;
  const sg::Plan plan{.layout    = {.dp = 2, .tp = 2},
                      .shard     = {.strategy = strategy, .min_params = 50, .bucket_views = views},
                      .precision = {.param = sg::DType::bf16, .reduce = travel, .keep_low_precision_grads = keep}};
  check_same(small_llama(), plan, batch_of(plan, 2));
}

TEST_CASE("steps in f16 that are skipped are skipped one step later, too", "[graphs][update_first][loss_scale]") {
  const auto kind             = GENERATE(sg::OptimizerKind::adamw, sg::OptimizerKind::sgd);
  const sg::LayoutSpec layout = GENERATE(sg::LayoutSpec{}, sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2});
  static int seen             = 1;
  if (sg::testing::left_out(seen, 4)) return;  // sanitized: the last; AdamW in f16 is in the test of checkpoints
  CAPTURE(to_string(kind), to_string(layout));
  const sg::Plan plan{
      .layout    = layout,
      .precision = {.param      = sg::DType::f16,
                    .loss_scale = {.scaling = sg::Scaling::dynamic, .value = 0x1p24, .growth_steps = 2}},
      .optimizer = {.kind = kind, .lr = 3e-3}};
  const sg::BatchSpec batch{.global = 8, .micro = 2, .seq = 16};
  const Seen last = run_of(small_gpt2(), plan, batch, false, {.steps = 12});
  CHECK(std::ranges::count(last.skipped, true) > 1);
  CHECK(std::ranges::count(last.skipped, false) > 3);
  CHECK(run_of(small_gpt2(), plan, batch, true, {.steps = 12}) == last);
}

TEST_CASE("a flush may come after any step, and the step that follows has the same bits", "[graphs][update_first]") {
  const int each       = GENERATE(1, 2, 3);
  const Shard strategy = GENERATE(Shard::none, Shard::zero1, Shard::full);
  static int seen      = 0;
  if (sg::testing::left_out(seen, 8)) return;  // sanitized: the first and the last
  CAPTURE(each, to_string(strategy));
  const sg::Plan plan{.layout = {.dp = 2}, .shard = {.strategy = strategy, .min_params = 50}};
  check_same(small_gpt2(), plan, batch_of(plan, 2), {.steps = sg::testing::sanitized() ? 4 : 5, .flush_each = each});
}

TEST_CASE("updates that come first work with expanded collectives", "[graphs][update_first]") {
  const auto algorithm = GENERATE(sg::Algorithm::ring, sg::Algorithm::tree);
  const Shard strategy = GENERATE(Shard::zero1, Shard::full);
  static int seen      = 0;
  if (sg::testing::left_out(seen, 3)) return;
  CAPTURE(to_string(algorithm), to_string(strategy));
  const sg::Plan plan{.layout = {.dp = 4}, .shard = {.strategy = strategy, .min_params = 50}, .algorithm = algorithm};
  check_same(small_gpt2(), plan, batch_of(plan, 1), {.steps = 3});
}

TEST_CASE("a step whose norm is not finite updates nothing, also one step later", "[graphs][update_first]") {
  const auto model = small_gpt2();
  const sg::Plan plan{.layout = {.dp = 2}};
  const auto batch = batch_of(plan, 1);
  Seen seen[2];
  for (const bool first : {false, true}) {
    sg::LoopbackWorld world(2);
    sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .seed = 7, .update_first = first});
    for (int step = 0; step < 3; ++step) {
      if (step == 1) trainer.set_rate(std::numeric_limits<double>::infinity());  // spoils all weights
      const sg::StepResult result = trainer.step(tokens_for(batch, step, model.vocab));
      seen[first].loss.push_back(std::isfinite(result.loss) ? result.loss : -1);
      seen[first].updates.push_back(trainer.num_updates());
    }
    seen[first].states = training_state(trainer.run());
  }
  CHECK(seen[0] == seen[1]);
  CHECK(seen[0].updates == std::vector<std::int64_t>{1, 2, 2});
}

TEST_CASE("evaluation, reading and gradients see the weights of all steps that were done", "[graphs][update_first]") {
  const auto model = small_gpt2();
  const sg::Plan plan{.layout = {.dp = 2}, .shard = {.strategy = Shard::full, .min_params = 50}};
  const auto batch = batch_of(plan, 2);
  std::vector<double> losses[2];
  std::vector<float> values[2], gradients[2];
  for (const bool first : {false, true}) {
    sg::LoopbackWorld world(2);
    sg::Trainer trainer(model, plan, batch, world,
                        {.threads = 2, .keep_gradients = true, .seed = 7, .update_first = first});
    sg::Evaluator evaluator(trainer, batch);
    const auto parameter = model.parameters().parameters().front();
    const auto read      = [&](sg::StepRun::Which which, std::vector<float>& into) {
      std::vector<float> found(static_cast<std::size_t>(parameter.num_elements()));
      trainer.run().read_tensor(which, parameter.name, std::span(found));
      into.insert(into.end(), found.begin(), found.end());
    };
    losses[first].push_back(evaluator.loss(tokens_for(batch, 9, model.vocab)));
    for (int step = 0; step < 4; ++step) {
      losses[first].push_back(trainer.step(tokens_for(batch, step, model.vocab)).loss);
      if (step == 1) losses[first].push_back(evaluator.loss(tokens_for(batch, 9, model.vocab)));
      read(sg::StepRun::Which::gradient, gradients[first]);
      if (step == 2) read(sg::StepRun::Which::value, values[first]);
      if (step == 2) read(sg::StepRun::Which::gradient, gradients[first]);
    }
    losses[first].push_back(evaluator.loss(tokens_for(batch, 9, model.vocab)));
  }
  CHECK(losses[0] == losses[1]);
  CHECK(values[0] == values[1]);
  CHECK(gradients[0] == gradients[1]);
}

TEST_CASE("checkpoints of both kinds of step are the same, and each resumes into the other",
          "[graphs][update_first][checkpoint]") {
  const auto model = small_gpt2();
  const sg::Plan plan{
      .layout    = {.dp = 2},
      .shard     = {.strategy = Shard::zero1, .min_params = 50},
      .precision = {.param      = sg::DType::f16,
                    .loss_scale = {.scaling = sg::Scaling::dynamic, .value = 0x1p20, .growth_steps = 2}}};
  const sg::BatchSpec batch{.global = 8, .micro = 2, .seq = 16};
  struct Kind {
    sg::LoopbackWorld world{2};
    sg::Trainer trainer;
    Kind(const sg::Model& of, const sg::Plan& by, const sg::BatchSpec& spec, bool first)
        : trainer(of, by, spec, world, {.threads = 2, .seed = 7, .update_first = first}) {}
  };
  const auto train = [&](Kind& kind, int end) {
    std::vector<double> losses;
    while (kind.trainer.num_steps() < end)
      losses.push_back(
          kind.trainer.step(tokens_for(batch, static_cast<int>(kind.trainer.num_steps()), model.vocab)).loss);
    return losses;
  };
  const sg::testing::TempFolder folder(sg::testing::fast_folder());
  Kind straight(model, plan, batch, false);
  train(straight, 3);
  std::string paths[2];
  for (const bool first : {false, true}) {
    Kind kind(model, plan, batch, first);
    train(kind, 3);
    paths[first] = sg::testing::save_checkpoint(kind.trainer, folder / (first ? "first" : "last"), first);
    train(kind, 5);  // saving has not changed what follows
    if (!first) train(straight, 5);
    CHECK(training_state(kind.trainer.run()) == training_state(straight.trainer.run()));
  }
  const auto files = [](const std::string& path) {
    std::vector<std::pair<std::string, std::string>> found;
    for (const auto& entry : std::filesystem::directory_iterator(path))
      found.emplace_back(entry.path().filename().string(), sg::testing::file_bytes(entry.path()));
    std::ranges::sort(found);
    return found;
  };
  CHECK(files(paths[0]) == files(paths[1]));
  const std::vector<std::byte> expected = [&] {
    train(straight, 6);
    return training_state(straight.trainer.run());
  }();
  for (const bool from : {false, true}) {
    for (const bool into : {false, true}) {
      if (sg::testing::sanitized() && from == into) continue;
      CAPTURE(from, into);
      Kind kind(model, plan, batch, into);
      train(kind, 1);  // leaves an update that loading must not apply
      sg::load_checkpoint(kind.trainer, paths[from]);
      CHECK(kind.trainer.num_steps() == 3);
      train(kind, 6);
      CHECK(training_state(kind.trainer.run()) == expected);
    }
  }
}

TEST_CASE("the updates that are left are a graph of their own, which is proved and lies in the memory of the step",
          "[graphs][update_first]") {
  const auto model = small_gpt2();
  const sg::Plan plan{.layout = {.dp = 2, .pp = 2}, .shard = {.strategy = Shard::zero1, .min_params = 50}};
  const auto batch          = batch_of(plan, 2);
  const sg::StepGraph step  = sg::training_step(model, plan, batch, {.update_first = true});
  const sg::StepGraph after = sg::training_step(model, plan, batch);
  sg::verify(step);
  const sg::StepGraph left = sg::updates_of(step);
  sg::verify(left);
  const auto count = [](const sg::Graph& graph, bool updates) {
    int found = 0;
    for (std::uint32_t i = 0; i < graph.num_nodes(); ++i)
      found += (graph.labels(sg::Node{i}).phase == sg::update_phase) == updates;
    return found;
  };
  CHECK(count(left.graph, false) == 0);
  CHECK(count(left.graph, true) == count(after.graph, true));
  CHECK(count(step.graph, true) == count(after.graph, true));
  CHECK(step.graph.num_nodes() == after.graph.num_nodes());
  // Each weight is updated before a node reads it.
  for (const sg::StepRank& rank : step.ranks) {
    for (const sg::StepWeight& weight : rank.weights) {
      if (weight.tied || weight.first.empty()) continue;
      bool updated = false;
      for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
        for (std::size_t k = 0; k < step.graph.num_accesses(sg::Node{i}); ++k) {
          const auto access = step.graph.access(sg::Node{i}, k);
          if (access.buffer != weight.value.buffer) continue;
          if (step.graph.labels(sg::Node{i}).phase == sg::update_phase) updated = true;
          CHECK(updated);
        }
      }
    }
  }
  CHECK_THROWS_MATCHES(sg::updates_of(after), sg::Error,
                       MessageMatches(ContainsSubstring("its update is at its end, so nothing is left")));
  const sg::MemoryPlan whole = sg::plan_memory(step.graph), part = sg::plan_memory(left.graph);
  const sg::Memory memory(step.graph, whole), beside(left.graph, part, memory);
  for (std::uint32_t i = 0; i < step.graph.num_buffers(); ++i) {
    const sg::BufferSpec& buffer = step.graph.spec(sg::Buffer{i});
    if (buffer.token || part.offsets[i] == sg::MemoryPlan::nowhere) continue;
    if (buffer.lifetime == sg::Lifetime::persistent) CHECK(beside.data(sg::Buffer{i}) == memory.data(sg::Buffer{i}));
    const auto arena = memory.arena(buffer.rank);
    CHECK(beside.data(sg::Buffer{i}) >= arena.data());
    CHECK(beside.data(sg::Buffer{i}) + buffer.size_bytes <= arena.data() + arena.size());
  }
}

TEST_CASE("updates come first over processes, too", "[graphs][update_first][processes][threads]") {
  const Shard strategy = GENERATE(Shard::none, Shard::zero1, Shard::full);
  const auto layout    = GENERATE(sg::LayoutSpec{.dp = 2, .pp = 2}, sg::LayoutSpec{.dp = 2, .tp = 2});
  static int seen      = 2;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(to_string(strategy), to_string(layout));
  const sg::Plan plan{.layout = layout, .shard = {.strategy = strategy, .min_params = 50}};
  const auto model  = small_llama();
  const auto batch  = batch_of(plan, 2);
  const auto tokens = [&](int step) { return tokens_for(batch, step, model.vocab); };
  const Seen last   = run_of(model, plan, batch, false, {.steps = 3});
  std::vector<Seen> found(2);
  std::vector<double> validation(2);
  sg::testing::in_processes(sg::testing::neighbours(4, 2), sg::testing::Exchanges::messages, [&](sg::World& world) {
    sg::Trainer trainer(model, plan, batch, world, {.threads = 1, .seed = 7, .update_first = true});
    sg::Evaluator evaluator(trainer, batch);
    const auto process = static_cast<std::size_t>(world.peers()->process());
    for (int step = 0; step < 3; ++step) {
      const sg::StepResult result = trainer.step(tokens(step));
      found[process].loss.push_back(result.loss);
      found[process].norm.push_back(result.grad_norm);
      if (step == 1) validation[process] = evaluator.loss(tokens(5));
    }
    trainer.flush();
  });
  for (const Seen& each : found) {
    CHECK(each.loss == last.loss);
    CHECK(each.norm == last.norm);
  }
  sg::LoopbackWorld world(4);
  sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .seed = 7});
  sg::Evaluator evaluator(trainer, batch);
  for (int step = 0; step < 2; ++step) trainer.step(tokens(step));
  CHECK(validation == std::vector<double>(2, evaluator.loss(tokens(5))));
}

TEST_CASE("memory requirements count gradients that last until the next step", "[graphs][update_first]") {
  const auto model = small_gpt2();
  const sg::Plan plan{.layout = {.dp = 2}};
  const auto batch = batch_of(plan, 1);
  const auto last  = sg::largest(sg::memory_requirements(model, plan, batch)),
             first = sg::largest(sg::memory_requirements(model, plan, batch, {.update_first = true}));
  CHECK(first.peak_bytes > last.peak_bytes);
  const sg::StepGraph step = sg::training_step(model, plan, batch, {.update_first = true});
  CHECK(sg::memory_requirement(step, sg::Rank{0}).peak_bytes == first.peak_bytes);
}
