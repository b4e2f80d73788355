#include "ops/tape/tensor_parallel.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <memory>

#include "backends/loopback/world.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "ops/layers/cross_entropy.hpp"
#include "ops/layers/embedding.hpp"
#include "ops/layers/linear.hpp"
#include "ops/layers/residual.hpp"
#include "ops/transfers/reduce.hpp"
#include "tests/support/ops/elements.hpp"
#include "tests/support/ops/op_case.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::distance;
using Numbers = std::vector<double>;

namespace {

constexpr std::int64_t tokens = 6, width = 8, hidden = 12, vocab = 10, context = 9;

Numbers numbers(std::uint64_t seed, std::int64_t count) {
  Numbers made(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < made.size(); ++i)
    made[i] = static_cast<double>(sg::testing::mix(seed * 1'000'003 + i) >> 44) / 524'288 - 1;
  return made;
}

// A weight and the dim along which it is split over the ranks; -1: every rank has all of it.
struct Piece {
  std::string name;
  sg::TensorShape shape;
  int cut = -1;

  [[nodiscard]] std::int64_t begin(int index, int size) const {
    return shape[static_cast<std::size_t>(cut)] * index / size;
  }
  [[nodiscard]] sg::TensorShape local(int index, int size) const {
    sg::TensorShape made = shape;
    if (cut >= 0) made[static_cast<std::size_t>(cut)] = begin(index + 1, size) - begin(index, size);
    return made;
  }
  // Calls visit(index in the whole, index in the rank's part) for all elements of the rank.
  template <class Visit>
  void visit(int index, int size, const Visit& visit) const {
    const std::int64_t cols = shape.size() > 1 ? shape[1] : 1, from = cut < 0 ? 0 : begin(index, size);
    const sg::TensorShape mine   = local(index, size);
    const std::int64_t mine_cols = mine.size() > 1 ? mine[1] : 1;
    for (std::int64_t i = 0; i < mine[0]; ++i) {
      for (std::int64_t j = 0; j < mine_cols; ++j)
        visit(static_cast<std::size_t>((i + (cut == 0 ? from : 0)) * cols + j + (cut == 1 ? from : 0)),
              static_cast<std::size_t>(i * mine_cols + j));
    }
  }
};

struct Net {
  std::vector<Piece> weights;
  // Builds from x and tokens; returns the output, or writes the loss and returns x.
  std::function<sg::Tensor(sg::Tape&, const sg::Tensor& x, const sg::Tensor& tokens, sg::Buffer loss)> build;
  bool has_loss = false;
};

struct Result {
  std::vector<Numbers> outputs, input_gradients, losses;  // by rank
  std::vector<Numbers> gradients;                         // by weight: of the whole tensor
};

// The forward and backward of all ranks in one graph.
class Ranks {
 public:
  Ranks(const Net& net, int size, bool apart) : net_(net), size_(size), graph_(size), world_(size), ranks_(size) {
    std::vector<sg::Rank> members;
    for (int r = 0; r < size; ++r) members.push_back(sg::Rank{r});
    if (size > 1) group_ = graph_.group({.name = "tp", .ranks = members});
    for (int r = 0; r < size; ++r) add(r, apart);
    sg::verify(graph_);
    const sg::MemoryPlan plan = sg::plan_memory(graph_);
    sg::verify({graph_, plan});
    program_ = std::make_unique<sg::Program>(sg::RunnableGraph(graph_, plan), world_);
  }

  Result run(const std::vector<std::int32_t>& given) {
    for (int r = 0; r < size_; ++r) {
      One& one = ranks_[static_cast<std::size_t>(r)];
      store(one.x, numbers(1, tokens * width));
      store(one.output_gradient, numbers(2, tokens * width));
      std::copy(given.begin(), given.end(), program_->memory().span<std::int32_t>(one.tokens).begin());
      for (std::size_t w = 0; w < net_.weights.size(); ++w) {
        const Numbers whole = numbers(10 + w, sg::num_elements(net_.weights[w].shape));
        const auto mine     = program_->memory().span<double>(one.weights->entries()[w].value.buffer);
        net_.weights[w].visit(r, size_, [&](std::size_t i, std::size_t local) { mine[local] = whole[i]; });
      }
    }
    sg::Executor executor({.threads = 2});
    executor.run(*program_);
    return results();
  }

 private:
  struct One {
    std::unique_ptr<sg::WeightTable> weights = std::make_unique<sg::WeightTable>();
    sg::Buffer x, tokens, loss, output, output_gradient, input_gradient;
  };

  sg::Buffer kept(int rank, const std::string& name, std::int64_t count, sg::DType type = sg::DType::f64) {
    return graph_.buffer({.name       = name,
                          .rank       = sg::Rank{rank},
                          .size_bytes = count * static_cast<std::int64_t>(sg::size_bytes(type)),
                          .type       = type,
                          .lifetime   = sg::Lifetime::persistent});
  }

  void add(int r, bool apart) {
    One& one = ranks_[static_cast<std::size_t>(r)];
    for (const Piece& piece : net_.weights) {
      const sg::TensorShape shape = piece.local(r, size_);
      one.weights->add({.name     = piece.name,
                        .shape    = shape,
                        .value    = kept(r, piece.name, sg::num_elements(shape)),
                        .gradient = kept(r, piece.name + " gradient", sg::num_elements(shape))});
    }
    for (sg::Buffer* each : {&one.x, &one.output, &one.output_gradient, &one.input_gradient})
      *each = kept(r, "kept", tokens * width);
    one.tokens = kept(r, "tokens", tokens, sg::DType::i32);
    one.loss   = kept(r, "loss", 1);
    sg::Tape tape({.graph   = &graph_,
                   .weights = one.weights.get(),
                   .rank    = sg::Rank{r},
                   .type    = sg::DType::f64,
                   .tp      = {.size = size_, .index = r, .group = group_},
                   .seq     = tokens});
    const sg::Tensor x = tape.input(one.x, {tokens, width}, sg::DType::f64, true);
    const sg::Tensor y = net_.build(tape, x, tape.input(one.tokens, {tokens}, sg::DType::i32, false), one.loss);
    const auto keep    = [&](sg::Buffer to, const sg::Tensor& from) {
      sg::copy(graph_, {.name = "keep", .to = to, .from = from});
    };
    keep(one.output, y);
    if (!net_.has_loss) tape.set_gradient(y, tape.input(one.output_gradient, y.shape, y.type, false));
    if (apart) {
      tape.emit_input_gradients();
      tape.emit_weight_gradients();
    } else {
      tape.emit_gradients();
    }
    if (tape.has_gradient(x)) keep(one.input_gradient, tape.gradient(x));
  }

  void store(sg::Buffer to, const Numbers& from) {
    std::copy(from.begin(), from.end(), program_->memory().span<double>(to).begin());
  }
  [[nodiscard]] Numbers load(sg::Buffer from) const {
    const auto found = program_->memory().span<double>(from);
    return {found.begin(), found.end()};
  }
  [[nodiscard]] Result results() const {
    Result found;
    for (const One& one : ranks_) {
      found.outputs.push_back(load(one.output));
      found.input_gradients.push_back(load(one.input_gradient));
      found.losses.push_back(load(one.loss));
    }
    for (std::size_t w = 0; w < net_.weights.size(); ++w) {
      const Piece& piece = net_.weights[w];
      Numbers whole(static_cast<std::size_t>(sg::num_elements(piece.shape)));
      for (int r = 0; r < size_; ++r) {
        const Numbers mine = load(ranks_[static_cast<std::size_t>(r)].weights->entries()[w].gradient.buffer);
        if (piece.cut < 0 && r > 0) CHECK(mine == whole);  // equal on every rank
        piece.visit(r, size_, [&](std::size_t i, std::size_t local) { whole[i] = mine[local]; });
      }
      found.gradients.push_back(whole);
    }
    return found;
  }

  const Net& net_;
  int size_;
  sg::Graph graph_;
  sg::LoopbackWorld world_;
  std::vector<One> ranks_;
  sg::Group group_;
  std::unique_ptr<sg::Program> program_;
};

void check_same(const Net& net, const std::vector<std::int32_t>& given) {
  const int size   = GENERATE(2, 4);
  const bool apart = GENERATE(false, true);
  CAPTURE(size, apart);
  const Result alone = Ranks(net, 1, false).run(given), cut = Ranks(net, size, apart).run(given);
  for (std::size_t r = 0; r < static_cast<std::size_t>(size); ++r) {
    CAPTURE(r);
    CHECK(distance(cut.outputs[r], alone.outputs[0]) < 1e-12);
    if (net.has_loss) CHECK(distance(cut.losses[r], alone.losses[0]) < 1e-12);
    if (!net.has_loss) CHECK(distance(cut.input_gradients[r], alone.input_gradients[0]) < 1e-12);
    CHECK(cut.outputs[r] == cut.outputs[0]);
    CHECK(cut.losses[r] == cut.losses[0]);
    CHECK(cut.input_gradients[r] == cut.input_gradients[0]);
  }
  for (std::size_t w = 0; w < net.weights.size(); ++w) {
    CAPTURE(net.weights[w].name);
    CHECK(distance(cut.gradients[w], alone.gradients[w]) < 1e-12);
  }
}

// x + (x a + b) c + d: a is split by columns, c by rows.
const Net pair_of_linears{
    .weights = {{"a", {hidden, width}, 0}, {"b", {hidden}, 0}, {"c", {width, hidden}, 1}, {"d", {width}}},
    .build   = [](sg::Tape& tape, const sg::Tensor& x, const sg::Tensor&, sg::Buffer) {
      const sg::Tensor up =
          sg::linear(tape, {.x = sg::tp_copy(tape, x), .weight = tape.weight("a"), .bias = tape.weight("b")});
      const sg::Tensor down = sg::linear(tape, {.x = up, .weight = tape.weight("c")});
      return sg::residual(tape, {.x = x, .branch = sg::tp_sum(tape, down), .bias = tape.weight("d")});
    }};

// From tokens to a loss, both ends split by a vocabulary that 4 does not divide. Positions are split too; there are
// more than a sequence has, so one rank has only unused ones.
Net vocabulary(bool in_place) {
  return {.weights = {{"wte", {vocab, width}, 0}, {"wpe", {context, width}, 0}, {"head", {vocab, width}, 0}},
          .build =
              [in_place](sg::Tape& tape, const sg::Tensor&, const sg::Tensor& given, sg::Buffer loss) {
                const std::int64_t begin = vocab * tape.tp().index / tape.tp().size;
                const sg::Tensor rows =
                    sg::embedding(tape, {.tokens = given, .weight = tape.weight("wte"), .vocab_begin = begin});
                const sg::Tensor x = sg::tp_sum(
                    tape,
                    sg::positional_embedding(tape, {.x              = rows,
                                                    .weight         = tape.weight("wpe"),
                                                    .position_begin = context * tape.tp().index / tape.tp().size}));
                const sg::Tensor logits = sg::linear(tape, {.x = sg::tp_copy(tape, x), .weight = tape.weight("head")});
                sg::cross_entropy(tape, {.logits      = logits,
                                         .targets     = given,
                                         .loss        = loss,
                                         .scale       = 0.25,
                                         .vocab_begin = begin,
                                         .in_place    = in_place});
                return x;
              },
          .has_loss = true};
}

}  // namespace

TEST_CASE("linears split by columns and by rows equal unsplit ones, forward and backward", "[ops][tensor_parallel]") {
  check_same(pair_of_linears, std::vector<std::int32_t>(tokens));
}

TEST_CASE("an embedding and a loss split by vocabulary equal unsplit ones, forward and backward",
          "[ops][tensor_parallel]") {
  check_same(vocabulary(GENERATE(false, true)), {0, 9, 3, 3, 7, 5});
}

TEST_CASE("a token outside the vocabulary is refused by one of the ranks", "[ops][tensor_parallel][refuses]") {
  const int size = GENERATE(2, 4);
  CHECK_THROWS_MATCHES(Ranks(vocabulary(false), size, false).run({0, 9, 10, 3, 7, 5}), sg::Error,
                       MessageMatches(ContainsSubstring("embedding: token at position 2 is 10 (0 to 9)")));
  CHECK_THROWS_MATCHES(Ranks(vocabulary(false), size, false).run({0, 9, 3, 3, 7, -1}), sg::Error,
                       MessageMatches(ContainsSubstring("embedding: token at position 5 is -1 (0 to ")));
}

TEST_CASE("with one rank the collectives add nothing", "[ops][tensor_parallel]") {
  sg::Graph graph;
  sg::WeightTable weights;
  sg::Tape tape({.graph = &graph, .weights = &weights});
  const sg::Tensor x = tape.tensor("x", {2, 2});
  CHECK(sg::tp_copy(tape, x).id == x.id);
  CHECK(sg::tp_sum(tape, x).id == x.id);
  sg::tp_all_reduce(tape, x, "all_reduce");
  CHECK(graph.num_nodes() == 0);
}
