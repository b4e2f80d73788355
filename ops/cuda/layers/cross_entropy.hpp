#pragma once
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/tape/tensor.hpp"

// Softmax cross entropy on a device, one thread block per row. Exponentials are computed in the wide type; for float
// and double they are summed in double. Targets of -1 do not count: no loss, no gradient. Any other target outside the
// vocabulary cannot fail the step here: it makes the loss NaN.
namespace stepgraph::cuda {

template <class T>
struct LogitRows {
  std::int64_t rows = 0, cols = 0;
  const T* logits             = nullptr;
  const std::int32_t* targets = nullptr;  // indices into the whole vocabulary
  std::int64_t vocab_begin    = 0;        // vocabulary index of the first column
  bool has_last               = true;     // the last column is the end of the vocabulary
};
// The factor of the gradients: scale * of_step, divided by all - ignored where `all` is given.
struct LossScale {
  double scale                = 1;
  const double* of_step       = nullptr;  // null: 1
  std::int64_t all            = 0;        // 0: not divided
  const std::int64_t* ignored = nullptr;
};

// The maximum of each row. The functions below also write the sum of exp(logit - maximum) and the target's logit side
// by side; the latter is 0 if the target is not among these columns.
template <class T>
void cross_entropy_maxima(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima);
// Uses given maxima, which may be those of more columns.
template <class T>
void cross_entropy_sums(const DeviceQueue& queue, const LogitRows<T>& of, const double* maxima, double* sums);
// Both in one pass: the logits are read once.
template <class T>
void cross_entropy_maxima_and_sums(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima, double* sums);
// The same, and writes scale * (softmax - onehot(target)) over the logits, at `gradient`.
template <class T>
void cross_entropy_all_in_place(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima, double* sums,
                                const LossScale& scale, T* gradient);
// The gradient from given maxima and sums. `into` may be the logits.
template <class T>
void cross_entropy_gradient(const DeviceQueue& queue, const LogitRows<T>& of, const double* maxima, const double* sums,
                            const LossScale& scale, const Into<T>& into);
// The sum of log(sum) + (maximum - target) over all rows that count, in an order that depends only on their number.
void cross_entropy_total(const DeviceQueue& queue, const double* maxima, const double* sums,
                         const std::int32_t* targets, std::int64_t rows, double* loss);

}  // namespace stepgraph::cuda
