// Weights that share their values with another weight: in any order, any number, on any stages.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/mlp.hpp"
#include "graphs/models/weights.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::History;

namespace {

constexpr sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};

sg::Model plain() { return sg::mlp({.layers = 4, .width = 16, .context = 8, .vocab = 32, .inner = 26}); }

sg::WeightSpec& up_of(sg::Model& model, int layer) {
  return model.blocks[static_cast<std::size_t>(1 + layer)].weights[0];
}
sg::WeightSpec& down_of(sg::Model& model, int layer) {
  return model.blocks[static_cast<std::size_t>(1 + layer)].weights[2];
}

// Three layers have the matrix of another: the owner is the first, a middle one, or the last.
sg::Model tied(int owner) {
  sg::Model model = plain();
  for (int layer = 0; layer < 4; ++layer) {
    if (layer != owner) up_of(model, layer).tied_to = up_of(model, owner).name;
  }
  model.blocks.back().weights[0].tied_to = "embedding.weight";
  return model;
}

// Loopback that says that its sums have other bits, as NCCL's.
class LooseWorld final : public sg::World {
 public:
  explicit LooseWorld(int num_ranks) : inner_(num_ranks) {}
  [[nodiscard]] int num_ranks() const override { return inner_.num_ranks(); }
  [[nodiscard]] bool waits(sg::LaneKind lane) const override { return inner_.waits(lane); }
  [[nodiscard]] sg::IssueOrder issue_order() const override { return inner_.issue_order(); }
  [[nodiscard]] bool reduces_in_order() const override { return false; }
  void communicate(const sg::Context& context, const sg::Exchange& exchange) override {
    inner_.communicate(context, exchange);
  }
  void abort(std::string_view why) noexcept override { inner_.abort(why); }

 private:
  sg::LoopbackWorld inner_;
};

std::int64_t bytes_reduced(const sg::Graph& graph) {
  std::int64_t bytes = 0;
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    const sg::Node at{node};
    if (graph.has_part(at) && graph.part(at).op == sg::PartOp::all_reduce) bytes += graph.part(at).bytes_read;
  }
  return bytes;
}

History train(const sg::Model& model, const sg::Plan& plan) { return sg::testing::train(model, plan, batch, 4); }

}  // namespace

TEST_CASE("several weights tied to one have the same bits in every pipeline split and sharding",
          "[graphs][step][tied]") {
  const int owner     = GENERATE(0, 2, 3);
  const auto [dp, tp] = GENERATE(std::pair{1, 1}, std::pair{2, 2});
  if (sg::testing::scale() > 1 && dp == 1) return;
  CAPTURE(owner, dp, tp);
  const sg::Model model = tied(owner);
  const sg::Plan plan{.layout = {.dp = dp, .tp = tp}, .optimizer = {.lr = 1e-2}};
  const History reference = train(model, plan);
  CHECK(reference != train(plain(), plan));
  for (const int pp : {1, 2, 4}) {
    for (const auto strategy : {sg::Shard::none, sg::Shard::zero1, sg::Shard::full}) {
      if (strategy != sg::Shard::none && dp == 1) continue;
      static int seen = 0;
      if (sg::testing::left_out(seen, 4)) continue;
      sg::Plan other       = plan;
      other.layout.pp      = pp;
      other.shard.strategy = strategy;
      CAPTURE(pp, sg::to_string(strategy));
      if (strategy != sg::Shard::none) other.shard.min_params = 50;
      CHECK(train(model, other) == reference);
    }
  }
  sg::Plan looped  = plan;
  looped.layout.pp = 2;
  looped.pipeline  = {.schedule = "interleaved", .chunks = 2};
  CHECK(train(model, looped) == reference);
}

TEST_CASE("copies of a tied weight on other ranks stay equal to it", "[graphs][step][tied]") {
  const sg::Model model = tied(1);
  const sg::Plan plan{.layout = {.pp = 4}, .optimizer = {.lr = 1e-2}};
  sg::LoopbackWorld world(4);
  sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .seed = 7});
  for (int step = 0; step < 3; ++step) trainer.step(sg::testing::tokens_for(batch, step, model.vocab));
  const sg::StepRun& run = trainer.run();
  std::vector<std::vector<float>> copies;
  for (const sg::StepRank& rank : run.step().ranks) {
    for (const sg::StepWeight& weight : rank.weights) {
      const std::string& name = run.step().spec(weight).name;
      if (!name.ends_with(".up.weight")) continue;
      std::vector<float> values(static_cast<std::size_t>(weight.value.size()));
      run.memory().read(weight.value.buffer, std::span(values), weight.value.offset);
      copies.push_back(std::move(values));
    }
  }
  REQUIRE(copies.size() == 4);
  for (const auto& copy : copies) CHECK(copy == copies.front());
}

TEST_CASE("an impossible tie is refused by name", "[graphs][step][tied][refuses]") {
  const auto refuses = [](const auto& change, const char* why) {
    sg::Model model = plain();
    change(model);
    for (const int pp : {1, 2}) {
      CHECK_THROWS_WITH(sg::training_step(model, {.layout = {.pp = pp}}, batch), ContainsSubstring(why));
    }
  };
  refuses([](sg::Model& model) { up_of(model, 1).tied_to = "layers.0.pu.weight"; },
          "weight 'layers.1.up.weight' is tied to 'layers.0.pu.weight', which no block has (did you mean "
          "layers.0.up.weight? the name of a weight)");
  refuses(
      [](sg::Model& model) {
        up_of(model, 1).tied_to = up_of(model, 0).name;
        up_of(model, 2).tied_to = up_of(model, 1).name;
      },
      "weight 'layers.2.up.weight' is tied to 'layers.1.up.weight', which is tied itself ('layers.0.up.weight'");
  refuses([](sg::Model& model) { up_of(model, 1).tied_to = down_of(model, 0).name; },
          "weight 'layers.1.up.weight' of 26x16 is tied to 'layers.0.down.weight' of 16x26 (the same shape)");
  refuses(
      [](sg::Model& model) {
        up_of(model, 1).cut     = false;
        up_of(model, 1).tied_to = up_of(model, 0).name;
      },
      "which tensor parallelism cuts in another way (the same cut and dim)");
  refuses(
      [](sg::Model& model) {
        up_of(model, 1).norm    = true;
        up_of(model, 1).tied_to = up_of(model, 0).name;
      },
      "one of them is the weight of a norm (both, or none)");
  refuses(
      [](sg::Model& model) {
        up_of(model, 1).sections = {{.tensor = "a", .size = 13}, {.tensor = "b", .size = 13}};
        up_of(model, 1).tied_to  = up_of(model, 0).name;
      },
      "is tied to 'layers.0.up.weight', which has other sections (the same, or none)");
  refuses(
      [](sg::Model& model) {
        up_of(model, 0).sections = {{.tensor = "a", .size = 26}};
        up_of(model, 1).sections = {{.tensor = "a", .size = 26}};
      },
      "weight 'layers.1.up.weight' and weight 'layers.0.up.weight' are both made of tensor 'a' (tie one to the other");
}

TEST_CASE("a tied weight has the sections of its owner", "[graphs][step][tied]") {
  const auto with_sections = [](bool repeated) {
    sg::Model model          = plain();
    up_of(model, 0).sections = {{.tensor = "a", .size = 13}, {.tensor = "b", .size = 13}};
    if (repeated) up_of(model, 3).sections = up_of(model, 0).sections;
    up_of(model, 3).tied_to = up_of(model, 0).name;
    return model;
  };
  const sg::Plan one{.optimizer = {.lr = 1e-2}};
  const History reference = train(with_sections(false), one);
  CHECK(train(with_sections(true), one) == reference);
  CHECK(train(with_sections(false), {.layout = {.pp = 2}, .optimizer = {.lr = 1e-2}}) == reference);
}

TEST_CASE("where sums have other bits anyway, gradients of tied weights are added before they are reduced",
          "[graphs][step][tied]") {
  const sg::Model model = sg::gpt2({.layers = 2, .width = 16, .heads = 2, .context = 8, .vocab = 32});
  const int tp          = GENERATE(1, 2);
  CAPTURE(tp);
  const sg::Plan plan{.layout = {.dp = 2, .tp = tp}, .optimizer = {.lr = 1e-2}};
  LooseWorld loose(2 * tp);
  sg::LoopbackWorld strict(2 * tp);
  sg::Trainer joined(model, plan, batch, loose, {.threads = 2}), apart(model, plan, batch, strict, {.threads = 2});
  const std::int64_t tied_bytes = 2 * 32 * 16 * 4;  // of both data-parallel ranks
  CHECK(bytes_reduced(apart.run().step().graph) - bytes_reduced(joined.run().step().graph) == tied_bytes);
  for (int step = 0; step < 4; ++step) {
    const auto tokens      = sg::testing::tokens_for(batch, step, model.vocab);
    const sg::StepResult a = joined.step(tokens), b = apart.step(tokens);
    CHECK_THAT(a.loss, Catch::Matchers::WithinRel(b.loss, 1e-6));
    CHECK_THAT(a.grad_norm, Catch::Matchers::WithinRel(b.grad_norm, 1e-5));
  }
}

TEST_CASE("tied weights of several stages, or sharded ones, are reduced as always", "[graphs][step][tied]") {
  const sg::Model model = sg::gpt2({.layers = 2, .width = 16, .heads = 2, .context = 8, .vocab = 32});
  sg::Plan plan{.layout = {.dp = 2}};
  const bool staged = GENERATE(true, false);
  if (staged) plan.layout.pp = 2;
  if (!staged) plan.shard = {.strategy = sg::Shard::full, .min_params = 0};
  CAPTURE(staged);
  CHECK(sg::training_step(model, plan, batch, {.join_tied_first = true}).graph ==
        sg::training_step(model, plan, batch, {}).graph);
}
