// Squares of offloaded gradients are summed while the gradient is on the device.
#include "graphs/step/offload/pass/early_norm.hpp"

#include <catch2/catch_test_macros.hpp>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "ops/transfers/clear.hpp"
#include "ops/updates/optimizer.hpp"

namespace sg = stepgraph;

namespace {

// Two gradients that are written twice each, then a sum of the squares of both.
struct Norms {
  sg::Graph graph;
  sg::Buffer a, b, sum;
  Norms() {
    const auto buffer = [&](const char* name, std::int64_t size, sg::DType type) {
      return graph.buffer({.name = name, .size_bytes = size, .type = type});
    };
    a   = buffer("a", 64, sg::DType::f32);
    b   = buffer("b", 64, sg::DType::f32);
    sum = buffer("sum", 8 * sg::exact_sum_size(sg::DType::f32), sg::DType::i64);
    for (const int microbatch : {0, 1}) {
      write("write b", b, microbatch);
      write("write a", a, microbatch);
    }
    sg::clear(graph, {.name = "clear", .values = sum});
    sg::square_sum(graph, {.name = "squares of a", .values = a, .sum = sum});
    sg::square_sum(graph, {.name = "squares of b", .values = b, .sum = sum});
    graph.add({.name = "clip", .lane = lane(), .reads = {sum}});
  }
  static sg::Lane lane() { return {sg::Rank{0}, sg::LaneKind::compute}; }
  void write(const std::string& name, sg::Buffer to, int microbatch) {
    graph.add({.name        = sg::str(name, " ", microbatch),
               .lane        = lane(),
               .accumulates = {to},
               .labels      = {.microbatch = microbatch, .phase = "backward"}});
  }
  [[nodiscard]] std::vector<std::string> names(const sg::offload::NodeOrder& order) const {
    std::vector<std::string> found;
    for (const std::uint32_t node : order.nodes) found.emplace_back(graph.name(sg::Node{node}));
    return found;
  }
  [[nodiscard]] sg::offload::NodeOrder order_with(const std::vector<sg::Buffer>& offloaded) const {
    std::vector<bool> is_offloaded(graph.num_buffers(), false);
    for (const sg::Buffer buffer : offloaded) is_offloaded[buffer.id] = true;
    return sg::offload::with_early_norms(graph, is_offloaded);
  }
};

}  // namespace

TEST_CASE("squares of an offloaded gradient follow its last write, and the sum is cleared first", "[graphs][offload]") {
  const Norms norms;
  const auto both = norms.order_with({norms.a, norms.b});
  CHECK(norms.names(both) == std::vector<std::string>{"clear", "write b 0", "write a 0", "write b 1", "squares of b",
                                                      "write a 1", "squares of a", "clip"});
  // They belong to the use of the last write.
  CHECK(both.like == std::vector<std::uint32_t>{0, 1, 2, 3, 4, 3, 2, 7});
}

TEST_CASE("squares of other gradients stay where they are", "[graphs][offload]") {
  const Norms norms;
  CHECK(norms.names(norms.order_with({norms.b})) == std::vector<std::string>{"clear", "write b 0", "write a 0",
                                                                             "write b 1", "squares of b", "write a 1",
                                                                             "squares of a", "clip"});
  const auto none = norms.order_with({});
  CHECK(none.nodes == none.like);
  CHECK(norms.names(none).front() == "write b 0");
}

TEST_CASE("a sum that is not cleared by a node of its own is not moved", "[graphs][offload]") {
  sg::Graph graph;
  const sg::Buffer gradient = graph.buffer({.name = "gradient", .size_bytes = 64, .type = sg::DType::f32});
  const sg::Buffer sum =
      graph.buffer({.name = "sum", .size_bytes = 8 * sg::exact_sum_size(sg::DType::f32), .type = sg::DType::i64});
  graph.add({.name = "write", .lane = Norms::lane(), .writes = {gradient}});
  graph.add({.name = "begin", .lane = Norms::lane(), .writes = {sum, gradient}});
  graph.add({.name = "other", .lane = Norms::lane(), .reads = {gradient}});
  sg::square_sum(graph, {.name = "squares", .values = gradient, .sum = sum});
  const auto order = sg::offload::with_early_norms(graph, {true, false});
  CHECK(order.nodes == std::vector<std::uint32_t>{0, 1, 2, 3});
}
