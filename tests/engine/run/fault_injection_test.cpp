#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <optional>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/run/executor.hpp"
#include "tools/examples/sharded_step.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

// Loopback, except that communications whose first part is a given node fail.
class FaultyWorld final : public sg::World {
 public:
  explicit FaultyWorld(int num_ranks) : inner_(num_ranks) {}
  std::optional<sg::Node> fault;

  [[nodiscard]] int num_ranks() const override { return inner_.num_ranks(); }
  [[nodiscard]] sg::RankSet local_ranks() const override { return inner_.local_ranks(); }
  [[nodiscard]] bool waits(sg::LaneKind kind) const override { return inner_.waits(kind); }
  [[nodiscard]] sg::IssueOrder issue_order() const override { return inner_.issue_order(); }
  void communicate(const sg::Context& context, const sg::Exchange& exchange) override {
    for (const sg::LocalPart& part : exchange.parts) {
      if (fault == part.node) throw sg::Error(sg::ErrorKind::backend, "injected");
    }
    inner_.communicate(context, exchange);
  }
  void abort(std::string_view why) noexcept override { inner_.abort(why); }

 private:
  sg::LoopbackWorld inner_;
};

}  // namespace

TEST_CASE("a fault at any node stops the step cleanly, is named, and the next run works",
          "[engine][executor][errors]") {
  const sg::ShardedStep step = sg::sharded_step({.ranks = 4, .layers = 3, .width = 8, .batch = 2});
  const sg::Graph& original  = step.graph;
  std::optional<sg::Node> fault;
  std::vector<int> runs(original.num_nodes());

  // The same graph, with bodies that count their runs and fail on demand.
  sg::Graph graph(original.num_ranks());
  for (std::uint32_t i = 0; i < original.num_buffers(); ++i) (void)graph.buffer(original.spec(sg::Buffer{i}));
  for (std::uint32_t i = 0; i < original.num_groups(); ++i) (void)graph.group(original.spec(sg::Group{i}));
  for (std::uint32_t i = 0; i < original.num_nodes(); ++i) {
    if (original.has_part({i})) {
      graph.add(original.spec(sg::Node{i}));
      continue;
    }
    graph.add(original.spec(sg::Node{i}), [&, i, body = original.body({i})](const sg::Context& context) {
      if (fault == sg::Node{i}) throw std::runtime_error("injected");
      ++runs[i];
      void* const closure = body.closure();
      body.invoke()(&closure, context);
    });
  }
  REQUIRE(graph == original);

  FaultyWorld world(4);
  sg::Executor executor({.threads = 2});
  const sg::Program program(graph, world);
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    CAPTURE(graph.describe(sg::Node{i}));
    runs.assign(runs.size(), 0);
    fault = world.fault = sg::Node{i};
    std::string error   = "no error";
    try {
      executor.run(program);
    } catch (const sg::Error& e) {
      error = e.what();
    }
    // A communication is one task, named after its first member.
    CHECK_THAT(error, ContainsSubstring(sg::str("'", graph.name({i}), "': injected")));
    if (!graph.has_part({i})) CHECK_THAT(error, ContainsSubstring(graph.describe(sg::Node{i})));
    CHECK(runs[i] == 0);
    for (std::uint32_t k = 0; k < graph.num_nodes(); ++k) {
      if (sg::reaches(graph, {i}, {k})) CHECK(runs[k] == 0);  // no node that depends on it started
    }
    fault = world.fault = std::nullopt;
    runs.assign(runs.size(), 0);
    executor.run(program);
    for (std::uint32_t k = 0; k < graph.num_nodes(); ++k) {
      if (!graph.has_part({k})) CHECK(runs[k] == 1);
    }
  }
}
