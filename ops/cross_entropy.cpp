#include "ops/cross_entropy.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/op_checks.hpp"
#include "ops/streams.hpp"
#include "ops/tensor_parallel.hpp"

namespace stepgraph {
namespace {

// What a row is summed up as, two numbers side by side: its sum of exp(logit - maximum), and its target's logit, 0
// where another rank has it, so that ranks add up.
template <class Number>
struct RowSums {
  Number& exps;
  Number& target;
  RowSums(std::span<Number> sums, std::int64_t i)
      : exps(sums[static_cast<std::size_t>(2 * i)]), target(sums[static_cast<std::size_t>(2 * i + 1)]) {}
};

template <class T>
struct Logits {
  const T* data;
  std::int64_t cols;
  [[nodiscard]] const T* row(std::int64_t i) const { return data + i * cols; }

  [[nodiscard]] double maximum(std::int64_t i) const {
    T most = -std::numeric_limits<T>::infinity();
    for (std::int64_t j = 0; j < cols; ++j) most = std::max(most, row(i)[j]);
    return static_cast<double>(most);
  }
  void sum(std::int64_t i, double maximum, std::int64_t target, RowSums<double> into) const {
    double exps = 0;
    for (std::int64_t j = 0; j < cols; ++j) exps += static_cast<double>(std::exp(row(i)[j] - static_cast<T>(maximum)));
    into.exps   = exps;
    into.target = target < 0 ? 0 : static_cast<double>(row(i)[target]);
  }
};

// Row by row, on idle threads too.
template <class Work>
void for_rows(const Context& context, std::int64_t rows, const Work& work) {
  constexpr std::int64_t block = 16;
  context.parallel_for((rows + block - 1) / block, [&](std::int64_t tile) {
    for (std::int64_t i = tile * block; i < std::min(rows, (tile + 1) * block); ++i) work(i);
  });
}

// The sum of -log softmax at the target, over all rows, from the first to the last.
double total(std::span<const double> maxima, std::span<const double> sums) {
  double loss = 0;
  for (std::size_t i = 0; i < maxima.size(); ++i) {
    const RowSums row(sums, static_cast<std::int64_t>(i));
    loss += std::log(row.exps) + (maxima[i] - row.target);
  }
  return loss;
}

class Adder {
 public:
  Adder(Tape& tape, const CrossEntropy& spec)
      : tape_(tape), spec_(spec), rows_(spec.logits.rows()), cols_(spec.logits.cols()) {
    check_tensor(tape, "cross_entropy", "logits", spec.logits);
    check_indices(tape, "cross_entropy", "targets", spec.targets, rows_);
    shard_ = vocab_shard(tape, "cross_entropy", spec.vocab_begin, cols_);
    if (num_bytes(tape.graph(), spec.loss) != 8 || tape.graph().spec(spec.loss.buffer).type != DType::f64) {
      throw Error(ErrorKind::config, str("cross_entropy: the loss goes to ", num_bytes(tape.graph(), spec.loss),
                                         " bytes of ", tape.graph().spec(spec.loss.buffer).type, " (one f64)"));
    }
    maxima_ = tape.tensor("maxima", {rows_}, DType::f64);
    sums_   = tape.tensor("sums", {rows_, 2}, DType::f64);
  }

  void add_forward() {
    const auto body = [rows = rows_, cols = cols_, shard = shard_]<class T>(const Context& context, T) {
      const Logits<T> logits{context.read<T>(0).data(), cols};
      const auto targets = context.read<std::int32_t>(1);
      const auto maxima  = context.write<double>(0);
      const auto sums    = context.write<double>(1);
      for_rows(context, rows, [&](std::int64_t i) {
        const auto at = static_cast<std::size_t>(i);
        maxima[at]    = logits.maximum(i);
        logits.sum(i, maxima[at], shard.find("cross_entropy: target", targets[at], i), {sums, i});
      });
      context.write<double>(2)[0] = total(maxima, sums);
    };
    tape_.add(node("cross_entropy", {spec_.logits, spec_.targets}, {maxima_, sums_, spec_.loss}, 3), body);
  }

  // Each rank has some columns: what they share is the maximum of every row, then its sums.
  void add_tensor_parallel_forward() {
    tape_.add(node("cross_entropy_maxima", spec_.logits, maxima_, 1), [rows = rows_, cols = cols_]<class T>(
                                                                          const Context& context, T) {
      const Logits<T> logits{context.read<T>().data(), cols};
      const auto maxima = context.write<double>();
      for_rows(context, rows, [&](std::int64_t i) { maxima[static_cast<std::size_t>(i)] = logits.maximum(i); });
    });
    tp_all_reduce(tape_, maxima_, "all_reduce maxima", Reduction::max);
    tape_.add(node("cross_entropy_sums", {spec_.logits, spec_.targets, maxima_}, sums_, 2),
              [rows = rows_, cols = cols_, shard = shard_]<class T>(const Context& context, T) {
                const Logits<T> logits{context.read<T>(0).data(), cols};
                const auto targets = context.read<std::int32_t>(1);
                const auto maxima  = context.read<double>(2);
                const auto sums    = context.write<double>();
                for_rows(context, rows, [&](std::int64_t i) {
                  const auto at = static_cast<std::size_t>(i);
                  logits.sum(i, maxima[at], shard.find("cross_entropy: target", targets[at], i), {sums, i});
                });
              });
    tp_all_reduce(tape_, sums_, "all_reduce sums");
    tape_.add({.op = "cross_entropy", .reads = {maxima_, sums_}, .writes = spec_.loss}, [](const Context& context) {
      context.write<double>()[0] = total(context.read<double>(0), context.read<double>(1));
    });
  }

  void add_backward() {
    const OpNode of_logits = node("cross_entropy_gradient", {spec_.logits, spec_.targets, maxima_, sums_}, {}, 4);
    tape_.on_backward({.input_gradients = [of_logits, logits = spec_.logits, scale = spec_.scale, rows = rows_,
                                           cols = cols_, shard = shard_](Tape& back) {
      back.add_gradient(logits, of_logits, [=]<class T>(const Context& context, Into<T> into) {
        const Logits<T> given{context.read<T>(0).data(), cols};
        const auto targets = context.read<std::int32_t>(1);
        const auto maxima  = context.read<double>(2);
        const auto sums    = context.read<double>(3);
        for_rows(context, rows, [&](std::int64_t i) {
          const auto at             = static_cast<std::size_t>(i);
          const T maximum           = static_cast<T>(maxima[at]);
          const T factor            = static_cast<T>(scale / RowSums(sums, i).exps);
          const std::int64_t target = shard.find("cross_entropy: target", targets[at], i);
          for (std::int64_t j = 0; j < cols; ++j) {
            const T soft = factor * std::exp(given.row(i)[j] - maximum);
            into.put(i * cols + j, j == target ? soft - static_cast<T>(scale) : soft);
          }
        });
      });
    }});
  }

 private:
  [[nodiscard]] OpNode node(std::string op, const AccessList& reads, const AccessList& writes, double flops) const {
    return {.op       = std::move(op),
            .reads    = reads,
            .writes   = writes,
            .cost     = {.flops       = flops * static_cast<double>(spec_.logits.num_elements()),
                         .bytes_moved = static_cast<double>(spec_.logits.num_bytes())},
            .parallel = true};
  }

  Tape& tape_;
  const CrossEntropy& spec_;
  std::int64_t rows_, cols_;
  VocabShard shard_;
  Tensor maxima_, sums_;
};

}  // namespace

void cross_entropy(Tape& tape, const CrossEntropy& spec) {
  Adder adder(tape, spec);
  if (tape.tp().size > 1) {
    adder.add_tensor_parallel_forward();
  } else {
    adder.add_forward();
  }
  adder.add_backward();
}

}  // namespace stepgraph
