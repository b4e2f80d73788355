// A program that uses the installed package. It verifies a graph with a collective and runs it in the loopback world
// and in its own world.
#include <cstdio>
#include <cstring>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/look/trace.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/recorder.hpp"
#include "engine/run/runnable_graph.hpp"
#include "engine/run/world.hpp"
#include "engine/simulate/simulate.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/collectives/algorithms.hpp"
#include "ops/transfers/collectives.hpp"

namespace sg = stepgraph;

namespace {

constexpr int num_ranks    = 3;
constexpr int num_elements = 5;

// All ranks are in this process. Supports only sums of contiguous floats.
class SummingWorld final : public sg::World {
 public:
  [[nodiscard]] int num_ranks() const override { return ::num_ranks; }
  [[nodiscard]] bool waits(sg::LaneKind) const override { return false; }
  [[nodiscard]] sg::IssueOrder issue_order() const override { return sg::IssueOrder::any; }
  void abort(std::string_view) noexcept override {}
  void communicate(const sg::Context&, const sg::Exchange& exchange) override {
    if (exchange.what.op != sg::PartOp::all_reduce)
      throw sg::Error(sg::ErrorKind::backend, "summing world: no such op");
    std::vector<float> total(num_elements), next(num_elements);
    for (const sg::LocalPart& part : exchange.parts) {
      std::memcpy(next.data(), part.in[0].data, sizeof(float) * num_elements);
      for (int i = 0; i < num_elements; ++i) total[i] += next[i];
    }
    for (const sg::LocalPart& part : exchange.parts)
      std::memcpy(part.out[0].data, total.data(), sizeof(float) * num_elements);
    ++num_sums;
  }
  int num_sums = 0;
};

struct Step {
  sg::Graph graph{num_ranks};
  std::vector<sg::Buffer> sums;
};

// Every rank writes its values, all ranks get the sum, and each rank doubles it.
Step build() {
  Step step;
  std::vector<sg::Rank> ranks;
  std::vector<sg::Buffer> values;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.push_back(sg::Rank{rank});
    values.push_back(step.graph.buffer({.name       = "values",
                                        .rank       = sg::Rank{rank},
                                        .size_bytes = sizeof(float) * num_elements,
                                        .type       = sg::DType::f32}));
    step.sums.push_back(step.graph.buffer({.name       = "sums",
                                           .rank       = sg::Rank{rank},
                                           .size_bytes = sizeof(float) * num_elements,
                                           .type       = sg::DType::f32,
                                           .lifetime   = sg::Lifetime::persistent}));
    step.graph.add({.name = "make", .writes = {values.back()}}, [rank](const sg::Context& c) {
      for (int i = 0; i < num_elements; ++i) c.write<float>()[i] = static_cast<float>(10 * rank + i);
    });
  }
  const sg::Group all = step.graph.group({.name = "all", .ranks = ranks});
  sg::all_reduce(step.graph, {.name  = "sum",
                              .group = all,
                              .in    = [&](sg::Rank rank) { return sg::Access(values[sg::index(rank)]); },
                              .out   = [&](sg::Rank rank) { return sg::Access(step.sums[sg::index(rank)]); }});
  for (const sg::Buffer sum : step.sums) {
    step.graph.add({.name = "double", .accumulates = {sum}}, [](const sg::Context& c) {
      for (float& value : c.accumulate<float>()) value *= 2;
    });
  }
  return step;
}

// The number of wrong values after one step in `world`.
int run(const Step& step, sg::World& world) {
  sg::Executor executor({.threads = 2});
  const sg::RunnableGraph runnable(step.graph, world, {.reuse = sg::Reuse::tight});
  sg::verify(runnable);
  const sg::Program program(runnable, world);
  sg::Recorder recorder;
  executor.run(program, &recorder);
  sg::write_trace(runnable, recorder.timeline(), "trace.json");
  int num_wrong = 0;
  for (const sg::Buffer sum : step.sums) {
    for (int i = 0; i < num_elements; ++i) {
      const float expected = static_cast<float>(2 * (10 * (0 + 1 + 2) + num_ranks * i));
      num_wrong += program.memory().span<float>(sum)[i] != expected;
    }
  }
  return num_wrong;
}

}  // namespace

int main() {
  const Step step = build();
  sg::verify(step.graph);
  sg::LoopbackWorld loopback(num_ranks);
  SummingWorld summing;
  const int in_loopback = run(step, loopback), in_summing = run(step, summing);
  std::printf("%d wrong numbers in loopback, %d in a world of our own, which summed %d times\n", in_loopback,
              in_summing, summing.num_sums);
  const sg::Graph ring = sg::expand_collectives(step.graph, {.algorithm = sg::Algorithm::ring});
  sg::Machine machine(num_ranks);
  machine.rate(sg::NodeKind::communicate, {.overhead_s = 1});
  const bool simulated = sg::simulate(ring, machine).makespan_s == 2 * (num_ranks - 1);
  return simulated && in_loopback == 0 && in_summing == 0 && summing.num_sums == 1 ? 0 : 1;
}
