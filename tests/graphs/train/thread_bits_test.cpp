// A training has the same bits with any number of threads. The models are large enough that products, attention and
// losses are cut into several tiles.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::History;

namespace {

constexpr std::int64_t context = 48, vocab = 320;

sg::Model wide_gpt2() {
  return sg::gpt2({.layers = 2, .width = 160, .heads = 5, .context = context, .vocab = vocab, .dropout = 0.1});
}
sg::Model wide_llama() {
  return sg::llama({.layers = 2, .width = 192, .heads = 6, .kv_heads = 2, .context = context, .vocab = vocab});
}

}  // namespace

TEST_CASE("a training has the same bits for 1, 2, 3, 8 and 16 threads", "[graphs][train][threads]") {
  const auto model  = GENERATE(wide_gpt2, wide_llama)();
  const auto type   = GENERATE(sg::DType::f32, sg::DType::bf16);
  const auto layout = GENERATE(sg::LayoutSpec{}, sg::LayoutSpec{.dp = 2, .tp = 1, .pp = 2});
  if (sg::testing::scale() > 1 && (type == sg::DType::bf16 || layout.dp == 1)) return;  // sanitized
  CAPTURE(model.kind, type, layout.dp);
  const sg::BatchSpec batch{.global = 8, .micro = 4, .seq = context};
  const auto with = [&](int threads) {
    const sg::Plan plan{.layout = layout, .precision = {.param = type}, .optimizer = {.lr = 3e-3}};
    return sg::testing::train(model, plan, batch, 2, {.threads = threads, .seed = 7});
  };
  const History alone = with(1);
  CHECK(alone.loss[1] != alone.loss[0]);
  for (const int threads : {2, 3, 8, 16}) {
    if (sg::testing::sanitized() && threads != (model.kind == "gpt2" ? 3 : 16)) continue;
    CAPTURE(threads);
    CHECK(with(threads) == alone);
  }
}
