#include "ops/layers/cross_entropy.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu/activation.hpp"
#include "ops/cpu/elementary.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cpu/lanes.hpp"
#include "ops/cpu/with_best.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/common/workspace_bytes.hpp"
#include "ops/cuda/layers/cross_entropy.hpp"
#include "ops/tape/op_checks.hpp"
#include "ops/tape/streams.hpp"
#include "ops/tape/tensor_parallel.hpp"

namespace stepgraph {
namespace {

// The two sums of a row, stored side by side: the sum of exp(logit - maximum), and the target's logit. The latter is 0
// if the target is in another rank's columns, so that a sum over the ranks gives both.
template <class Number>
struct RowSums {
  Number& exps;
  Number& target;
  RowSums(std::span<Number> sums, std::int64_t i)
      : exps(sums[static_cast<std::size_t>(2 * i)]), target(sums[static_cast<std::size_t>(2 * i + 1)]) {}
  template <class T>
  void set(double sum, const T* row, std::int64_t at) const {
    exps   = sum;
    target = at < 0 ? 0 : static_cast<double>(wide(row[at]));
  }
};

// The maximum of a row. NaNs are ignored.
template <class T>
double maximum(const T* row, std::int64_t cols) {
  Wide<T> most[cpu::num_lanes];
  std::fill(std::begin(most), std::end(most), -std::numeric_limits<Wide<T>>::infinity());
  std::int64_t j = 0;
  for (; j + cpu::num_lanes <= cols; j += cpu::num_lanes) {
    for (int lane = 0; lane < cpu::num_lanes; ++lane) {
      const Wide<T> each = wide(row[j + lane]);
      most[lane]         = each > most[lane] ? each : most[lane];
    }
  }
  for (; j < cols; ++j) most[0] = std::max(most[0], wide(row[j]));
  return static_cast<double>(*std::max_element(std::begin(most), std::end(most)));
}

// exp(row - maximum) for up to `block` elements.
constexpr std::int64_t block = 256;
template <class T>
void exponentials(const T* row, std::int64_t count, Wide<T> maximum, Wide<T>* __restrict exps) {
  cpu::transform(row, count, exps, [maximum](Wide<T> each) { return cpu::exp(each - maximum); });
}

// The sum of exp(row - maximum). If `kept` is not null, it receives the exponentials; it may be the row itself.
template <class T>
double sum_of_exponentials(const T* row, std::int64_t cols, double maximum, Wide<T>* kept = nullptr) {
  double sum = 0;
  Wide<T> exps[block];
  for (std::int64_t begin = 0; begin < cols; begin += block) {
    const std::int64_t count = std::min(block, cols - begin);
    exponentials(row + begin, count, static_cast<Wide<T>>(maximum), exps);
    sum += cpu::lane_sum<double>(count, [&](std::int64_t j) { return static_cast<double>(exps[j]); });
    if (kept != nullptr) std::copy_n(exps, count, kept + begin);
  }
  return sum;
}

// Into (+)= scale * (softmax(row) - onehot(target)), at element `begin`. Target -1: in another rank's columns.
template <class T>
void put_gradient(const T* row, std::int64_t cols, double maximum, double exps_sum, std::int64_t target, double scale,
                  const Into<T>& into, std::int64_t begin) {
  using W        = Wide<T>;
  const W factor = static_cast<W>(scale / exps_sum);
  W exps[block];
  for (std::int64_t first = 0; first < cols; first += block) {
    const std::int64_t count = std::min(block, cols - first);
    exponentials(row + first, count, static_cast<W>(maximum), exps);
    for (std::int64_t j = 0; j < count; ++j) exps[j] *= factor;
    if (target >= first && target < first + count) exps[target - first] -= static_cast<W>(scale);
    cpu::put(into, begin + first, count, [&](std::int64_t j) { return exps[j]; });
  }
}

// The same in place, for a row that already holds its exponentials.
template <class T>
void finish_gradient(T* row, std::int64_t cols, double exps_sum, std::int64_t target, double scale) {
  const T factor = static_cast<T>(scale / exps_sum);
  for (std::int64_t j = 0; j < cols; ++j) row[j] *= factor;
  if (target >= 0) row[target] -= static_cast<T>(scale);
}

// The factor of the gradients: a constant, divided by the number of targets that count and times the step's loss scale,
// if there are such. `read` is the node's read of the loss scale; that of the ignored targets follows.
struct GradientScale {
  double scale;
  bool scaled;
  std::int64_t all = 0;  // 0: not divided
  [[nodiscard]] double at_step(const Context& context, std::size_t read) const {
    double by = scale;
    if (all > 0) {
      const std::int64_t counted = all - context.read<std::int64_t>(read + (scaled ? 1 : 0)).front();
      by                         = counted > 0 ? scale / static_cast<double>(counted) : 0;
    }
    return scaled ? by * context.read<double>(read).front() : by;
  }
  [[nodiscard]] cuda::LossScale on_device(const Context& context, std::size_t read) const {
    cuda::LossScale by{.scale = scale, .of_step = scaled ? context.read<double>(read).data() : nullptr, .all = all};
    if (all > 0) by.ignored = context.read<std::int64_t>(read + (scaled ? 1 : 0)).data();
    return by;
  }
};

// The column of a row's target; -1: in another rank's columns, or the target does not count.
std::int64_t find(const VocabShard& shard, std::int32_t target, std::int64_t row) {
  return target == ignored_target ? -1 : shard.find("cross_entropy: target", target, row);
}

// Row by row, in parallel.
template <class Work>
void for_rows(const Context& context, std::int64_t rows, const Work& work) {
  cpu::for_tiles(context, rows, 16, [&](std::int64_t begin, std::int64_t end) {
    cpu::with_best([&] {
      for (std::int64_t i = begin; i < end; ++i) work(i);
    });
  });
}

// The sum of -log softmax at the target over all rows whose target counts, added in row order.
double total(std::span<const double> maxima, std::span<const double> sums, std::span<const std::int32_t> targets) {
  double loss = 0;
  for (std::size_t i = 0; i < maxima.size(); ++i) {
    if (targets[i] == ignored_target) continue;
    const RowSums row(sums, static_cast<std::int64_t>(i));
    loss += std::log(row.exps) + (maxima[i] - row.target);
  }
  return loss;
}

template <class T>
cuda::LogitRows<T> device_rows(std::int64_t rows, std::int64_t cols, const VocabShard& shard, const T* logits,
                               const std::int32_t* targets) {
  return {.rows        = rows,
          .cols        = cols,
          .logits      = logits,
          .targets     = targets,
          .vocab_begin = shard.begin,
          .has_last    = shard.last};
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
    if (spec.loss_scale) check_number(tape.graph(), "cross_entropy", "loss_scale", *spec.loss_scale, DType::f64);
    if (spec.counted) {
      check_number(tape.graph(), "cross_entropy", "ignored", spec.counted->ignored, DType::i64);
      if (spec.counted->all < 1)
        throw Error(ErrorKind::config, str("cross_entropy: a mean over ", spec.counted->all, " targets (1 or more)"));
    }
    maxima_ = tape.tensor("maxima", {rows_}, DType::f64);
    sums_   = tape.tensor("sums", {rows_, 2}, DType::f64);
  }

  void add_forward() {
    const auto body = [rows = rows_, cols = cols_, shard = shard_]<class T>(const Context& context, T) {
      const T* logits    = context.read<T>(0).data();
      const auto targets = context.read<std::int32_t>(1);
      const auto maxima  = context.write<double>(0);
      const auto sums    = context.write<double>(1);
      if constexpr (cuda::built) {
        if (const DeviceQueue* queue = context.device()) {
          cuda::cross_entropy_maxima_and_sums(*queue, device_rows(rows, cols, shard, logits, targets.data()),
                                              maxima.data(), sums.data());
          return cuda::cross_entropy_total(*queue, maxima.data(), sums.data(), targets.data(), rows,
                                           context.write<double>(2).data());
        }
      }
      for_rows(context, rows, [&](std::int64_t i) {
        const auto at = static_cast<std::size_t>(i);
        const T* row  = logits + i * cols;
        maxima[at]    = maximum(row, cols);
        RowSums(sums, i).set(sum_of_exponentials(row, cols, maxima[at]), row, find(shard, targets[at], i));
      });
      context.write<double>(2)[0] = total(maxima, sums, targets);
    };
    OpNode all          = node("cross_entropy", {spec_.logits, spec_.targets}, {maxima_, sums_, spec_.loss}, 20);
    all.workspace_bytes = cuda::cross_entropy_workspace(rows_);
    tape_.add<AllTypes>(all, body);
  }

  // The same, but the gradient also overwrites the logits.
  void add_forward_and_gradient() {
    OpNode both          = node("cross_entropy", spec_.targets, {maxima_, sums_, spec_.loss}, 22);
    both.accumulates     = spec_.logits;
    both.workspace_bytes = cuda::cross_entropy_workspace(rows_);
    both.cost.bytes_moved *= 2;
    read_scale(both);
    const auto body = [rows = rows_, cols = cols_, shard = shard_, scaling = scaling()]<class T>(const Context& context,
                                                                                                 T) {
      const std::span<T> logits = context.accumulate<T>();
      const auto targets        = context.read<std::int32_t>();
      const auto maxima         = context.write<double>(0);
      const auto sums           = context.write<double>(1);
      if constexpr (cuda::built) {
        if (const DeviceQueue* queue = context.device()) {
          cuda::cross_entropy_all_in_place(*queue, device_rows<T>(rows, cols, shard, logits.data(), targets.data()),
                                           maxima.data(), sums.data(), scaling.on_device(context, 1), logits.data());
          return cuda::cross_entropy_total(*queue, maxima.data(), sums.data(), targets.data(), rows,
                                           context.write<double>(2).data());
        }
      }
      const double scale = scaling.at_step(context, 1);
      for_rows(context, rows, [&](std::int64_t i) {
        const auto at             = static_cast<std::size_t>(i);
        T* row                    = logits.data() + i * cols;
        const std::int64_t target = find(shard, targets[at], i);
        const double by           = targets[at] == ignored_target ? 0 : scale;
        maxima[at]                = maximum(row, cols);
        RowSums of_row(sums, i);
        of_row.set(0, row, target);
        if constexpr (std::is_same_v<T, Wide<T>>) {  // the row holds its exponentials until their sum is known
          of_row.exps = sum_of_exponentials(row, cols, maxima[at], row);
          finish_gradient(row, cols, of_row.exps, target, by);
        } else {  // 2-byte elements would round the exponentials
          of_row.exps = sum_of_exponentials(row, cols, maxima[at]);
          put_gradient(row, cols, maxima[at], of_row.exps, target, by,
                       Into<T>{logits.data(), nullptr, std::ssize(logits)}, i * cols);
        }
      });
      context.write<double>(2)[0] = total(maxima, sums, targets);
    };
    tape_.add<AllTypes>(both, body);
    register_gradient([](Tape&) {});
  }

  // Each rank has some of the columns. The ranks combine the maximum of every row, then its two sums.
  void add_tensor_parallel_forward() {
    tape_.add<AllTypes>(
        node("cross_entropy_maxima", spec_.logits, maxima_, 1),
        [rows = rows_, cols = cols_, shard = shard_]<class T>(const Context& context, T) {
          const T* logits   = context.read<T>().data();
          const auto maxima = context.write<double>();
          if constexpr (cuda::built) {
            if (const DeviceQueue* queue = context.device()) {
              return cuda::cross_entropy_maxima(*queue, device_rows(rows, cols, shard, logits, nullptr), maxima.data());
            }
          }
          for_rows(context, rows,
                   [&](std::int64_t i) { maxima[static_cast<std::size_t>(i)] = maximum(logits + i * cols, cols); });
        });
    tp_all_reduce(tape_, maxima_, "all_reduce maxima", Reduction::max);
    tape_.add<AllTypes>(
        node("cross_entropy_sums", {spec_.logits, spec_.targets, maxima_}, sums_, 20),
        [rows = rows_, cols = cols_, shard = shard_]<class T>(const Context& context, T) {
          const T* logits    = context.read<T>(0).data();
          const auto targets = context.read<std::int32_t>(1);
          const auto maxima  = context.read<double>(2);
          const auto sums    = context.write<double>();
          if constexpr (cuda::built) {
            if (const DeviceQueue* queue = context.device()) {
              return cuda::cross_entropy_sums(*queue, device_rows(rows, cols, shard, logits, targets.data()),
                                              maxima.data(), sums.data());
            }
          }
          for_rows(context, rows, [&](std::int64_t i) {
            const auto at = static_cast<std::size_t>(i);
            const T* row  = logits + i * cols;
            RowSums(sums, i).set(sum_of_exponentials(row, cols, maxima[at]), row, find(shard, targets[at], i));
          });
        });
    tp_all_reduce(tape_, sums_, "all_reduce sums");
    tape_.add({.op              = "cross_entropy",
               .reads           = {maxima_, sums_, spec_.targets},
               .writes          = spec_.loss,
               .device          = true,
               .workspace_bytes = cuda::cross_entropy_workspace(rows_)},
              [rows = rows_](const Context& context) {
                const auto maxima = context.read<double>(0), sums = context.read<double>(1);
                const auto targets = context.read<std::int32_t>(2);
                if constexpr (cuda::built) {
                  if (const DeviceQueue* queue = context.device()) {
                    return cuda::cross_entropy_total(*queue, maxima.data(), sums.data(), targets.data(), rows,
                                                     context.write<double>().data());
                  }
                }
                context.write<double>()[0] = total(maxima, sums, targets);
              });
  }

  void add_backward() {
    OpNode of_logits = node("cross_entropy_gradient", {spec_.targets, maxima_, sums_}, {}, 20);
    of_logits.cost.bytes_moved *= 2;
    read_scale(of_logits);
    // Takes the logits as an argument, because the node either reads them or accumulates into them.
    const auto kernel = [rows = rows_, cols = cols_, shard = shard_, scaling = scaling()]<class T>(
                            const Context& context, const T* logits, const Into<T>& into) {
      const auto targets = context.read<std::int32_t>(0);
      const auto maxima  = context.read<double>(1);
      const auto sums    = context.read<double>(2);
      if constexpr (cuda::built) {
        if (const DeviceQueue* queue = context.device()) {
          return cuda::cross_entropy_gradient(*queue, device_rows(rows, cols, shard, logits, targets.data()),
                                              maxima.data(), sums.data(), scaling.on_device(context, 3), into);
        }
      }
      const double scale = scaling.at_step(context, 3);
      for_rows(context, rows, [&](std::int64_t i) {
        const auto at = static_cast<std::size_t>(i);
        put_gradient(logits + i * cols, cols, maxima[at], RowSums(sums, i).exps, find(shard, targets[at], i),
                     targets[at] == ignored_target ? 0 : scale, into, i * cols);
      });
    };
    if (spec_.in_place) {
      of_logits.accumulates = spec_.logits;
      register_gradient([of_logits, kernel](Tape& back) {
        back.add<AllTypes>(of_logits, [kernel]<class T>(const Context& context, T) {
          const std::span<T> logits = context.accumulate<T>();
          kernel(context, logits.data(), Into<T>{logits.data(), nullptr, std::ssize(logits)});
        });
      });
      return;
    }
    const std::size_t last = of_logits.reads.view().size();
    of_logits.reads.push_back(spec_.logits);
    tape_.on_backward({.input_gradients = [of_logits, kernel, last, logits = spec_.logits](Tape& back) {
      back.add_gradient<AllTypes>(logits, of_logits, [kernel, last]<class T>(const Context& context, Into<T> into) {
        kernel(context, context.read<T>(last).data(), into);
      });
    }});
  }

 private:
  [[nodiscard]] GradientScale scaling() const {
    return {spec_.scale, spec_.loss_scale.has_value(), spec_.counted ? spec_.counted->all : 0};
  }
  // The reads of GradientScale.
  void read_scale(OpNode& node) const {
    if (spec_.loss_scale) node.reads.push_back(*spec_.loss_scale);
    if (spec_.counted) node.reads.push_back(spec_.counted->ignored);
  }

  // Registers the gradient that `make` writes in place of the logits.
  template <class Make>
  void register_gradient(const Make& make) {
    const Tensor gradient = tape_.same_bytes(spec_.logits);
    tape_.on_backward({.input_gradients = [make, gradient, logits = spec_.logits](Tape& back) {
      if (!back.needs_gradient(logits)) return;
      make(back);
      back.replace_gradient(gradient, gradient);
      back.hand_over_gradient(logits, gradient);
    }});
  }

  [[nodiscard]] OpNode node(std::string op, const AccessList& reads, const AccessList& writes, double flops) const {
    return {.op       = std::move(op),
            .reads    = reads,
            .writes   = writes,
            .cost     = {.flops       = flops * static_cast<double>(spec_.logits.num_elements()),
                         .bytes_moved = static_cast<double>(spec_.logits.num_bytes())},
            .parallel = true,
            .device   = true};
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
  if (tape.tp().size == 1 && spec.in_place && tape.records()) return adder.add_forward_and_gradient();
  if (tape.tp().size == 1) {
    adder.add_forward();
  } else {
    adder.add_tensor_parallel_forward();
  }
  adder.add_backward();
}

}  // namespace stepgraph
