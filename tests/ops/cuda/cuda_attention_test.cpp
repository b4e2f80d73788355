#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cstdint>
#include <memory>
#include <ostream>
#include <vector>

#include "ops/cuda/attention/dnn_attention.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/layers/attention.hpp"
#include "ops/layers/residual.hpp"
#include "ops/transfers/reduce.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/ops/elements.hpp"
#include "tests/support/ops/op_case.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using sg::testing::OpCase;

namespace {

struct Shape {
  std::int64_t sequences, seq, heads, kv_heads, head_size;
  double rate = 0;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.sequences << " x " << s.seq << ", heads " << s.heads << "/" << s.kv_heads << " of " << s.head_size
             << ", dropout " << s.rate;
}

// Under a sanitizer, reduces large shapes to one group of heads of one sequence, of one tile of 64 with a tail, or of
// two tiles.
Shape shrunk(Shape s) {
  if (!sg::testing::sanitized() || s.sequences * s.seq * s.heads * s.head_size < 12'000) return s;
  s.sequences = 1;
  s.heads /= s.kv_heads;
  s.kv_heads = 1;
  if (s.seq > 140) s.seq = s.seq % 64 == 0 ? 128 : 64 + s.seq % 64;
  return s;
}

OpCase attention_case(const Shape& s) {
  OpCase test = {.inputs    = {{s.sequences * s.seq, (s.heads + 2 * s.kv_heads) * s.head_size}},
                 .sequences = s.sequences,
                 .seq       = s.seq,
                 .build =
                     [=](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                       return sg::attention(
                           tape, {.qkv     = in[0],
                                  .heads   = {.heads = s.heads, .kv_heads = s.kv_heads, .head_size = s.head_size},
                                  .scale   = 0.25,
                                  .dropout = {.rate = s.rate, .site = s.rate > 0 ? "attention" : ""}});
                     },
                 .range = 2};
  if (s.rate > 0) test.step = 5;
  return test;
}

const std::vector<sg::DType> halves = {sg::DType::bf16, sg::DType::f16};

}  // namespace

TEST_CASE("attention on a CUDA device equals that on the CPU, for any shape", "[ops][cuda][attention]") {
  const Shape s =
      shrunk(GENERATE(Shape{1, 1, 1, 1, 1}, Shape{3, 33, 6, 1, 5}, Shape{2, 70, 4, 2, 20}, Shape{2, 131, 6, 3, 32},
                      Shape{1, 64, 2, 2, 64}, Shape{2, 129, 4, 1, 64}, Shape{1, 200, 2, 2, 96},
                      Shape{1, 257, 4, 2, 128}, Shape{1, 65, 2, 1, 200}, Shape{1, 100, 2, 2, 256}));
  CAPTURE(s);
  sg::testing::check_on_device(attention_case(s));
}

TEST_CASE("attention on a CUDA device drops the same probabilities as the CPU", "[ops][cuda][attention]") {
  const Shape s = shrunk(GENERATE(Shape{1, 1, 2, 1, 4, 0.5}, Shape{2, 70, 4, 2, 20, 0.3}, Shape{2, 131, 6, 3, 64, 0.1},
                                  Shape{1, 130, 2, 2, 128, 0.2}, Shape{1, 40, 2, 1, 256, 0.2}));
  CAPTURE(s);
  sg::testing::check_on_device(attention_case(s));
}

TEST_CASE("attention on a CUDA device handles whole tiles of long sequences", "[ops][cuda][attention]") {
  const Shape s = shrunk(GENERATE(Shape{2, 512, 4, 4, 64}, Shape{1, 384, 4, 2, 128}, Shape{2, 256, 3, 3, 80},
                                  Shape{1, 384, 4, 2, 96}, Shape{2, 128, 2, 2, 40}));
  CAPTURE(s);
  sg::testing::check_on_device(attention_case(s));
}

TEST_CASE("attention on a CUDA device computes f64 in f64", "[ops][cuda][attention]") {
  const Shape s = shrunk(GENERATE(Shape{2, 70, 4, 2, 20}, Shape{1, 97, 2, 1, 128, 0.2}, Shape{1, 40, 2, 2, 256}));
  CAPTURE(s);
  sg::testing::check_on_device(attention_case(s), {sg::DType::f64});
}

TEST_CASE("attention on a CUDA device in bf16 and f16 uses cuDNN where it has a plan", "[ops][cuda][attention]") {
  const Shape s = shrunk(GENERATE(Shape{2, 128, 4, 4, 64}, Shape{1, 256, 6, 2, 128}, Shape{1, 256, 3, 3, 80}));
  CAPTURE(s);
  OpCase test             = attention_case(s);
  const auto asked        = std::make_shared<std::atomic<int>>(0);
  const auto taken        = std::make_shared<std::atomic<int>>(0);
  const auto with_a_probe = [=, inner = test.build](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    const sg::Tensor nothing = tape.tensor("nothing", {1});
    tape.add<sg::AllTypes>({.op = "probe", .reads = in[0], .writes = nothing, .device = true},
                           [=]<class T>(const sg::Context& context, T) {
                             if constexpr (sg::cuda::built && sizeof(T) == 2) {
                               const sg::DeviceQueue* queue = context.device();
                               if (queue == nullptr) return;
                               const sg::AttentionShape shape{
                                   .seq = s.seq, .heads = s.heads, .kv_heads = s.kv_heads, .head_size = s.head_size};
                               const T* qkv = context.read<T>().data();
                               ++*asked;
                               *taken += sg::cuda::dnn_attends<T>(*queue, shape, s.sequences, qkv, qkv, {}) ? 1 : 0;
                             }
                           });
    return inner(tape, in);
  };
  test.build = with_a_probe;
  sg::testing::check_on_device(test, halves);
  CHECK(*asked > 0);
  CHECK(*taken == *asked);
}

TEST_CASE("gradients of attention on a CUDA device are computed in parts if the workspace is small",
          "[ops][cuda][attention][.slow]") {
  sg::testing::check_on_device(attention_case({3, 1024, 12, 12, 64}), {sg::DType::bf16});  // 24 MiB per sequence
}

TEST_CASE("gradients of attention on a CUDA device add to those of another user of the input",
          "[ops][cuda][attention]") {
  const Shape s = shrunk(GENERATE(Shape{2, 70, 4, 2, 20}, Shape{2, 128, 4, 2, 64}));
  CAPTURE(s);
  OpCase test = attention_case(s);
  test.build  = [inner = test.build](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    const sg::Tensor first = inner(tape, in), second = inner(tape, in);
    return sg::residual(tape, {.x = first, .branch = second});
  };
  sg::testing::check_on_device(test);
}

TEST_CASE("cuDNN's plans for attention are used again after the world of their first use was destroyed",
          "[ops][cuda][attention]") {
  sg::testing::need_device();
  constexpr std::int64_t sequences = 2, seq = 128, heads = 4, head_size = 64, rows = sequences * seq,
                         width = heads * head_size;
  sg::Graph graph;
  const auto kept = [&](const char* name, std::int64_t elements) {
    return graph.buffer(
        {.name = name, .size_bytes = 2 * elements, .type = sg::DType::bf16, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer qkv = kept("qkv", rows * 3 * width), dy = kept("dy", rows * width), out = kept("out", rows * width);
  sg::WeightTable weights;
  sg::Tape tape({.graph = &graph, .weights = &weights, .type = sg::DType::bf16, .sequences = sequences, .seq = seq});
  const sg::Tensor in = tape.input(qkv, {rows, 3 * width}, sg::DType::bf16, true);
  const sg::Tensor y  = sg::attention(
       tape, {.qkv = in, .heads = {.heads = heads, .kv_heads = heads, .head_size = head_size}, .scale = 0.25});
  sg::copy(graph, {.name = "keep", .to = out, .from = y});
  tape.set_gradient(y, tape.input(dy, {rows, width}, sg::DType::bf16, false));
  tape.emit_gradients();
  std::vector<double> numbers;
  for (std::size_t i = 0; i < static_cast<std::size_t>(rows * 3 * width); ++i)
    numbers.push_back(static_cast<double>(sg::testing::mix(i) % 64) / 32 - 1);
  const std::vector<std::pair<sg::Buffer, std::vector<double>>> set{
      {qkv, numbers}, {dy, {numbers.begin(), numbers.begin() + rows * width}}};
  // Each run has a world of its own, with its own handle of cuDNN.
  const auto run   = [&] { return sg::testing::run_graph(graph, set, {out}, true); };
  const auto first = run();
  CHECK((run() == first));
  CHECK((run() == first));
}
