#include "graphs/collective_algorithms.hpp"

#include <sstream>

#include "backends/loopback/world.hpp"
#include "engine/dot.hpp"
#include "engine/error.hpp"
#include "engine/executor.hpp"
#include "engine/memory_plan.hpp"
#include "engine/simulate.hpp"
#include "engine/verify.hpp"
#include "tests/support/one_collective.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::Algorithm;
using sg::PartOp;
using sg::testing::all_collectives;
using sg::testing::one_collective;
using sg::testing::OneCollective;
using sg::testing::OneCollectiveOptions;

namespace {

constexpr Algorithm expansions[] = {Algorithm::ring, Algorithm::tree, Algorithm::hierarchical};

std::vector<std::byte> run(const OneCollective& made, const sg::Graph& graph, sg::Executor& executor, bool planned) {
  sg::LoopbackWorld world(graph.num_ranks());
  const sg::Program program = planned ? sg::Program(graph, world, sg::plan_memory(graph)) : sg::Program(graph, world);
  made.fill(program.memory());
  executor.run(program);
  return made.contents(program.memory());
}

// Every form of a collective: sound, planned, and with the direct one's result.
void check_equal(const OneCollectiveOptions& options, int ranks_per_node, sg::Executor& executor) {
  CAPTURE(sg::to_string(options.op), options.ranks, options.elements, options.type, sg::to_string(options.reduction),
          options.root, options.in_place, options.uneven, ranks_per_node);
  const auto made = one_collective(options);
  sg::verify(made.graph);
  const auto expected = run(made, made.graph, executor, false);
  for (const Algorithm algorithm : expansions) {
    CAPTURE(algorithm);
    const sg::Graph graph =
        sg::expand_collectives(made.graph, {.algorithm = algorithm, .ranks_per_node = ranks_per_node});
    CHECK_FALSE(graph == made.graph);
    const auto findings = sg::find_flaws(graph, graph.edges());
    if (!findings.empty()) FAIL(findings.front().message);
    CHECK(run(made, graph, executor, false) == expected);
    CHECK(run(made, graph, executor, true) == expected);
  }
}

}  // namespace

TEST_CASE("every form of every collective gives what the direct one gives", "[graphs][algorithms]") {
  sg::Executor executor({.threads = 2});
  for (const PartOp op : all_collectives) {
    for (const int ranks : {2, 3, 4, 6, 8}) {
      for (const bool in_place : {false, true}) {
        const int per_node = ranks % 3 == 0 ? 3 : 2;
        check_equal({.op = op, .ranks = ranks, .elements = 101, .root = ranks - 1, .in_place = in_place}, per_node,
                    executor);
      }
    }
  }
}
