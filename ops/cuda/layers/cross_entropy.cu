#include "ops/cuda/layers/cross_entropy.hpp"

#include "ops/cuda/common/workspace.cuh"
#include "ops/cuda/layers/cross_entropy_rows.cuh"

namespace stepgraph::cuda {
namespace {

template <int n, class N>
__global__ void __launch_bounds__(most_threads) maxima_kernel(const DeviceRows<N> of, double* maxima) {
  Computed<N> most = lowest<Computed<N>>();
  for_row<n>(of.row(), of.cols, [&]<int size>(const Pack<N, size>& pack) {
#pragma unroll
    for (int k = 0; k < size; ++k) most = larger(most, widen(pack.at[k]));
  });
  most = block_most(most);
  if (threadIdx.x == 0) maxima[blockIdx.x] = static_cast<double>(most);
}

template <int n, class N>
__global__ void __launch_bounds__(most_threads)
    sums_kernel(const DeviceRows<N> of, const double* maxima, double* sums) {
  const auto most = static_cast<Computed<N>>(maxima[blockIdx.x]);
  Total<N> sum    = 0;
  for_row<n>(of.row(), of.cols, [&]<int size>(const Pack<N, size>& pack) {
#pragma unroll
    for (int k = 0; k < size; ++k) sum += exponential<N>(widen(pack.at[k]) - most);
  });
  const double all = block_sum(static_cast<double>(sum));
  if (threadIdx.x == 0) put_sums(sums, all, of.target_logit(of.row()));
}

template <int n, class N>
__global__ void __launch_bounds__(most_threads) softmax_kernel(const DeviceRows<N> of, double* maxima, double* sums) {
  Softmax<N> mine;
  for_row<n>(of.row(), of.cols, [&]<int size>(const Pack<N, size>& pack) { mine.add(pack); });
  Finished(mine).put(maxima, sums, threadIdx.x == 0 ? of.target_logit(of.row()) : 0);
}

template <int n, class N>
__global__ void __launch_bounds__(most_threads)
    gradient_kernel(const DeviceRows<N> of, const double* maxima, const double* sums, const LossScale scale, N* out,
                    const N* base) {
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * of.cols;
  const N* const row       = of.row();
  N* const to              = out + begin;
  const N* const was       = base == nullptr ? nullptr : base + begin;
  const Gradient<N> gradient(maxima[blockIdx.x], sums[2 * static_cast<std::int64_t>(blockIdx.x)],
                             of.counts(blockIdx.x) ? at_step(scale) : 0, of.target(blockIdx.x));
  const Row<N, n> parts(row, of.cols);
  parts.for_packs([&](std::int64_t i) { return load_pack<n>(row + parts.before + i * n); },
                  [&](const Pack<N, n>& pack, std::int64_t i) { gradient.put(pack, parts.before + i * n, to, was); });
  const std::int64_t left = parts.left_over();
  if (left >= 0) gradient.put(load_pack<1>(row + left), left, to, was);
}

// --- the loss --------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(loss_threads)
    row_losses_kernel(const double* maxima, const double* sums, const std::int32_t* targets, std::int64_t rows,
                      double* partial) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * loss_threads + threadIdx.x;
  const bool counts    = i < rows && targets[i] != ignored;
  const double loss    = counts ? log(sums[2 * i]) + (maxima[i] - sums[2 * i + 1]) : 0;
  const double all     = block_sum(loss);
  if (threadIdx.x == 0) partial[blockIdx.x] = all;
}

__global__ void __launch_bounds__(loss_threads) loss_kernel(const double* partial, std::int64_t count, double* loss) {
  double mine = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += loss_threads) mine += partial[i];
  const double all = block_sum(mine);
  if (threadIdx.x == 0) *loss = all;
}

}  // namespace

template <class T>
void cross_entropy_maxima(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima) {
  if (of.rows == 0) return;
  maxima_kernel<elements_per_vector<T>>
      <<<blocks_for(of.rows, 1), threads_for(of), 0, stream_of(queue)>>>(rows_of(of), maxima);
  check_launch("cross_entropy_maxima");
}

template <class T>
void cross_entropy_sums(const DeviceQueue& queue, const LogitRows<T>& of, const double* maxima, double* sums) {
  if (of.rows == 0) return;
  sums_kernel<elements_per_vector<T>>
      <<<blocks_for(of.rows, 1), threads_for(of), 0, stream_of(queue)>>>(rows_of(of), maxima, sums);
  check_launch("cross_entropy_sums");
}

template <class T>
void cross_entropy_maxima_and_sums(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima, double* sums) {
  if (of.rows == 0) return;
  softmax_kernel<elements_per_vector<T>>
      <<<blocks_for(of.rows, 1), threads_for(of), 0, stream_of(queue)>>>(rows_of(of), maxima, sums);
  check_launch("cross_entropy");
}

template <class T>
void cross_entropy_gradient(const DeviceQueue& queue, const LogitRows<T>& of, const double* maxima, const double* sums,
                            const LossScale& scale, const Into<T>& into) {
  if (of.rows == 0) return;
  // Vectors need rows with the same offset modulo 16 bytes; otherwise elements are processed one by one.
  const auto place = [](const T* at) { return reinterpret_cast<std::uintptr_t>(at) % vector_bytes; };
  const bool together =
      place(into.out) == place(of.logits) && (into.base == nullptr || place(into.base) == place(of.logits));
  const auto kernel = together ? &gradient_kernel<elements_per_vector<T>, Native<T>> : &gradient_kernel<1, Native<T>>;
  kernel<<<blocks_for(of.rows, 1), threads_for(of), 0, stream_of(queue)>>>(rows_of(of), maxima, sums, scale,
                                                                           native(into.out), native(into.base));
  check_launch("cross_entropy_gradient");
}

void cross_entropy_total(const DeviceQueue& queue, const double* maxima, const double* sums,
                         const std::int32_t* targets, std::int64_t rows, double* loss) {
  const unsigned blocks = blocks_for(rows, loss_threads);
  auto* const partial   = Workspace(queue, "cross_entropy").take<double>(blocks);
  if (blocks > 0)
    row_losses_kernel<<<blocks, loss_threads, 0, stream_of(queue)>>>(maxima, sums, targets, rows, partial);
  check_launch("cross_entropy's losses");
  loss_kernel<<<1, loss_threads, 0, stream_of(queue)>>>(partial, blocks, loss);
  check_launch("cross_entropy's loss");
}

#define STEPGRAPH_CROSS_ENTROPY(T)                                                                            \
  template void cross_entropy_maxima(const DeviceQueue&, const LogitRows<T>&, double*);                       \
  template void cross_entropy_sums(const DeviceQueue&, const LogitRows<T>&, const double*, double*);          \
  template void cross_entropy_maxima_and_sums(const DeviceQueue&, const LogitRows<T>&, double*, double*);     \
  template void cross_entropy_gradient(const DeviceQueue&, const LogitRows<T>&, const double*, const double*, \
                                       const LossScale&, const Into<T>&)
STEPGRAPH_CROSS_ENTROPY(float);
STEPGRAPH_CROSS_ENTROPY(double);
STEPGRAPH_CROSS_ENTROPY(bf16);
STEPGRAPH_CROSS_ENTROPY(f16);
#undef STEPGRAPH_CROSS_ENTROPY

}  // namespace stepgraph::cuda
