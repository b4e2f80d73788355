#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <map>

#include "engine/base/error.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/step/training_step.hpp"

// The nodes and bytes of sequence parallelism. golden_test.cpp tests that it trains correctly.
namespace sg = stepgraph;
using Catch::Matchers::Message;

namespace {

sg::Model model_of(const std::string& kind) {
  if (kind == "gpt2") return sg::gpt2({.layers = 2, .width = 32, .heads = 4, .context = 16, .vocab = 64});
  return sg::llama({.layers = 2, .width = 32, .heads = 4, .context = 16, .vocab = 64});
}

sg::StepGraph step_of(const sg::Model& model, sg::LayoutSpec layout, bool shares) {
  layout.sequence_parallel = shares;
  return sg::training_step(model, {.layout = layout}, {.global = 8, .micro = 2, .seq = 16});
}

// The number of nodes by op on rank 0's tensor-parallel lane, for one microbatch and layer.
std::map<std::string, int> collectives(const sg::StepGraph& step, int layer) {
  std::map<std::string, int> found;
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    const sg::NodeSpec node = step.graph.spec(sg::Node{i});
    if (!node.lane || node.lane->kind != sg::LaneKind::tp || node.lane->rank != sg::Rank{0}) continue;
    if (node.labels.layer == layer && node.labels.microbatch == 0) ++found[node.op];
  }
  return found;
}

}  // namespace

TEST_CASE("with sequence parallelism all-gathers and reduce-scatters replace all-reduces", "[graphs][sequence]") {
  const std::string kind = GENERATE("gpt2", "llama");
  CAPTURE(kind);
  const sg::StepGraph whole  = step_of(model_of(kind), {.tp = 2}, false),
                      shared = step_of(model_of(kind), {.tp = 2}, true);
  sg::verify(shared);
  // Attention and MLP each have a tp_copy and a tp_sum, forward and backward.
  CHECK(collectives(whole, 1) == std::map<std::string, int>{{"all_reduce", 4}});
  CHECK(collectives(shared, 1) == std::map<std::string, int>{{"all_gather", 4}, {"reduce_scatter", 4}});
}

TEST_CASE("with sequence parallelism a rank sends and keeps its share of the rows", "[graphs][sequence]") {
  const sg::Model model     = model_of("gpt2");
  const sg::LayoutSpec both = {.tp = 2, .pp = 2};
  const sg::StepGraph whole = step_of(model, both, false), shared = step_of(model, both, true);
  const auto sent = [](const sg::StepGraph& step) {
    double bytes = 0;
    for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
      const sg::NodeSpec node = step.graph.spec(sg::Node{i});
      if (node.op == "send") bytes += node.cost.bytes_sent;
    }
    return bytes;
  };
  CHECK(sent(shared) == sent(whole) / 2);
  const auto peak = [](const sg::StepGraph& step) {
    return sg::plan_memory(step.graph).arena(sg::Rank{0}).lower_bound;
  };
  CHECK(peak(shared) < peak(whole));
}

TEST_CASE("sequence parallelism with one tensor-parallel rank changes nothing", "[graphs][sequence]") {
  const sg::StepGraph shared = step_of(model_of("gpt2"), {.dp = 2}, true);
  CHECK(shared.graph == step_of(model_of("gpt2"), {.dp = 2}, false).graph);
}

TEST_CASE("sequence parallelism is refused if tp does not divide the rows", "[graphs][sequence][refuses]") {
  CHECK_THROWS_MATCHES(
      sg::training_step(model_of("gpt2"), {.layout = {.tp = 2, .sequence_parallel = true}},
                        {.global = 2, .micro = 1, .seq = 15}),
      sg::Error,
      Message("layout.sequence_parallel: 15 tokens of a microbatch (batch.micro 1 x batch.seq 15) do not divide over "
              "tp(2) (a multiple of 2)"));
}
