#include "graphs/train/trainer.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/models/fresh_weights.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/huggingface.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/models/mlp.hpp"
#include "graphs/models/model_folder.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/golden.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::WithinRel;
using sg::testing::golden;
using Tokens = std::vector<std::int32_t>;

namespace {

// The tokens that a golden model adds to a prompt, and the smallest lead of the best logit over the second best.
struct Continued {
  Tokens tokens;
  double least_lead = 1e9;
};

Continued continued(const std::string& name, const sg::LayoutSpec& layout) {
  sg::LoopbackWorld world(layout);
  sg::Generator generator(golden(name).model, {.layout = layout}, 24, world, {.threads = 2});
  sg::set_weights(generator.run(), sg::ModelFolder(golden(name).folder));
  Continued result;
  Tokens seen(golden(name).tokens.begin(), golden(name).tokens.begin() + 8);
  for (int i = 0; i < 20; ++i) {  // the last tokens exceed the context window
    const std::size_t size     = std::min<std::size_t>(seen.size(), 24);
    std::vector<double> logits = generator.logits(std::span(seen).last(size));
    result.tokens.push_back(generator.generate(seen, 1).front());
    seen.push_back(result.tokens.back());
    std::partial_sort(logits.begin(), logits.begin() + 2, logits.end(), std::greater<>());
    result.least_lead = std::min(result.least_lead, logits[0] - logits[1]);
  }
  return result;
}

std::vector<double> values_of(const sg::StepRun& run, const std::string& name) {
  std::vector<double> values(static_cast<std::size_t>(run.step().model.parameters().find(name).num_elements()));
  run.read_tensor(sg::StepRun::Which::value, name, std::span<double>(values));
  return values;
}

}  // namespace

TEST_CASE("a step whose gradients are not finite changes nothing", "[graphs][trainer]") {
  const auto kind   = GENERATE(sg::OptimizerKind::adamw, sg::OptimizerKind::sgd);
  const auto shard  = GENERATE(sg::Shard::none, sg::Shard::full);
  const double clip = GENERATE(0.0, 1.0);
  CAPTURE(static_cast<int>(kind), static_cast<int>(shard), clip);
  const sg::Model model = sg::mlp({.layers = 2, .width = 16, .context = 8, .vocab = 32});
  const sg::Plan plan{.layout = {.dp = 2}, .shard = {.strategy = shard}, .optimizer = {.kind = kind, .clip = clip}};
  sg::LoopbackWorld world(plan.layout);
  sg::Trainer trainer(model, plan, {.global = 4, .micro = 1, .seq = 8}, world, {.threads = 1});
  const Tokens tokens(4 * 8 + 1, 3);
  CHECK(std::isfinite(trainer.step(tokens).loss));
  trainer.set_rate(1e30);
  CHECK(std::isfinite(trainer.step(tokens).grad_norm));
  std::vector<std::vector<double>> before;
  const auto inventory = model.parameters();
  for (const sg::Parameter& each : inventory.parameters()) before.push_back(values_of(trainer.run(), each.name));
  CHECK_FALSE(std::isfinite(trainer.step(tokens).grad_norm));
  std::size_t i = 0;
  for (const sg::Parameter& each : inventory.parameters()) {
    CAPTURE(each.name);
    CHECK((values_of(trainer.run(), each.name) == before[i++]));
  }
}

TEST_CASE("weights that are not finite are not saved, and the folder stays as it was", "[graphs][trainer][refuses]") {
  const sg::testing::TempFolder folder;
  const std::string path = (folder / "model").string();
  const sg::Model model  = sg::mlp({.layers = 1, .width = 8, .context = 8, .vocab = 16});
  sg::LoopbackWorld world(1);
  sg::Trainer trainer(model, {}, {.global = 1, .micro = 1, .seq = 8}, world, {.threads = 1});
  sg::set_fresh_weights(trainer.run(), 1);
  sg::save_model(trainer.run(), path);
  const std::string good = sg::testing::file_bytes(path + "/model.safetensors");
  const double bad       = GENERATE(std::nan(""), HUGE_VAL);
  trainer.run().set_weights([bad](const std::string&, const sg::TensorShape&, const sg::Init&,
                                  std::span<double> values) { values.back() = bad; });
  CHECK_THROWS_WITH(sg::save_model(trainer.run(), path),
                    ContainsSubstring("not saved: element ") && ContainsSubstring("(finite weights)"));
  CHECK(sg::testing::file_bytes(path + "/model.safetensors") == good);
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
}

TEST_CASE("greedy generation gives the same tokens in every layout", "[graphs][trainer]") {
  const std::string name    = GENERATE("gpt2-tiny", "llama-tiny");
  const Continued reference = continued(name, {});
  REQUIRE(reference.least_lead > 1e-4);  // otherwise rounding could change a token
  for (const sg::LayoutSpec& layout :
       {sg::LayoutSpec{.dp = 2}, {.tp = 2}, {.pp = 2}, {.pp = 4}, {.dp = 2, .tp = 2, .pp = 2}, {.tp = 4, .pp = 2}}) {
    if (sg::testing::scale() > 1 && layout.num_ranks() < 8) continue;  // slow under sanitizers
    static int seen = 0;
    if (sg::testing::left_out(seen, 3)) continue;  // sanitized: each of the other two with one model
    CAPTURE(name, to_string(layout));
    CHECK(continued(name, layout).tokens == reference.tokens);
  }
}

TEST_CASE("a trained and saved model is loaded bit for bit, in any layout", "[graphs][trainer]") {
  const auto model = GENERATE(
      sg::gpt2({.layers = 2, .width = 16, .heads = 2, .context = 8, .vocab = 32}),
      sg::llama(
          {.layers = 2, .width = 16, .heads = 4, .kv_heads = 1, .context = 8, .vocab = 32, .attention_bias = true}),
      sg::mlp({.layers = 2, .width = 16, .context = 8, .vocab = 32}));
  CAPTURE(model.kind);
  const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};
  const sg::Plan plan{.layout = {.dp = 2, .tp = 2, .pp = 2}};
  sg::LoopbackWorld world(plan.layout);
  sg::Trainer trainer(model, plan, batch, world);
  sg::set_fresh_weights(trainer.run(), 5);
  Tokens tokens(33);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i * i % 32);
  const double before = trainer.step(tokens).loss;
  trainer.step(tokens);

  const sg::testing::TempFolder folder;
  sg::save_model(trainer.run(), folder.path() / "model");
  const sg::ModelFolder saved(folder.path() / "model");
  const sg::Model again = sg::load_model((folder.path() / "model").string());
  CHECK(again.parameters() == model.parameters());
  sg::LoopbackWorld alone(1);
  sg::Evaluator evaluator(again, {}, batch, alone);
  sg::set_weights(evaluator.run(), saved);
  for (const std::string& name : model.parameters().names()) {
    CAPTURE(name);
    CHECK(values_of(evaluator.run(), name) == values_of(trainer.run(), name));
  }
  const double after = evaluator.loss(tokens);
  CHECK(after < before);
  CHECK_THAT(after, WithinRel(trainer.step(tokens).loss, 1e-6));  // a step returns the loss before its update
}

TEST_CASE("a step refuses tokens that do not fit its batch, and reads of the wrong size", "[graphs][trainer]") {
  const auto model = sg::mlp({.layers = 1, .width = 8, .context = 8, .vocab = 16});
  sg::LoopbackWorld world(1), larger(2);
  sg::Trainer trainer(model, {}, {.global = 2, .micro = 1, .seq = 4}, world);
  CHECK_THROWS_WITH(trainer.step(Tokens(8)), "step: 8 tokens given (9: 2 sequences of 4 and one more token)");
  CHECK_THROWS_WITH(trainer.step(Tokens(9, 16)), ContainsSubstring("token") && ContainsSubstring("is 16 (0 to 15)"));
  CHECK(trainer.step(Tokens(9, 3)).loss > 0);  // the next step works
  std::vector<float> small(3);
  CHECK_THROWS_WITH(trainer.run().read_tensor(sg::StepRun::Which::value, "head.weight", std::span<float>(small)),
                    "tensor 'head.weight': a span of 3 elements (the tensor has 128)");
  CHECK_THROWS_WITH(sg::Trainer(model, {}, {.global = 2, .micro = 1, .seq = 4}, larger),
                    "step: the layout has 1 rank, but the world has 2");
}

TEST_CASE("SGD with momentum trains to the same loss in every layout", "[graphs][trainer]") {
  const auto model        = sg::mlp({.layers = 4, .width = 16, .context = 8, .vocab = 32});
  constexpr int num_steps = 30;
  const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};
  const auto train = [&](const sg::LayoutSpec& layout, sg::Shard strategy = sg::Shard::none) {
    const sg::Plan plan{.layout    = layout,
                        .shard     = {.strategy = strategy, .group = strategy == sg::Shard::hybrid ? 2 : 0},
                        .precision = {.param = sg::DType::f64},
                        .optimizer = {.kind = sg::OptimizerKind::sgd, .lr = 0.5}};
    return sg::testing::train(model, plan, batch, num_steps);
  };
  const sg::testing::History alone = train({});
  CHECK(alone.loss.back() < alone.loss[num_steps - 4]);  // two batches in turn
  CHECK(alone.loss.back() < alone.loss.front());
  const auto check_like = [](const sg::testing::History& history, const sg::testing::History& reference) {
    CHECK(sg::testing::loss_distance(history, reference) < 1e-9);
    CHECK(sg::testing::norm_distance(history, reference) < 1e-7);
  };
  for (const int dp : {1, 2, 4}) {
    for (const int tp : {1, 2, 4}) {
      if (sg::testing::scale() > 1 && (dp * tp != 4 || dp == 1)) continue;
      const sg::testing::History split = train({.dp = dp, .tp = tp});
      CAPTURE(dp, tp);
      check_like(split, alone);
      for (const int pp : {2, 4}) {
        if (sg::testing::sanitized() && pp == 4) continue;
        CAPTURE(pp);
        CHECK(train({.dp = dp, .tp = tp, .pp = pp}) == split);
      }
      if (dp == 1 || (sg::testing::sanitized() && tp > 1)) continue;
      for (const auto strategy : {sg::Shard::zero1, sg::Shard::grad_op, sg::Shard::full}) {
        CAPTURE(sg::to_string(strategy));
        CHECK(train({.dp = dp, .tp = tp, .pp = 2}, strategy) == split);
      }
      if (dp == 4) check_like(train({.dp = dp, .tp = tp}, sg::Shard::hybrid), alone);
    }
  }
}

TEST_CASE("weights that the caller does not set are drawn with the trainer's seed", "[graphs][trainer]") {
  const auto model = sg::mlp({.layers = 1, .width = 8, .context = 8, .vocab = 16});
  const auto loss  = [&](std::uint64_t seed, bool set) {
    sg::LoopbackWorld world(1);
    sg::Trainer trainer(model, {}, {.global = 2, .micro = 1, .seq = 4}, world, {.seed = seed});
    if (set) sg::set_fresh_weights(trainer.run(), 3);
    return trainer.step(Tokens{1, 2, 3, 4, 5, 6, 7, 8, 9}).loss;
  };
  CHECK(loss(3, false) == loss(0, true));
  CHECK(loss(3, false) != loss(4, false));
}

TEST_CASE("any number of threads sets the same weights, wherever they lie", "[graphs][trainer]") {
  const sg::Model model = sg::gpt2({.layers = 2, .width = 128, .heads = 4, .context = 16, .vocab = 4096});
  const std::vector<sg::Plan> plans{{},
                                    {.layout = {.tp = 2}},
                                    {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full}},
                                    {.layout    = {.dp = 2, .tp = 2},
                                     .shard     = {.strategy = sg::Shard::zero1},
                                     .offload   = {.params = true, .optimizer = true},
                                     .precision = {.param = sg::DType::bf16}},
                                    {.offload = {.params = true, .optimizer = true, .compress = sg::Compression::bf16},
                                     .precision = {.param = sg::DType::bf16}}};
  std::vector<double> drawn(4096 * 128);  // large enough for several threads
  sg::fill_normal(3, "transformer.wte.weight", 0, 0.02, std::span(drawn));
  for (double& value : drawn) value = static_cast<float>(value);
  int seen = 1;
  for (const sg::Plan& plan : plans) {
    if (sg::testing::left_out(seen, 2)) continue;  // sanitized: the second and the fourth
    std::vector<std::uint64_t> hashes;
    for (const int threads : {1, 4}) {
      sg::LoopbackWorld world(plan.layout);
      sg::Trainer trainer(model, plan, {.global = 2, .micro = 1, .seq = 8}, world, {.threads = threads});
      sg::set_fresh_weights(trainer.run(), 3);
      hashes.push_back(sg::testing::hash_weights(trainer.run()));
      if (plan.offload.compress == sg::Compression::none)
        CHECK(values_of(trainer.run(), "transformer.wte.weight") == drawn);
    }
    CHECK(hashes[0] == hashes[1]);
  }
}

TEST_CASE("generation refuses logits that are NaN", "[graphs][trainer]") {
  const auto model = sg::mlp({.layers = 1, .width = 8, .context = 8, .vocab = 16});
  sg::LoopbackWorld world(1);
  sg::Generator generator(model, {}, 4, world);
  generator.run().set_weights([](const std::string&, const sg::TensorShape&, const sg::Init&,
                                 std::span<double> values) { std::fill(values.begin(), values.end(), std::nan("")); });
  CHECK_THROWS_WITH(generator.generate({1, 2}, 1), ContainsSubstring("generate: a logit is nan"));
}

TEST_CASE("copies of a weight that differ are found when weights are hashed", "[graphs][train]") {
  const sg::Plan plan{.layout = {.dp = 2, .pp = 2}};
  const sg::BatchSpec batch{.global = 4, .micro = 2, .seq = 16};
  const sg::Model model = sg::testing::small_gpt2();
  sg::LoopbackWorld world(4);
  sg::Trainer trainer(model, plan, batch, world, {.threads = 1});
  trainer.step(sg::testing::tokens_for(batch, 0, model.vocab));
  const std::uint64_t hash = sg::testing::hash_weights(trainer.run());
  for (std::size_t rank = 0; rank < 4; ++rank) {
    CAPTURE(rank);
    const sg::StoredRange& held = trainer.run().step().ranks[rank].weights.back().value;
    std::vector<float> values(static_cast<std::size_t>(held.size()));
    trainer.run().memory().read(held.buffer, std::span(values), held.offset);
    std::vector<float> changed = values;
    changed.back() += 1;
    trainer.run().memory().write(held.buffer, std::span<const float>(changed), held.offset);
    CHECK_THROWS(sg::testing::hash_weights(trainer.run()));
    trainer.run().memory().write(held.buffer, std::span<const float>(values), held.offset);
  }
  CHECK(sg::testing::hash_weights(trainer.run()) == hash);
}
