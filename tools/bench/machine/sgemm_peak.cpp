#include "tools/bench/machine/sgemm_peak.hpp"

#include <algorithm>
#include <chrono>

#include "backends/loopback/world.hpp"
#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/recorder.hpp"
#include "graphs/models/fresh_weights.hpp"
#include "graphs/predict/calibration.hpp"
#include "ops/cpu/gemm/gemm.hpp"
#include "ops/layers/linear.hpp"
#include "tools/bench/training/training.hpp"
#include "tools/stepgraph/processes/worlds.hpp"

namespace stepgraph::bench {
namespace {

// c = a b as one node, with operands of type T. One element is checked: a sum of small integers.
template <class T>
double gflops_of(Executor& executor, std::int64_t size, int runs) {
  Graph graph;
  const auto buffer = [&](DType type) {
    const auto element = static_cast<std::int64_t>(size_bytes(type));
    return graph.buffer({.size_bytes = size * size * element, .type = type, .lifetime = Lifetime::persistent});
  };
  const Buffer of[3] = {buffer(*dtype_of<T>()), buffer(*dtype_of<T>()), buffer(DType::f32)};
  graph.add({.reads = {of[0], of[1]}, .writes = of[2], .op = "sgemm", .parallel = true, .rank = Rank{0}},
            [size](const Context& context) {
              const auto c = context.write<float>();
              const Gemm<T, float> problem{.m        = size,
                                           .n        = size,
                                           .k        = size,
                                           .a        = {context.read<T>(0).data(), size, 1},
                                           .b        = {context.read<T>(1).data(), size, 1},
                                           .c        = {c.data(), nullptr, static_cast<std::int64_t>(c.size())},
                                           .c_stride = size};
              context.parallel_for(num_gemm_tiles<T>(size, size), gemm_joined<T>(size, size),
                                   [&](std::int64_t first, std::int64_t end) { gemm_tiles(problem, first, end); });
            });
  LoopbackWorld world(1);
  const Program program(graph, world);
  const auto a = program.memory().span<T>(of[0]), b = program.memory().span<T>(of[1]);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = T(static_cast<float>(i % 3));
    b[i] = T(static_cast<float>(i % 2));
  }
  std::vector<double> seconds;
  for (int run = -1; run < runs; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    executor.run(program);
    if (run >= 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  double expected  = 0;
  const auto width = static_cast<std::size_t>(size);
  for (std::size_t k = 0; k < width; ++k) expected += double{wide(a[k])} * double{wide(b[k * width + 1])};
  if (program.memory().span<float>(of[2])[1] != static_cast<float>(expected))
    throw Error(ErrorKind::run,
                str("sgemm of ", size, ": element 1 is ", program.memory().span<float>(of[2])[1], " (", expected, ")"));
  const auto n = static_cast<double>(size);
  return 2 * n * n * n / quantile(seconds, 0.5) / 1e9;
}

// Numbers with standard deviation 1: products of zeros would be faster than those of a model.
template <class T>
void set_random(const Memory& memory, Buffer buffer, std::int64_t size) {
  std::vector<float> values(static_cast<std::size_t>(size));
  fill_normal(1, "operand", 0, 1, std::span(values), num_cores());
  std::vector<T> rounded(values.size());
  std::transform(values.begin(), values.end(), rounded.begin(),
                 [](float value) { return narrow<T>(static_cast<Wide<T>>(value)); });
  memory.write(buffer, std::span<const T>(rounded));
}

}  // namespace

std::vector<std::int64_t> peak_sizes() { return {512, 768, 1024, 1536, 2048}; }

double sgemm_peak(int threads, const std::vector<std::int64_t>& sizes, int runs, DType type) {
  Executor executor({.threads = threads});
  double best = 0;
  for (const std::int64_t size : sizes) {
    best = std::max(
        best, type == DType::bf16 ? gflops_of<bf16>(executor, size, runs) : gflops_of<float>(executor, size, runs));
  }
  return best;
}

// Times come from the device's clock. The first runs choose an algorithm.
double product_peak(int device, DType type, std::int64_t size, int runs) {
  Graph graph;
  WeightTable weights;
  const std::int64_t bytes = size * size * static_cast<std::int64_t>(size_bytes(type));
  const auto kept          = [&](const char* name) {
    return graph.buffer({.name = name, .size_bytes = bytes, .type = type, .lifetime = Lifetime::persistent});
  };
  const Buffer left = kept("a"), right = kept("b");
  weights.add({.name = "b", .shape = {size, size}, .value = right});
  Tape tape({.graph = &graph, .weights = &weights, .type = type, .seq = size, .records = false});
  const Tensor a = tape.input(left, {size, size}, type, false);
  (void)linear(tape, {.x = a, .weight = tape.weight("b")});
  const std::unique_ptr<World> world = cli::make_world("cuda", 1, {device});
  const Program program(graph, *world);
  dispatch_float(type, [&]<class T>(T) {
    for (const Buffer operand : {left, right}) set_random<T>(program.memory(), operand, size * size);
  });
  Executor executor({.threads = 1});
  std::vector<double> seconds;
  for (int run = -2; run < runs; ++run) {
    Recorder recorder;
    executor.run(program, &recorder);
    if (run >= 0) seconds.push_back(recorder.timeline().makespan_s);
  }
  const auto n = static_cast<double>(size);
  return 2 * n * n * n / quantile(seconds, 0.5) / 1e9;
}

}  // namespace stepgraph::bench
