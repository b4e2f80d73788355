#include "tests/support/ops/op_case.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <tuple>

#ifdef STEPGRAPH_WITH_CUDA
#include "backends/cuda/devices.hpp"
#include "backends/cuda/world.hpp"
#endif
#include "backends/loopback/world.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "ops/transfers/reduce.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/ops/elements.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/worlds/exact_workspace_world.hpp"

namespace stepgraph::testing {
namespace {

enum class Emit { nothing, together, apart };
enum class OtherUse { none, adds, passes };  // of every input, before the op's backward

struct NetOptions {
  DType type           = DType::f64;
  Emit emit            = Emit::nothing;
  OtherUse other_use   = OtherUse::none;
  bool owns_gradient   = false;  // no other tensor shares the output's gradient: an op may overwrite it
  int microbatches     = 1;
  int first_microbatch = 0;  // each microbatch has its own numbers
  bool on_device       = false;
  bool exact_workspace = false;  // on a device: bodies get the workspace that their nodes declare, and no more
};

// Seeds of random values.
enum class Of : std::uint64_t { input = 1, weight, output_gradient, other_gradient };

double rounded(DType type, double value) {
  std::byte bytes[8];
  encode(type, value, bytes);
  return decode(type, bytes);
}

std::vector<double> numbers(const OpCase& test, Of of, std::size_t which, int microbatch, std::size_t count,
                            double range = 1) {
  std::vector<double> made(count);
  const std::uint64_t seed = (static_cast<std::uint64_t>(of) * 64 + which) * 8 + static_cast<std::uint64_t>(microbatch);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t bits = mix(seed * 1'000'003 + i) >> 44;  // 20 bits
    made[i]                  = range * (static_cast<double>(bits) - 524'287.5) / 524'288;
    made[i]                  = rounded(of == Of::weight && test.wide_weights ? DType::f32 : test.exact_in, made[i]);
  }
  return made;
}

std::size_t size(const TensorShape& shape) { return static_cast<std::size_t>(num_elements(shape)); }

OpValues values_of(const OpCase& test, int microbatch) {
  OpValues made;
  for (std::size_t i = 0; i < test.inputs.size(); ++i)
    made.inputs.push_back(numbers(test, Of::input, i, microbatch, size(test.inputs[i]), test.range));
  for (std::size_t i = 0; i < test.weights.size(); ++i)
    made.weights.push_back(numbers(test, Of::weight, i, 0, size(test.weights[i].second), test.range));
  return made;
}

void store(const Memory& memory, const BufferSpec& spec, Buffer buffer, const std::vector<double>& from) {
  std::vector<std::byte> bytes(from.size() * size_bytes(spec.type));
  REQUIRE(static_cast<std::int64_t>(bytes.size()) == spec.size_bytes);
  for (std::size_t k = 0; k < from.size(); ++k) encode(spec.type, from[k], bytes.data() + k * size_bytes(spec.type));
  memory.write(buffer, std::span<const std::byte>(bytes));
}

std::vector<double> load(const Memory& memory, const BufferSpec& spec, Buffer buffer) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(spec.size_bytes));
  memory.read(buffer, std::span(bytes));
  std::vector<double> found(bytes.size() / size_bytes(spec.type));
  for (std::size_t k = 0; k < found.size(); ++k) found[k] = decode(spec.type, bytes.data() + k * size_bytes(spec.type));
  return found;
}

// A case as a program. Inputs and outputs are persistent.
class Net {
 public:
  Net(const OpCase& test, const NetOptions& options) : test_(test), options_(options) {
    add_weights();
    if (test_.step) step_ = kept("step", {1}, DType::i64);
    for (int m = 0; m < options_.microbatches; ++m) add_microbatch(options_.first_microbatch + m);
    for (Microbatch& each : microbatches_) {
      if (options_.emit == Emit::together) each.tape->emit_gradients();
      if (options_.emit == Emit::apart) each.tape->emit_input_gradients();
    }
    for (Microbatch& each : microbatches_) {
      if (options_.emit == Emit::apart) each.tape->emit_weight_gradients();
    }
    for (Microbatch& each : microbatches_) keep_gradients(each);
    verify(graph_);
    plan_ = plan_memory(graph_, {.workspaces = {.bodies = options_.on_device, .part = {}}});
    verify({graph_, plan_});
    if (options_.on_device) {  // one for all cases: libraries take a while to start
      static const std::shared_ptr<World> device = device_world();
      static const std::shared_ptr<World> exact  = std::make_shared<ExactWorkspaceWorld>(*device);
      world_                                     = options_.exact_workspace ? exact : device;
    } else {
      world_ = std::make_shared<LoopbackWorld>(1);
    }
    program_ = std::make_unique<Program>(RunnableGraph(graph_, plan_), *world_);
    for (int m = 0; m < options_.microbatches; ++m) values.push_back(values_of(test_, options_.first_microbatch + m));
  }

  std::vector<OpValues> values;  // by microbatch; the weights are those of the first

  void run(Executor& executor) {
    fill_with_nan();
    for (std::size_t m = 0; m < microbatches_.size(); ++m) {
      for (std::size_t i = 0; i < test_.inputs.size(); ++i)
        store(microbatches_[m].inputs[i].buffer, values[m].inputs[i]);
      for (const auto& [buffer, given] : microbatches_[m].given) store(buffer, given);
      if (!test_.tokens.empty()) {
        program_->memory().write(microbatches_[m].inputs.back().buffer, std::span(test_.tokens));
      }
    }
    if (test_.step) program_->memory().set_first(step_, *test_.step);
    for (std::size_t i = 0; i < test_.weights.size(); ++i)
      store(weights_.entries()[i].value.buffer, values[0].weights[i]);
    executor.run(*program_);
  }

  [[nodiscard]] std::vector<double> output(std::size_t microbatch = 0) const {
    return load(microbatches_[microbatch].output);
  }
  [[nodiscard]] OpValues gradients(std::size_t microbatch = 0) const {
    OpValues found;
    for (const Buffer buffer : microbatches_[microbatch].gradients) found.inputs.push_back(load(buffer));
    for (const WeightTable::Entry& entry : weights_.entries()) found.weights.push_back(load(entry.gradient.buffer));
    return found;
  }

 private:
  struct Microbatch {
    std::unique_ptr<Tape> tape                                = {};
    std::vector<Tensor> inputs                                = {};  // tokens last
    std::vector<std::pair<Buffer, std::vector<double>>> given = {};  // gradients of outputs
    Buffer output                                             = {};
    std::vector<Buffer> gradients                             = {};
  };

  Buffer kept(const std::string& name, const TensorShape& shape, DType type) {
    const auto bytes = num_elements(shape) * static_cast<std::int64_t>(size_bytes(type));
    return graph_.buffer({.name = name, .size_bytes = bytes, .type = type, .lifetime = Lifetime::persistent});
  }

  void add_weights() {
    for (const auto& [name, shape] : test_.weights) {
      weights_.add({.name     = name,
                    .shape    = shape,
                    .value    = kept(name, shape, test_.wide_weights ? wide_type(options_.type) : options_.type),
                    .gradient = kept(name + " gradient", shape, wide_type(options_.type))});
    }
  }

  void add_microbatch(int m) {
    Microbatch made;
    made.tape  = std::make_unique<Tape>(TapeSpec{.graph      = &graph_,
                                                 .weights    = &weights_,
                                                 .type       = options_.type,
                                                 .sequences  = test_.sequences,
                                                 .seq        = test_.seq,
                                                 .microbatch = m,
                                                 .random     = {.step = step_, .seed = 5, .first_sequence = 3 + m},
                                                 .records    = options_.emit != Emit::nothing});
    Tape& tape = *made.tape;
    for (const TensorShape& shape : test_.inputs)
      made.inputs.push_back(tape.input(kept("input", shape, options_.type), shape, options_.type, true));
    if (!test_.tokens.empty()) {
      const TensorShape shape{static_cast<std::int64_t>(test_.tokens.size())};
      made.inputs.push_back(tape.input(kept("tokens", shape, DType::i32), shape, DType::i32, false));
    }
    const Tensor y = test_.build(tape, made.inputs);
    made.output    = kept("output", y.shape, y.type);
    if (y.buffer == Buffer{}) FAIL("the case returns no output");
    copy(graph_, {.name = "keep output", .to = made.output, .from = y});
    if (tape.records()) {
      if (!test_.loss_scale) {
        const Tensor z = options_.owns_gradient ? twin(tape, y) : y;
        give_gradient(made, z, numbers(test_, Of::output_gradient, 0, m, size(z.shape)));
      }
      for (std::size_t i = 0; i < test_.inputs.size(); ++i) use_again(made, i, m);
    }
    microbatches_.push_back(std::move(made));
  }

  void give_gradient(Microbatch& to, const Tensor& of, std::vector<double> gradient) {
    const Buffer buffer = kept("gradient of output", of.shape, of.type);
    to.tape->set_gradient(of, to.tape->input(buffer, of.shape, of.type, false));
    to.given.emplace_back(buffer, std::move(gradient));
  }

  void use_again(Microbatch& to, std::size_t i, int m) {
    if (options_.other_use == OtherUse::none) return;
    const Tensor x = to.inputs[i];
    Tensor z;
    if (options_.other_use == OtherUse::adds) {
      z = twin(*to.tape, x);
    } else {
      z = to.tape->same_bytes(x);
      to.tape->on_backward({.outputs = {z}, .input_gradients = [x, z](Tape& back) { back.pass_gradient(x, z); }});
    }
    give_gradient(to, z, numbers(test_, Of::other_gradient, i, m, size(x.shape)));
  }

  // An op that copies its input and whose gradient is a separate tensor.
  static Tensor twin(Tape& tape, const Tensor& x) {
    const Tensor y = tape.tensor("twin", x.shape, x.type);
    tape.add({.op = "twin", .reads = x, .writes = y}, [](const Context& context, auto zero) {
      using T         = decltype(zero);
      const auto from = context.read<T>();
      std::copy(from.begin(), from.end(), context.write<T>().begin());
    });
    tape.on_backward({.outputs = {y}, .input_gradients = [x, y](Tape& back) {
                        back.add_gradient(x, {.op = "twin_gradient", .reads = back.gradient(y)},
                                          []<class T>(const Context& context, Into<T> dx) {
                                            const auto dy = context.read<T>();
                                            for (std::int64_t k = 0; k < dx.size; ++k)
                                              dx.put(k, dy[static_cast<std::size_t>(k)]);
                                          });
                      }});
    return y;
  }

  void keep_gradients(Microbatch& of) {
    if (options_.emit == Emit::nothing) return;
    for (std::size_t i = 0; i < test_.inputs.size(); ++i) {
      if (!of.tape->has_gradient(of.inputs[i])) FAIL("input " << i << " got no gradient");
      const Tensor gradient = of.tape->gradient(of.inputs[i]);
      of.gradients.push_back(kept("input gradient", gradient.shape, gradient.type));
      copy(graph_, {.name = "keep gradient", .to = of.gradients.back(), .from = gradient});
    }
  }

  void fill_with_nan() {
    if (options_.on_device) return program_->memory().poison();
    const std::span<std::byte> arena = program_->memory().arena(Rank{0});
    if (!arena.empty()) std::memset(arena.data(), 0xFF, arena.size());
  }
  void store(Buffer buffer, const std::vector<double>& from) {
    testing::store(program_->memory(), graph_.spec(buffer), buffer, from);
  }
  [[nodiscard]] std::vector<double> load(Buffer buffer) const {
    return testing::load(program_->memory(), graph_.spec(buffer), buffer);
  }

  const OpCase& test_;
  NetOptions options_;
  Graph graph_;
  WeightTable weights_;
  Buffer step_ = {};
  std::vector<Microbatch> microbatches_;
  MemoryPlan plan_;
  std::shared_ptr<World> world_;
  std::unique_ptr<Program> program_;
};

double norm(const std::vector<double>& of) {
  double squares = 0;
  for (const double each : of) squares += each * each;
  return std::sqrt(squares);
}

double norm(const OpValues& of) {
  double squares = 0;
  for (const Values* each : {&of.inputs, &of.weights}) {
    for (const auto& tensor : *each) squares += norm(tensor) * norm(tensor);
  }
  return std::sqrt(squares);
}

std::vector<double> plus(std::vector<double> a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

void check_close(const OpCase& test, const OpValues& found, const OpValues& expected, double tolerance) {
  const double small = 1e-3 * norm(expected);  // for tensors whose gradient is zero except for rounding
  REQUIRE(found.inputs.size() == expected.inputs.size());
  for (std::size_t i = 0; i < expected.inputs.size(); ++i) {
    INFO("gradient of input " << i);
    CHECK(distance(found.inputs[i], expected.inputs[i], small) < tolerance);
  }
  for (std::size_t i = 0; i < expected.weights.size(); ++i) {
    INFO("gradient of weight " << test.weights[i].first);
    CHECK(distance(found.weights[i], expected.weights[i], small) < tolerance);
  }
}

// Compares bits, because NaN != NaN and -0 == 0.
bool same_bits(const OpValues& a, const OpValues& b) {
  const auto same = [](const Values& of, const Values& as) {
    bool equal = of.size() == as.size();
    for (std::size_t i = 0; equal && i < of.size(); ++i)
      equal = of[i].size() == as[i].size() && std::memcmp(of[i].data(), as[i].data(), 8 * of[i].size()) == 0;
    return equal;
  };
  return same(a.inputs, b.inputs) && same(a.weights, b.weights);
}

OpValues finite_differences(const OpCase& test, Executor& executor) {
  Net net(test, {});
  const auto objective = [&] {
    net.run(executor);
    const std::vector<double> y = net.output();
    if (test.loss_scale) return *test.loss_scale * y[0];
    const std::vector<double> weights = numbers(test, Of::output_gradient, 0, 0, y.size());
    double sum                        = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += weights[i] * y[i];
    return sum;
  };
  constexpr double step    = 0x1p-17;
  const auto differentiate = [&](Values& at) {
    Values slopes;
    for (std::vector<double>& tensor : at) {
      slopes.emplace_back();
      for (double& each : tensor) {
        const double here  = each;
        each               = here + step;
        const double above = objective();
        each               = here - step;
        const double below = objective();
        each               = here;
        slopes.back().push_back((above - below) / (2 * step));
      }
    }
    return slopes;
  };
  OpValues found;
  found.inputs  = differentiate(net.values[0].inputs);
  found.weights = differentiate(net.values[0].weights);
  return found;
}

OpValues gradients_of(const OpCase& test, Executor& executor, const NetOptions& options, std::size_t microbatch = 0) {
  Net net(test, options);
  net.run(executor);
  return net.gradients(microbatch);
}

void check_other_uses(const OpCase& test, Executor& executor, const OpValues& alone) {
  OpValues expected = alone;
  for (std::size_t i = 0; i < expected.inputs.size(); ++i)
    expected.inputs[i] = plus(expected.inputs[i], numbers(test, Of::other_gradient, i, 0, expected.inputs[i].size()));
  for (const OtherUse use : {OtherUse::adds, OtherUse::passes}) {
    INFO("another use " << (use == OtherUse::adds ? "has put a gradient there" : "has passed its gradient on"));
    check_close(test, gradients_of(test, executor, {.emit = Emit::together, .other_use = use}), expected, 1e-12);
  }
}

void check_microbatches(const OpCase& test, Executor& executor) {
  const OpValues first  = gradients_of(test, executor, {.emit = Emit::together});
  const OpValues second = gradients_of(test, executor, {.emit = Emit::together, .first_microbatch = 1});
  OpValues sum          = second;
  for (std::size_t i = 0; i < sum.weights.size(); ++i) sum.weights[i] = plus(first.weights[i], second.weights[i]);
  OpValues together;
  for (const Emit emit : {Emit::together, Emit::apart}) {
    INFO("two microbatches, emitted " << (emit == Emit::together ? "as B" : "as I, then W"));
    const OpValues found = gradients_of(test, executor, {.emit = emit, .microbatches = 2}, 1);
    check_close(test, found, sum, 1e-12);
    if (emit == Emit::together) together = found;
    CHECK(same_bits(found, together));
  }
}

}  // namespace

OpValues values(const OpCase& test) { return values_of(test, 0); }

std::vector<double> output_gradient(const OpCase& test, DType type) {
  return numbers(test, Of::output_gradient, 0, 0, evaluate(test, type).size());
}

std::vector<double> evaluate(const OpCase& test, DType type) {
  Executor executor({.threads = test.threads});
  Net net(test, {.type = type});
  net.run(executor);
  return net.output();
}

OpValues gradients(const OpCase& test, DType type) {
  Executor executor({.threads = test.threads});
  return gradients_of(test, executor, {.type = type, .emit = Emit::together});
}

void check_gradients(const OpCase& test) {
  Executor executor({.threads = 2});
  Net net(test, {.emit = Emit::together});
  net.run(executor);
  const OpValues found = net.gradients();
  {
    INFO("against finite differences");
    check_close(test, found, finite_differences(test, executor), 1e-6);
  }
  CHECK(net.output() == evaluate(test));  // the same with and without recording
  CHECK(same_bits(gradients_of(test, executor, {.emit = Emit::apart}), found));
  if (!test.loss_scale)
    CHECK(same_bits(gradients_of(test, executor, {.emit = Emit::together, .owns_gradient = true}), found));
  if (!test.in_place) check_other_uses(test, executor, found);
  check_microbatches(test, executor);
  INFO("f32 against f64");
  CHECK(distance(evaluate(test, DType::f32), net.output()) < test.f32_tolerance);
  check_close(test, gradients_of(test, executor, {.type = DType::f32, .emit = Emit::together}), found,
              test.f32_tolerance);
}

void check_halves(OpCase test) {
  for (const DType type : {DType::bf16, DType::f16}) {
    CAPTURE(type);
    const double tolerance = type == DType::bf16 ? 0x1p-8 : 0x1p-11;
    test.exact_in          = type;
    CHECK(distance(evaluate(test, type), evaluate(test, DType::f32)) < tolerance);
    check_close(test, gradients(test, type), gradients(test, DType::f32), tolerance);
  }
}

double distance(const std::vector<double>& a, const std::vector<double>& b, double at_least) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  std::vector<double> difference = a;
  for (std::size_t i = 0; i < a.size(); ++i) difference[i] -= b[i];
  const double ratio = norm(difference) / std::max(norm(b), std::max(at_least, 1e-300));
  return std::isnan(ratio) ? std::numeric_limits<double>::infinity() : ratio;
}

void need_device() {
#ifdef STEPGRAPH_WITH_CUDA
  try {
    if (cuda_devices().empty()) SKIP("no CUDA device here");
  } catch (const Error& error) {
    SKIP(error.what());
  }
#else
  SKIP("built without CUDA");
#endif
}

std::unique_ptr<World> device_world(int num_ranks, bool capture, const std::vector<int>& devices) {
  need_device();
#ifdef STEPGRAPH_WITH_CUDA
  return std::make_unique<CudaWorld>(num_ranks, CudaWorldOptions{.devices = devices, .capture = capture});
#else
  static_cast<void>(num_ranks);
  static_cast<void>(capture);
  static_cast<void>(devices);
  return nullptr;
#endif
}

void check_declared_workspace(const OpCase& test, const std::vector<DType>& types) {
  Executor executor({.threads = 2});
  for (const DType type : types) {
    CAPTURE(type);
    const auto run = [&](bool exact) {
      Net net(test,
              {.type = type, .emit = Emit::together, .microbatches = 2, .on_device = true, .exact_workspace = exact});
      for (int i = 0; i < 2; ++i) net.run(executor);  // issued, then captured
      return std::tuple(OpValues{{net.output(0), net.output(1)}, {}}, net.gradients(0), net.gradients(1));
    };
    const auto given = run(true), all = run(false);
    CHECK(same_bits(std::get<0>(given), std::get<0>(all)));
    CHECK(same_bits(std::get<1>(given), std::get<1>(all)));
    CHECK(same_bits(std::get<2>(given), std::get<2>(all)));
  }
}

void check_on_device(const OpCase& test, const std::vector<DType>& types) {
  need_device();
  Executor executor({.threads = 2});
  for (const DType type : types) {
    CAPTURE(type);
    const double tolerance = type == DType::f32    ? test.f32_tolerance
                             : type == DType::bf16 ? 0x1p-7
                             : type == DType::f16  ? 0x1p-10
                                                   : 1e-11;
    const int runs         = sanitized() && type != types.front() ? 1 : 3;  // captured from the second run on
    for (const OtherUse other : {OtherUse::none, OtherUse::passes}) {
      if (test.in_place && other != OtherUse::none) continue;
      const auto run = [&](bool on_device, int times) {
        Net net(test, {.type = type, .emit = Emit::together, .other_use = other, .on_device = on_device});
        for (int i = 0; i < times; ++i) net.run(executor);
        return std::pair(net.output(), net.gradients());
      };
      const auto expected = run(false, 1), found = run(true, 1), again = run(true, runs);
      INFO("gradients are " << (other == OtherUse::none ? "the op's own" : "added to others"));
      CHECK(distance(found.first, expected.first) < tolerance);
      check_close(test, found.second, expected.second, tolerance);
      CHECK(same_bits(OpValues{{found.first}, {}}, OpValues{{again.first}, {}}));
      CHECK(same_bits(found.second, again.second));
    }
  }
}

std::vector<std::vector<double>> run_graph(const Graph& graph,
                                           const std::vector<std::pair<Buffer, std::vector<double>>>& set,
                                           const std::vector<Buffer>& read, bool on_device) {
  const std::unique_ptr<World> world =
      on_device ? device_world(graph.num_ranks()) : std::make_unique<LoopbackWorld>(graph.num_ranks());
  const Program program(graph, *world);
  for (const auto& [buffer, values] : set) store(program.memory(), graph.spec(buffer), buffer, values);
  Executor executor({.threads = 2});
  executor.run(program);
  std::vector<std::vector<double>> found;
  for (const Buffer buffer : read) found.push_back(load(program.memory(), graph.spec(buffer), buffer));
  return found;
}

}  // namespace stepgraph::testing
