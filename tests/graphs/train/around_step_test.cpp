// What surrounds a step: rate schedules, optimizer groups, ignored targets, validation on the trainer's weights.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <map>
#include <mutex>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/models/mlp.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"
#include "tests/support/worlds/thread_processes.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::small_llama;
using Tensors = std::map<std::string, std::vector<double>>;
using Tokens  = std::vector<std::int32_t>;

namespace {

Tensors tensors_of(const sg::StepRun& run, sg::StepRun::Which which) {
  Tensors tensors;
  const sg::ParameterInventory inventory = run.step().model.parameters();
  for (const sg::Parameter& parameter : inventory.parameters()) {
    std::vector<double>& values = tensors[parameter.name];
    values.resize(static_cast<std::size_t>(parameter.num_elements()));
    run.read_tensor(which, parameter.name, std::span<double>(values));
  }
  return tensors;
}

const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};

// Inputs and targets of a step; every `nth` target is ignored.
sg::Batch some_batch(int step, std::int64_t vocab, int nth = 0) {
  const Tokens tokens = sg::testing::tokens_for(batch, step, vocab);
  sg::Batch made{.inputs = {tokens.begin(), tokens.end() - 1}, .targets = {tokens.begin() + 1, tokens.end()}};
  for (std::size_t i = 0; nth > 0 && i < made.targets.size(); i += static_cast<std::size_t>(nth)) made.targets[i] = -1;
  made.num_counted = std::ssize(made.targets) - std::count(made.targets.begin(), made.targets.end(), -1);
  return made;
}

struct Layout {
  const char* name;
  sg::Plan plan;
};
const std::vector<Layout>& layouts() {
  using enum sg::Shard;
  static const std::vector<Layout> all{
      {"1x1x1", {}},
      {"1x2x1", {.layout = {.tp = 2}}},
      {"2x1x2 zero1", {.layout = {.dp = 2, .pp = 2}, .shard = {.strategy = zero1, .min_params = 100}}},
      {"2x2x2 full", {.layout = {.dp = 2, .tp = 2, .pp = 2}, .shard = {.strategy = full, .min_params = 100}}},
      {"4x1x1 rows", {.layout = {.dp = 4}, .shard = {.strategy = grad_op, .min_params = 100, .flat = false}}},
      {"4x1x1 hybrid", {.layout = {.dp = 4}, .shard = {.strategy = hybrid, .min_params = 100, .group = 2}}},
  };
  return all;
}

}  // namespace

TEST_CASE("the rate of a step follows the schedule, and a warm-up begins at 0", "[graphs][trainer]") {
  const auto model = sg::mlp({.layers = 1, .width = 8, .context = 8, .vocab = 16});
  sg::Plan plan{.optimizer = {.lr = 0.5, .schedule = {.kind = sg::RateKind::cosine, .warmup = 2, .min = 0.1}}};
  sg::LoopbackWorld world(1);
  sg::Trainer trainer(model, plan, batch, world, {.threads = 1});
  CHECK_THROWS_MATCHES(trainer.step(some_batch(0, 16)), sg::Error,
                       MessageMatches(ContainsSubstring("optimizer.schedule.steps: missing with kind cosine")));
  CHECK_THROWS_AS(trainer.set_total_steps(1), sg::Error);
  trainer.set_total_steps(6);
  trainer.start_weights();
  const Tensors fresh       = tensors_of(trainer.run(), sg::StepRun::Which::value);
  sg::RateSchedule schedule = plan.optimizer.schedule;
  schedule.steps            = 6;
  for (int step = 0; step < 8; ++step) {
    const double expected = 0.5 * sg::rate_factor(schedule, step);
    CHECK(trainer.rate() == expected);
    CHECK(trainer.step(some_batch(step, 16)).rate == expected);
    CHECK((tensors_of(trainer.run(), sg::StepRun::Which::value) == fresh) == (step == 0));
  }
  trainer.set_num_steps(1);  // a run that goes on is at its place in the schedule
  CHECK(trainer.rate() == 0.25);
  trainer.set_rate(3);
  CHECK(trainer.step(some_batch(0, 16)).rate == 3);
}

TEST_CASE("AdamW counts updates, which a resumed run sets, and a step without one does not count",
          "[graphs][trainer]") {
  const auto model = sg::mlp({.layers = 1, .width = 8, .context = 8, .vocab = 16});
  const auto type  = GENERATE(sg::DType::f32, sg::DType::f16);
  CAPTURE(type);
  sg::LoopbackWorld world(2);
  const sg::Plan plan{.layout = {.dp = 2}, .precision = {.param = type}};
  sg::Trainer trainer(model, plan, batch, world, {.threads = 1}), other(model, plan, batch, world, {.threads = 1});
  for (int step = 0; step < 3; ++step) static_cast<void>(trainer.step(some_batch(step, 16)));
  CHECK(trainer.num_steps() == 3);
  CHECK(trainer.num_updates() == 3);
  trainer.set_num_updates(1000);
  static_cast<void>(trainer.step(some_batch(3, 16)));
  CHECK(trainer.num_updates() == 1001);
  if (type == sg::DType::f16) return;
  other.run().set_weights([](const std::string&, const sg::TensorShape&, const sg::Init&, std::span<double> out) {
    std::ranges::fill(out, 1e30);
  });
  CHECK_FALSE(std::isfinite(other.step(some_batch(0, 16)).grad_norm));
  CHECK(other.num_steps() == 1);
  CHECK(other.num_updates() == 0);
}

TEST_CASE("each tensor is updated with the rate and the decay of its group, in every layout",
          "[graphs][trainer][groups]") {
  const Layout layout = GENERATE(from_range(layouts()));
  const auto kind     = GENERATE(sg::OptimizerKind::sgd, sg::OptimizerKind::adamw);
  static int seen     = 0;
  if (sg::testing::left_out(seen, 3)) return;
  CAPTURE(layout.name, sg::to_string(kind));
  const auto model = small_llama();
  sg::Plan plan    = layout.plan;
  plan.precision   = {.param = sg::DType::f64};
  // q, k and v are one weight, and so are gate and up: such a weight is updated in several ranges.
  plan.optimizer = {.kind         = kind,
                    .lr           = 0.01,
                    .weight_decay = 0.2,
                    .clip         = 0,
                    .groups       = {{.match = "*.1.self_attn.q_proj.weight", .lr = 0.5},
                                     {.match = "*.k_proj.weight", .lr = 0.25, .weight_decay = 0.0},
                                     {.match = "*norm*", .weight_decay = 0.5},
                                     {.match = "*.up_proj.*", .lr = 0.0}}};
  sg::LoopbackWorld world(plan.layout);
  sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .keep_gradients = true, .seed = 5});
  trainer.start_weights();
  const Tensors before = tensors_of(trainer.run(), sg::StepRun::Which::value);
  static_cast<void>(trainer.step(some_batch(0, model.vocab)));
  const Tensors after                    = tensors_of(trainer.run(), sg::StepRun::Which::value),
                gradients                = tensors_of(trainer.run(), sg::StepRun::Which::gradient);
  const sg::ParameterInventory inventory = model.parameters();
  std::map<int, int> num_in_group;
  for (const sg::Parameter& parameter : inventory.parameters()) {
    const std::string& name = parameter.name;
    CAPTURE(name);
    const int group = sg::group_of(plan.optimizer.groups, name);
    ++num_in_group[group];
    const double rate  = std::vector{0.01, 0.5, 0.25, 0.01, 0.0}[static_cast<std::size_t>(group)];
    const double usual = parameter.shape.size() >= 2 ? 0.2 : 0;
    const double decay = std::vector{usual, usual, 0.0, 0.5, usual}[static_cast<std::size_t>(group)];
    double worst       = 0;
    for (std::size_t i = 0; i < after.at(name).size(); ++i) {
      const double w = before.at(name)[i], g = gradients.at(name)[i];
      // The first step: moments are the gradient and its square, unbiased.
      const double expected = kind == sg::OptimizerKind::sgd
                                  ? w - rate * (g + decay * w)
                                  : w * (1 - rate * decay) - rate * g / (std::abs(g) + plan.optimizer.eps);
      worst                 = std::max(worst, std::abs(after.at(name)[i] - expected));
    }
    CHECK(worst < 1e-12);
    if (group == 4) CHECK(after.at(name) == before.at(name));
  }
  CHECK(num_in_group[1] == 1);
  CHECK(num_in_group.size() == 5);
}

TEST_CASE("training with groups and a schedule has the same bits in every pipeline and sharding",
          "[graphs][trainer][groups]") {
  const auto model   = small_llama();
  const auto history = [&](sg::Plan plan) {
    plan.precision = {.param = sg::DType::bf16};
    plan.optimizer = {.schedule = {.kind = sg::RateKind::linear, .warmup = 1, .steps = 4},
                      .groups   = {{.match = "*.v_proj.*", .lr = 0.02},
                                   {.match = "*norm*", .weight_decay = 0.5},
                                   {.match = "*embed*", .lr = 0.03}}};  // tied: with pp 2 the head has a copy
    return sg::testing::train(model, plan, batch, 3);
  };
  const auto expected = history({.layout = {.dp = 2}});
  CHECK(history({.layout = {.dp = 2, .pp = 2}}) == expected);
  CHECK(history({.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full, .min_params = 100}}) == expected);
  CHECK(history({.layout = {.dp = 2, .pp = 2}, .shard = {.strategy = sg::Shard::zero1, .min_params = 100}}) ==
        expected);
}

TEST_CASE("groups that apply to no tensor are refused, with similar names", "[graphs][trainer][groups][refuses]") {
  const auto refuses = [](std::vector<sg::OptimizerGroup> groups, const char* what) {
    CHECK_THROWS_MATCHES(sg::training_step(small_llama(), {.optimizer = {.groups = std::move(groups)}}, batch),
                         sg::Error, MessageMatches(ContainsSubstring(what)));
  };
  refuses({{.match = "model.norm.weigth", .lr = 1.0}},
          "optimizer.groups[0].match: 'model.norm.weigth' matches no tensor (similar: model.norm.weight");
  refuses({{.match = "*bias*", .lr = 1.0}}, "optimizer.groups[0].match: '*bias*' matches no tensor (the first are: ");
  refuses({{.match = "*", .lr = 1.0}, {.match = "*norm*", .lr = 2.0}},
          "optimizer.groups[1].match: '*norm*' applies to no tensor: groups before it match all of them");
  refuses({{.match = "*"}}, "optimizer.groups[0].match: '*' has neither lr nor weight_decay");
  refuses({{.match = "*", .lr = -1.0}}, "optimizer.groups[0].lr: -1 (0 or more)");
}

TEST_CASE("ignored targets leave the mean of the others, and their gradients, in every layout",
          "[graphs][trainer][ignored]") {
  const Layout layout = GENERATE(from_range(layouts()));
  static int seen     = 1;
  if (sg::testing::left_out(seen, 2)) return;
  CAPTURE(layout.name);
  const auto model = small_llama();
  sg::Plan plan    = layout.plan;
  plan.precision   = {.param = sg::DType::f64};
  plan.optimizer   = {.kind = sg::OptimizerKind::sgd, .lr = 0};
  sg::LoopbackWorld world(plan.layout);
  sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .keep_gradients = true, .seed = 5});
  const sg::Batch all = some_batch(0, model.vocab), some = some_batch(0, model.vocab, 3);
  sg::Batch others = all;
  for (std::size_t i = 0; i < others.targets.size(); ++i) {
    if (some.targets[i] != -1) others.targets[i] = -1;
  }
  const auto run = [&](const sg::Batch& of) {
    const double loss = trainer.step(of).loss;
    return std::pair(loss, tensors_of(trainer.run(), sg::StepRun::Which::gradient));
  };
  const auto [loss, gradient]     = run(all);
  const auto [loss_a, gradient_a] = run(some);
  CHECK(trainer.run().num_counted() == 21);
  const auto [loss_b, gradient_b] = run(others);
  CHECK(std::abs(loss - (21 * loss_a + 11 * loss_b) / 32) < 1e-12);
  for (const auto& [name, values] : gradient) {
    CAPTURE(name);
    double worst = 0;
    for (std::size_t i = 0; i < values.size(); ++i)
      worst = std::max(worst, std::abs(values[i] - (21 * gradient_a.at(name)[i] + 11 * gradient_b.at(name)[i]) / 32));
    CHECK(worst < 1e-12);
  }
  sg::Batch none = all;
  std::fill(none.targets.begin(), none.targets.end(), -1);
  const sg::StepResult nothing = trainer.step(none);
  CHECK(nothing.loss == 0);
  CHECK(nothing.grad_norm == 0);
  CHECK(run(all).first == loss);  // the number of targets is not captured
}

TEST_CASE("inputs and targets that do not fit the batch are refused", "[graphs][trainer][refuses]") {
  sg::LoopbackWorld world(1);
  sg::Trainer trainer(sg::mlp({.layers = 1, .width = 8, .context = 8, .vocab = 16}), {}, batch, world);
  CHECK_THROWS_MATCHES(
      trainer.step(Tokens(32, 1), Tokens(31, 1)), sg::Error,
      MessageMatches(ContainsSubstring("step: 32 inputs and 31 targets given (32 of both: 4 sequences of 8)")));
}

TEST_CASE("an evaluator on the trainer's weights has the bits of one that loads them, and changes no step",
          "[graphs][trainer][evaluator]") {
  const Layout layout = GENERATE(from_range(layouts()));
  const auto type     = GENERATE(sg::DType::f32, sg::DType::bf16);
  static int seen     = 0;
  if (sg::testing::left_out(seen, 3)) return;
  CAPTURE(layout.name, type);
  const auto model = small_llama();
  sg::Plan plan    = layout.plan;
  plan.precision   = {.param = type};
  const sg::BatchSpec other{.global = 8, .micro = 2, .seq = 4};  // the batch can be another
  Tokens tokens = sg::testing::tokens_for(other, 9, model.vocab);
  sg::LoopbackWorld world(plan.layout), world_b(plan.layout);
  sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .seed = 5}),
      alone(model, plan, batch, world_b, {.threads = 2, .seed = 5});
  sg::Evaluator beside(trainer, other), separate(model, plan, other, world_b, {.threads = 2});
  double last     = 0;
  const int steps = sg::testing::sanitized() ? 2 : 3;
  for (int step = 0; step < steps; ++step) {
    const Tensors values = [&] {
      trainer.start_weights();
      return tensors_of(trainer.run(), sg::StepRun::Which::value);
    }();
    separate.run().set_weights([&](const std::string& name, const sg::TensorShape&, const sg::Init&,
                                   std::span<double> out) { std::ranges::copy(values.at(name), out.begin()); });
    const double loss = beside.loss(tokens);
    CHECK(loss == separate.loss(tokens));
    CHECK(loss != last);
    last                         = loss;
    const sg::Batch next         = some_batch(step, model.vocab);
    const sg::StepResult stepped = trainer.step(next), expected = alone.step(next);
    CHECK(stepped.loss == expected.loss);
    CHECK(stepped.grad_norm == expected.grad_norm);
  }
  CHECK(sg::testing::hash_weights(trainer.run()) == sg::testing::hash_weights(alone.run()));
  // Its memory has no weights of its own.
  for (const sg::StepRank& rank : beside.run().step().ranks) {
    for (const sg::StepWeight& weight : rank.weights) {
      if (weight.value.empty()) continue;
      const auto& owner =
          trainer.run().step().ranks[static_cast<std::size_t>(&rank - &*beside.run().step().ranks.begin())];
      CHECK(beside.run().memory().bytes(weight.value.buffer).data() ==
            trainer.run()
                .memory()
                .bytes(owner.weights[static_cast<std::size_t>(&weight - rank.weights.data())].value.buffer)
                .data());
    }
  }
}

TEST_CASE("the mean of several batches is over all targets that count", "[graphs][trainer][evaluator]") {
  const auto model = small_llama();
  sg::LoopbackWorld world(2);
  sg::Trainer trainer(model, {.layout = {.dp = 2}, .precision = {.param = sg::DType::f64}}, batch, world,
                      {.threads = 2, .seed = 5});
  sg::Evaluator evaluator(trainer, batch);
  const sg::DataSpec data{.source = sg::SyntheticTokens{4}, .ignore = 3};
  const sg::Batches batches(data, model.vocab, {.global = batch.global, .seq = batch.seq});
  double sum           = 0;
  std::int64_t counted = 0;
  for (int step = 0; step < 3; ++step) {
    const sg::Batch next = batches.read(4 * step);
    sum += evaluator.loss(next) * static_cast<double>(next.num_counted);
    CHECK(evaluator.num_counted() == next.num_counted);
    counted += next.num_counted;
  }
  CHECK(counted < 96);
  CHECK(sg::mean_loss(evaluator, batches, 3) == sum / static_cast<double>(counted));
}

TEST_CASE("validation and ignored targets over processes have the bits of loopback",
          "[graphs][trainer][evaluator][processes][threads]") {
  const auto model = small_llama();
  const sg::Plan plan{.layout    = {.dp = 2, .tp = 2},
                      .shard     = {.strategy = sg::Shard::full, .min_params = 100},
                      .optimizer = {.groups = {{.match = "*.q_proj.*", .lr = 0.1}}}};
  const auto losses = [&](sg::World& world) {
    sg::Trainer trainer(model, plan, batch, world, {.threads = 1, .seed = 5});
    sg::Evaluator evaluator(trainer, batch);
    std::vector<double> found;
    for (int step = 0; step < 3; ++step) {
      found.push_back(evaluator.loss(some_batch(7, model.vocab, 4)));
      found.push_back(trainer.step(some_batch(step, model.vocab, 3)).loss);
    }
    return found;
  };
  sg::LoopbackWorld loopback(4);
  const std::vector<double> expected = losses(loopback);
  std::mutex mutex;
  std::vector<std::vector<double>> all;
  sg::testing::in_processes(sg::testing::neighbours(4, 4), sg::testing::Exchanges::messages, [&](sg::World& world) {
    const std::vector<double> here = losses(world);
    const std::lock_guard lock(mutex);
    all.push_back(here);
  });
  CHECK(all == std::vector(4, expected));
}
