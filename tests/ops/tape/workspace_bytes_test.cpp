#include "ops/cuda/common/workspace_bytes.hpp"

#include <catch2/catch_test_macros.hpp>
#include <map>
#include <string>

#include "engine/graph/graph.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/step/training_step.hpp"

namespace sg = stepgraph;
using namespace sg::cuda;

namespace {

constexpr std::int64_t mib = std::int64_t{1} << 20;

// The largest workspace of each op of a training step.
std::map<std::string, std::int64_t> workspaces(const sg::Model& model, const sg::Plan& plan,
                                               const sg::BatchSpec& batch) {
  const sg::Graph graph = sg::training_step(model, plan, batch).graph;
  std::map<std::string, std::int64_t> most;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    std::int64_t& bytes = most[std::string(graph.op(sg::Node{i}))];
    bytes               = std::max(bytes, graph.workspace_bytes(sg::Node{i}));
  }
  return most;
}

}  // namespace

TEST_CASE("every op that uses workspace on a device declares it, and no other", "[ops][workspace]") {
  const sg::BatchSpec batch{.global = 4, .micro = 2, .seq = 128};
  const sg::Plan half{.precision = {.param = sg::DType::bf16}};
  const auto llama = workspaces(sg::llama({.layers   = 1,
                                           .width    = 128,
                                           .heads    = 2,
                                           .kv_heads = 1,
                                           .context  = 128,
                                           .vocab    = 64,
                                           .inner    = 96,
                                           .tied     = true}),
                                half, batch);
  const auto gpt2 =
      workspaces(sg::gpt2({.layers = 1, .width = 128, .heads = 2, .context = 128, .vocab = 64}), half, batch);
  CHECK(gpt2.at("linear") == library_workspace_bytes(256, 128, 4 * 128, 4));  // the second of the MLP
  CHECK(gpt2.at("attention") == dnn_forward_workspace(2, 128, 2));
  CHECK(gpt2.at("attention_backward") == dnn_backward_workspace(2, 128, 2, 64));
  CHECK(gpt2.at("embedding_weight_gradient") == embedding_sums(256, 64, 128, 4).workspace_bytes);
  CHECK(gpt2.at("cross_entropy") == cross_entropy_workspace(256));
  CHECK(gpt2.at("bias_gradient") == column_sum_workspace(256, 4 * 128, 2, false));
  CHECK(llama.at("rotary_embedding") == rotary_workspace(128, 64, 4));
  CHECK(llama.at("residual_norm_weight_gradient") == norm_weight_workspace(256, 128, 2, false));
  for (const char* op : {"embedding", "residual_norm", "residual_norm_backward", "adamw"}) {
    CAPTURE(op);
    for (const auto* of : {&gpt2, &llama}) {
      if (of->contains(op)) CHECK(of->at(op) == 0);
    }
  }
  // With dropout, or in f32, attention runs on kernels that use none.
  const auto wide =
      workspaces(sg::gpt2({.layers = 1, .width = 128, .heads = 2, .context = 128, .vocab = 64}), {}, batch);
  CHECK(wide.at("attention") == 0);
  CHECK(wide.at("attention_backward") == 0);
}

TEST_CASE("the workspace of a product is that of split-k, up to a limit, and of measuring it", "[ops][workspace]") {
  CHECK(product_workspace(8, 8, 8, 4) == 256 * 256 * 4);
  CHECK(product_workspace(256, 256, 1024, 4) == 16 * 256 * 256 * 4);
  CHECK(product_workspace(768, 768, 65536, 4) == 64 * mib + product_notes_bytes);
  CHECK(product_workspace(std::int64_t{1} << 40, 1 << 20, 1 << 20, 4) == 64 * mib + product_notes_bytes);
  CHECK(product_workspace(0, 8, 8, 4) == 0);
  CHECK_FALSE(is_measured(512, 512, 512));
  CHECK(product_in_place_workspace(512, 512, 512, 4) == 0);
  CHECK(product_in_place_workspace(50257, 768, 1024, 4) == taken_bytes(50257 * 768, 4));
  CHECK(product_in_place_workspace(128'256, 4096, 1024, 4) == 0);  // too large to measure
}

TEST_CASE("the workspaces of attention and embeddings have a limit", "[ops][workspace]") {
  constexpr std::int64_t of_one = 12 * 1024 * (2 * 1024 + 12 * 64 + 8);
  CHECK(dnn_backward_workspace(1, 1024, 12, 64) == taken_bytes(of_one, 1) + mib);
  CHECK(dnn_backward_workspace(4, 1024, 12, 64) == taken_bytes(4 * of_one, 1) + mib);
  CHECK(dnn_backward_workspace(64, 1024, 12, 64) == 1024 * mib);
  // One sequence has to fit.
  CHECK(dnn_backward_workspace(2, 16384, 32, 128) > 16 * 1024 * mib);
  CHECK(dnn_backward_workspace(2, 16384, 32, 128) == dnn_backward_workspace(1, 16384, 32, 128));

  const EmbeddingSums usual = embedding_sums(65536, 50257, 768, 4);
  CHECK(usual.tokens_per_sum == few_tokens);
  CHECK(usual.workspace_bytes < 20 * mib);
  const EmbeddingSums large = embedding_sums(1 << 20, 128'256, 8192, 4);
  CHECK(large.tokens_per_sum == 8 * few_tokens);
  CHECK(large.num_parts * 8192 * 4 == 256 * mib);
  CHECK(embedding_sums(0, 100, 8, 4).workspace_bytes == 0);

  CHECK(rotary_positions(1024, 64, 4) == 1024);
  CHECK(rotary_positions(1 << 20, 128, 4) == 65536);
  CHECK(rotary_workspace(1 << 20, 128, 4) == 32 * mib);
  CHECK(column_sum_workspace(1, 0, 2, false) == 0);
  CHECK(column_sum_workspace(0, 5, 2, false) == 256);
}
