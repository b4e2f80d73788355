#include "ops/tape/tape.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "ops/layers/linear.hpp"
#include "tests/support/ops/op_case.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

struct Bench {
  sg::Graph graph;
  sg::WeightTable weights;
  sg::Tape tape;
  explicit Bench(sg::TapeSpec spec = {}) : tape(with(spec)) {}

  sg::TapeSpec with(sg::TapeSpec spec) {
    spec.graph   = &graph;
    spec.weights = &weights;
    weights.add({.name     = "w",
                 .shape    = {3, 3},
                 .value    = graph.buffer({.name = "w", .size_bytes = 36, .type = sg::DType::f32}),
                 .gradient = graph.buffer({.name = "dw", .size_bytes = 36, .type = sg::DType::f32})});
    return spec;
  }
  sg::Tensor tensor(const char* name = "x") { return tape.tensor(name, {2, 3}); }
  sg::Tensor with_gradient(const char* name = "y") {
    const sg::Tensor made = tensor(name);
    tape.set_gradient(made, tensor("gradient"));
    return made;
  }
  // An op that only adds a gradient to x once y has one.
  sg::Tensor use(const sg::Tensor& x) {
    const sg::Tensor y = tensor("y");
    tape.on_backward({.outputs = {y}, .input_gradients = [x, y](sg::Tape& back) { add(back, x, y); }});
    return y;
  }
  static void add(sg::Tape& tape, const sg::Tensor& to, const sg::Tensor& from) {
    tape.add_gradient(to, {.op = "use_gradient", .reads = tape.gradient(from)},
                      []<class T>(const sg::Context&, sg::Into<T>) {});
  }
  [[nodiscard]] sg::Node last() const { return sg::Node{graph.num_nodes() - 1}; }
  [[nodiscard]] std::vector<std::string> ops() const {
    std::vector<std::string> found;
    for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) found.emplace_back(graph.op(sg::Node{i}));
    return found;
  }
  // The buffers that a node accesses in a mode, in the order of declaration.
  [[nodiscard]] std::vector<sg::Buffer> touches(sg::Node node, sg::AccessMode mode) const {
    std::vector<sg::Buffer> found;
    for (std::size_t i = 0; i < graph.num_accesses(node); ++i) {
      if (graph.access(node, i).mode == mode) found.push_back(graph.access(node, i).buffer);
    }
    return found;
  }
};

using Buffers = std::vector<sg::Buffer>;
using Mode    = sg::AccessMode;

}  // namespace

TEST_CASE("nodes have the tape's rank, lane and labels, and a name with their place in the model", "[ops][tape]") {
  Bench bench({.stage = 2, .microbatch = 1});
  bench.tape.set_layer(7);
  const sg::Tensor x = bench.tensor();
  const sg::Tensor y = sg::linear(bench.tape, {.x = x, .weight = bench.tape.weight("w"), .name = "up"});
  bench.tape.set_layer(8);
  bench.tape.set_gradient(y, bench.tensor("dy"));
  bench.tape.emit_input_gradients();
  bench.tape.emit_weight_gradients();
  REQUIRE(bench.ops() == std::vector<std::string>{"linear", "linear_input_gradient", "linear_weight_gradient"});
  CHECK(bench.graph.name(sg::Node{0}) == "linear layer7 s2 mb1");
  CHECK(bench.graph.spec(y.buffer).name == "up layer7 s2 mb1");
  const char* const phases[] = {"forward", "backward", "weight"};
  for (std::uint32_t i = 0; i < 3; ++i) {
    const sg::Labels expected{.stage = 2, .microbatch = 1, .layer = 7, .phase = phases[i]};
    CHECK(bench.graph.labels(sg::Node{i}) == expected);
    CHECK(bench.graph.lane(sg::Node{i}) == sg::Lane{sg::Rank{0}, sg::LaneKind::compute});
  }
}

TEST_CASE("B emits op by op, I and W one after the other, both from the last op to the first", "[ops][tape]") {
  const auto emitted = [](const auto& emit) {
    Bench bench;
    std::vector<std::string> seen;
    const sg::Tensor x = bench.tensor(), y = bench.tensor(), z = bench.tensor();
    for (const auto& [name, of, to] : {std::tuple{"first", x, y}, std::tuple{"second", y, z}}) {
      bench.tape.on_backward(
          {.outputs = {to},
           .input_gradients =
               [&seen, n = std::string(name), from = of, out = to](sg::Tape& back) {
                 seen.push_back(n + " I");
                 back.pass_gradient(from, out);
               },
           .weight_gradients = [&seen, n = std::string(name)](sg::Tape&) { seen.push_back(n + " W"); }});
    }
    bench.tape.set_gradient(z, bench.tensor());
    emit(bench.tape);
    return seen;
  };
  CHECK(emitted([](sg::Tape& tape) { tape.emit_gradients(); }) ==
        std::vector<std::string>{"second I", "second W", "first I", "first W"});
  CHECK(emitted([](sg::Tape& tape) {
          tape.emit_input_gradients();
          tape.emit_weight_gradients();
        }) == std::vector<std::string>{"second I", "first I", "second W", "first W"});
}

TEST_CASE("a gradient is written by its first user, and accumulated by later ones", "[ops][tape]") {
  Bench bench;
  const sg::Tensor x = bench.tensor();
  const sg::Tensor y = bench.with_gradient();
  CHECK_FALSE(bench.tape.has_gradient(x));
  Bench::add(bench.tape, x, y);
  const sg::Buffer dx = bench.tape.gradient(x).buffer;
  CHECK(bench.touches(bench.last(), Mode::write) == Buffers{dx});
  CHECK(bench.tape.owns_gradient(x));
  Bench::add(bench.tape, x, y);
  CHECK(bench.tape.gradient(x).buffer == dx);
  CHECK(bench.touches(bench.last(), Mode::accumulate) == Buffers{dx});
  CHECK(bench.touches(bench.last(), Mode::write).empty());
}

TEST_CASE("a gradient that was passed on is shared: adding to it writes another tensor", "[ops][tape]") {
  Bench bench;
  const sg::Tensor x = bench.tensor();
  const sg::Tensor y = bench.tensor(), z = bench.with_gradient();
  Bench::add(bench.tape, y, z);
  CHECK(bench.tape.owns_gradient(y));
  bench.tape.pass_gradient(x, y);
  CHECK_FALSE(bench.tape.owns_gradient(x));
  CHECK_FALSE(bench.tape.owns_gradient(y));
  const sg::Buffer dy = bench.tape.gradient(y).buffer, dz = bench.tape.gradient(z).buffer;
  CHECK(bench.tape.gradient(x).buffer == dy);
  CHECK(bench.graph.num_nodes() == 1);

  Bench::add(bench.tape, x, z);
  const sg::Buffer sum = bench.tape.gradient(x).buffer;
  CHECK(sum != dy);
  CHECK(bench.touches(bench.last(), Mode::read) == Buffers{dz, dy});
  CHECK(bench.touches(bench.last(), Mode::write) == Buffers{sum});
  CHECK(bench.tape.gradient(y).buffer == dy);
  CHECK(bench.tape.owns_gradient(x));
}

TEST_CASE("a handed-over gradient belongs to the receiving tensor if the giving one owned it", "[ops][tape]") {
  Bench bench;
  const sg::Tensor x = bench.tensor(), y = bench.tensor(), z = bench.with_gradient();
  Bench::add(bench.tape, y, z);
  bench.tape.hand_over_gradient(x, y);
  CHECK(bench.tape.owns_gradient(x));
  CHECK_FALSE(bench.tape.owns_gradient(y));
  const sg::Tensor other = bench.tensor();
  bench.tape.hand_over_gradient(other, z);  // z's gradient was set from outside
  CHECK_FALSE(bench.tape.owns_gradient(other));
}

TEST_CASE("passing a gradient to a tensor that has one adds them", "[ops][tape]") {
  Bench bench;
  const sg::Tensor x = bench.tensor(), y = bench.with_gradient(), z = bench.with_gradient();
  bench.tape.pass_gradient(x, y);
  bench.tape.pass_gradient(x, z);
  CHECK(bench.ops() == std::vector<std::string>{"add"});
  CHECK(bench.touches(bench.last(), Mode::read) ==
        Buffers{bench.tape.gradient(z).buffer, bench.tape.gradient(y).buffer});
}

TEST_CASE("a deferred gradient is taken by the op that made the tensor, or added when another op requests it",
          "[ops][tape]") {
  Bench bench;
  const sg::Tensor x = bench.tensor("x"), y = bench.with_gradient(), z = bench.with_gradient();
  const auto leave = [&](const sg::Tensor& of, int how) {
    bench.tape.leave_gradient(of, how, [of, y](sg::Tape& later) { Bench::add(later, of, y); });
  };
  SECTION("it is added at once if no op takes it") {
    leave(x, 7);
    CHECK(bench.graph.num_nodes() == 1);
    CHECK_FALSE(bench.tape.take_left_gradient<int>(x));
  }
  SECTION("if an op takes it") {
    bench.tape.set_layer(3);
    bench.tape.on_backward({.outputs = {x}, .takes_gradients = true});
    leave(x, 7);
    CHECK(bench.graph.num_nodes() == 0);
    CHECK(bench.tape.has_gradient(x));
    CHECK(bench.tape.owns_gradient(x));
    SECTION("it is taken once") {
      CHECK_FALSE(bench.tape.take_left_gradient<double>(x));
      CHECK(bench.tape.take_left_gradient<int>(x) == 7);
      CHECK_FALSE(bench.tape.take_left_gradient<int>(x));
      CHECK_FALSE(bench.tape.has_gradient(x));
      CHECK(bench.graph.num_nodes() == 0);
    }
    SECTION("an op of another layer does not take it, and it keeps its layer") {
      bench.tape.set_layer(4);
      CHECK_FALSE(bench.tape.take_left_gradient<int>(x));
      (void)bench.tape.gradient(x);
      CHECK(bench.graph.labels(bench.last()).layer == 3);
      CHECK(bench.tape.labels().layer == 4);
    }
    SECTION("it is added before the gradient is requested, added to, passed on or deferred again") {
      const int other = GENERATE(0, 1, 2, 3);
      if (other == 0) (void)bench.tape.gradient(x);
      if (other == 1) Bench::add(bench.tape, x, z);
      if (other == 2) bench.tape.pass_gradient(x, z);
      if (other == 3) leave(x, 8);
      CHECK_FALSE(bench.tape.take_left_gradient<int>(x));
      REQUIRE(bench.graph.num_nodes() == (other == 0 ? 1 : 2));
      CHECK(bench.touches(sg::Node{0}, Mode::write) == Buffers{bench.tape.gradient(x).buffer});
      if (other > 0) CHECK(bench.touches(sg::Node{1}, Mode::accumulate) == Buffers{bench.tape.gradient(x).buffer});
    }
  }
  SECTION("no gradient is deferred that is not needed") {
    const sg::Tensor given = bench.tape.input(x.buffer, {2, 3}, sg::DType::f32, false);
    bench.tape.on_backward({.outputs = {given}, .takes_gradients = true});
    leave(given, 7);
    CHECK_FALSE(bench.tape.has_gradient(given));
    CHECK(bench.graph.num_nodes() == 0);
  }
}

TEST_CASE("an op that no gradient reaches emits nothing, and neither does an unneeded gradient", "[ops][tape]") {
  Bench bench;
  const sg::Tensor unused = bench.use(bench.tensor());
  const sg::Tensor given  = bench.tape.input(bench.tensor().buffer, {2, 3}, sg::DType::f32, false);
  const sg::Tensor y      = bench.use(given);
  bench.tape.set_gradient(y, bench.tensor());
  bench.tape.emit_gradients();
  CHECK(bench.graph.num_nodes() == 0);
  CHECK_FALSE(bench.tape.has_gradient(unused));
  CHECK_FALSE(bench.tape.has_gradient(given));
}

TEST_CASE("a tape that does not record never emits a backward", "[ops][tape]") {
  Bench bench({.records = false});
  const sg::Tensor y = bench.use(bench.tensor());
  CHECK_FALSE(bench.tape.needs_gradient(y));
  bench.tape.set_gradient(y, bench.tensor());
  bench.tape.emit_gradients();
  CHECK(bench.graph.num_nodes() == 0);
}

TEST_CASE("a weight used twice gets the sum of both gradients", "[ops][tape]") {
  sg::testing::check_gradients(
      {.inputs = {{4, 3}}, .weights = {{"w", {3, 3}}}, .build = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
         const sg::Tensor once = sg::linear(tape, {.x = in[0], .weight = tape.weight("w")});
         return sg::linear(tape, {.x = once, .weight = tape.weight("w")});
       }});
}

TEST_CASE("a tape refuses tensors of another tape, missing gradients and unsupported types", "[ops][tape][refuses]") {
  Bench bench, other;
  const auto refuses = [](const auto& call, const std::string& why) {
    CHECK_THROWS_MATCHES(call(), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  const sg::Tensor x = bench.tensor();
  refuses([&] { (void)bench.tape.gradient(sg::Tensor{}); }, "tape: tensor -1 does not belong to this tape");
  refuses([&] { (void)bench.tape.gradient(x); }, "tape: tensor 0 has no gradient yet");

  // The same tensor id, on a buffer of the same graph.
  sg::Tape twin({.graph = &bench.graph, .weights = &bench.weights});
  (void)twin.tensor("x", {2, 3});
  refuses([&] { (void)twin.has_gradient(x); }, "tape: tensor 0 does not belong to this tape (which has 1 tensors)");
  refuses([&] { (void)sg::linear(twin, {.x = x, .weight = twin.weight("w")}); }, "does not belong to this tape");

  refuses([&] { (void)bench.tape.weight("v"); }, "weight 'v': not declared (declared: w)");
  refuses([&] { bench.weights.add({.name = "w"}); }, "weight 'w': declared twice");
  refuses([&] { sg::Tape({.graph = &bench.graph}); }, "tape: needs a graph and a weight table");
  refuses([&] { sg::Tape({.graph = &bench.graph, .weights = &bench.weights, .type = sg::DType::i32}); },
          "tape: elements of i32 (f32, f64, bf16 or f16)");
}
