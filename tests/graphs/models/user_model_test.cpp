// Names of weights in a model of a user: each block has its own.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/models/mlp.hpp"
#include "graphs/models/model_folder.hpp"
#include "ops/layers/linear.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::History;

namespace {

constexpr sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};

// Each layer is one linear; all call their weight by the same name.
sg::Model model_of(const std::string& weight, const std::string& asked) {
  sg::Model model = sg::mlp({.layers = 2, .width = 16, .context = 8, .vocab = 32});
  model.kind      = "mine";
  model.config.clear();
  for (int layer = 0; layer < 2; ++layer) {
    model.blocks[static_cast<std::size_t>(1 + layer)] = {
        .name    = sg::str("layer", layer),
        .layer   = layer,
        .weights = {{.name = weight, .shape = {16, 16}, .init = {.deviation = 0.1}}},
        .forward = [asked](sg::Tape& tape, const sg::Tensor& x) {
          return sg::linear(tape, {.x = x, .weight = tape.weight(asked)});
        }};
  }
  return model;
}

}  // namespace

TEST_CASE("blocks may call their weights by the same name", "[graphs][models]") {
  const sg::Model model = model_of("w", "w");
  CHECK(model.parameters().names() ==
        std::vector<std::string>{"embedding.weight", "layer0.w", "layer1.w", "head.weight"});
  const History reference = sg::testing::train(model, {}, batch, 3);
  CHECK(reference.loss.back() < reference.loss.front());
  CHECK(sg::testing::train(model, {.layout = {.pp = 2}}, batch, 3) == reference);
  CHECK(sg::testing::train(model, {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full, .min_params = 50}},
                           batch, 3) == sg::testing::train(model, {.layout = {.dp = 2}}, batch, 3));

  // Saved under those names, and read back.
  const sg::testing::TempFolder folder;
  sg::LoopbackWorld world(1);
  sg::Trainer trainer(model, {}, batch, world, {.threads = 1, .seed = 7}), again(model, {}, batch, world);
  const auto tokens = sg::testing::tokens_for(batch, 0, model.vocab);
  trainer.step(tokens);
  sg::save_model(trainer.run(), (folder / "saved").string());
  sg::set_weights(again.run(), sg::ModelFolder(folder / "saved"));
  CHECK(again.step(tokens).loss == trainer.step(tokens).loss);
}

TEST_CASE("a weight that only one block has keeps its name", "[graphs][models]") {
  sg::Model model                 = model_of("w", "w");
  model.blocks[2].weights[0].name = "v";
  model.blocks[2].forward         = [](sg::Tape& tape, const sg::Tensor& x) {
    return sg::linear(tape, {.x = x, .weight = tape.weight("v")});
  };
  CHECK(model.parameters().names() == std::vector<std::string>{"embedding.weight", "w", "v", "head.weight"});
  model.blocks[2].weights[0].tied_to = "w";
  CHECK(model.parameters().names() == std::vector<std::string>{"embedding.weight", "w", "head.weight"});
}

TEST_CASE("a block cannot read the weight of another block, in any layout", "[graphs][models][refuses]") {
  for (const int pp : {1, 2}) {
    CAPTURE(pp);
    const auto refuses = [&](const sg::Model& model, const std::string& why) {
      CHECK_THROWS_WITH(sg::training_step(model, {.layout = {.pp = pp}}, batch), ContainsSubstring(why));
    };
    refuses(model_of("weights", "weigths"), "weight 'weigths': not declared by block 'layer0' (near: weights)");
    refuses(model_of("w", "bias"), "weight 'bias': not declared by block 'layer0' (declared: w)");
    sg::Model model         = model_of("w", "w");
    model.blocks[1].forward = [](sg::Tape& tape, const sg::Tensor& x) {
      return sg::linear(tape, {.x = x, .weight = tape.weight("embedding.weight")});
    };
    refuses(model,
            "weight 'embedding.weight': belongs to block 'embedding', not to 'layer0' (a weight of its own, "
            "which may be tied to it)");
  }
}
