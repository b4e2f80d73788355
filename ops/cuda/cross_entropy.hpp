#pragma once
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/tape/tensor.hpp"

// Softmax and its cross entropy on a device, a block of threads for each row. Exponentials are taken in the wide type,
// and for float and double summed in double. A target outside of the vocabulary cannot fail the step here: it makes the
// loss no number.
namespace stepgraph::cuda {

template <class T>
struct LogitRows {
  std::int64_t rows = 0, cols = 0;
  const T* logits             = nullptr;
  const std::int32_t* targets = nullptr;  // of the whole vocabulary
  std::int64_t vocab_begin    = 0;        // of the first column
  bool has_last               = true;     // the vocabulary ends with the last column
};
// What gradients are multiplied with: both.
struct LossScale {
  double scale          = 1;
  const double* of_step = nullptr;  // null: 1
};

// Of each row the maximum; and side by side the sum of exp(logit - maximum) and the logit of the target, 0 where it is
// not among these columns.
template <class T>
void cross_entropy_maxima(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima);
// From maxima that may be those of more columns.
template <class T>
void cross_entropy_sums(const DeviceQueue& queue, const LogitRows<T>& of, const double* maxima, double* sums);
// Both at once: the logits are read once.
template <class T>
void cross_entropy_maxima_and_sums(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima, double* sums);
// Likewise, and in place of the logits, at `gradient`, scale * (softmax - onehot(target)).
template <class T>
void cross_entropy_all_in_place(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima, double* sums,
                                const LossScale& scale, T* gradient);
// That gradient from maxima and sums. `into` may be the logits.
template <class T>
void cross_entropy_gradient(const DeviceQueue& queue, const LogitRows<T>& of, const double* maxima, const double* sums,
                            const LossScale& scale, const Into<T>& into);
// The sum of log(sum) + (maximum - target) over all rows, in an order fixed by their number.
void cross_entropy_total(const DeviceQueue& queue, const double* maxima, const double* sums, std::int64_t rows,
                         double* loss);

}  // namespace stepgraph::cuda
