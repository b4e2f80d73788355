#include "ops/cuda/updates/optimizer.hpp"

#include <algorithm>

#include "ops/cuda/common/pack.cuh"
#include "ops/cuda/common/strided.cuh"
#include "ops/shared/optimizer_scalars.hpp"

namespace stepgraph::cuda {
namespace {

template <int n, class N>
__device__ auto load(const Strided<N>& rows, std::int64_t i) {
  using Plain = std::remove_const_t<N>;
  return *reinterpret_cast<const Pack<Plain, n>*>(rows.at(i));
}
template <int n, class N>
__device__ void store(const Strided<N>& rows, std::int64_t i, const Pack<N, n>& pack) {
  *reinterpret_cast<Pack<N, n>*>(rows.at(i)) = pack;
}

// Fused: explicit, as on the CPU. This file is compiled without contraction, so other products are rounded.
__device__ float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

// Stores n weights, rounded to the type that the model computes with.
template <int n, class T, class V>
__device__ void store_value(const Strided<V>& value, std::int64_t i, const Pack<T, n>& weight) {
  if (value.data == nullptr) return;
  Pack<V, n> rounded;
#pragma unroll
  for (int k = 0; k < n; ++k) rounded.at[k] = narrow_to<V>(static_cast<float>(weight.at[k]));
  store(value, i, rounded);
}

// --- updates ---------------------------------------------------------------------------------------------------------
// Each update defines the scalars of a step (Scalars, computed by one thread), the data that a thread loads for n
// elements (Loaded), and how it uses them.

template <class T, class G, class V>
struct AdamW {
  Strided<T> weight, first, second;
  Strided<const G> gradient;
  Strided<V> value;
  AdamWNumbers numbers;

  using Scalars = AdamWFactors<T>;
  [[nodiscard]] __device__ Scalars scalars() const {
    return adamw_factors<T>({.factor       = *numbers.factor,
                             .rate         = *numbers.rate,
                             .beta1        = numbers.beta1,
                             .beta2        = numbers.beta2,
                             .eps          = numbers.eps,
                             .weight_decay = numbers.weight_decay,
                             .step         = *numbers.step});
  }

  template <int n>
  struct Loaded {
    Pack<T, n> weight, first, second;
    Pack<G, n> gradient;
  };
  template <int n>
  __device__ Loaded<n> read(std::int64_t i) const {
    return {load<n>(weight, i), load<n>(first, i), load<n>(second, i), load<n>(gradient, i)};
  }
  template <int n>
  __device__ void update(std::int64_t i, Loaded<n> of, const Scalars& by) const {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const T g       = widen(of.gradient.at[k]) * by.factor;
      const T m       = multiply_add(g - of.first.at[k], by.new1, of.first.at[k]);
      const T v       = multiply_add(by.new2 * g, g, of.second.at[k] * by.beta2);
      of.first.at[k]  = m;
      of.second.at[k] = v;
      of.weight.at[k] =
          multiply_add(-by.size, m / multiply_add(sqrt(v), by.unroot2, by.eps), of.weight.at[k] * by.keep);
    }
    store(weight, i, of.weight);
    store(first, i, of.first);
    store(second, i, of.second);
    store_value(value, i, of.weight);
  }
};

template <class T, class G, class V>
struct Sgd {
  Strided<T> weight, velocity;
  Strided<const G> gradient;
  Strided<V> value;
  SgdNumbers numbers;

  struct Scalars {
    T factor, rate, momentum, decay;
  };
  [[nodiscard]] __device__ Scalars scalars() const {
    return {.factor   = static_cast<T>(*numbers.factor),
            .rate     = static_cast<T>(*numbers.rate),
            .momentum = static_cast<T>(numbers.momentum),
            .decay    = static_cast<T>(numbers.weight_decay)};
  }

  template <int n>
  struct Loaded {
    Pack<T, n> weight, velocity;
    Pack<G, n> gradient;
  };
  template <int n>
  __device__ Loaded<n> read(std::int64_t i) const {
    return {load<n>(weight, i), load<n>(velocity, i), load<n>(gradient, i)};
  }
  template <int n>
  __device__ void update(std::int64_t i, Loaded<n> of, const Scalars& by) const {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const T w = of.weight.at[k], g = widen(of.gradient.at[k]);
      const T v         = multiply_add(by.momentum, of.velocity.at[k], multiply_add(by.factor, g, by.decay * w));
      of.velocity.at[k] = v;
      of.weight.at[k]   = multiply_add(-by.rate, v, w);
    }
    store(weight, i, of.weight);
    store(velocity, i, of.velocity);
    store_value(value, i, of.weight);
  }
};

// --- the kernel ------------------------------------------------------------------------------------------------------

constexpr int threads = 256, blocks_per_multiprocessor = 3;

// Each thread processes n elements at a time and loads those of its next turn meanwhile. The blocks fill the device and
// are persistent. The first block processes the tail.
template <int n, class Update>
__global__ void __launch_bounds__(threads, blocks_per_multiprocessor)
    update_kernel(const Update of, std::int64_t count) {
  const std::int64_t packs = count / n, stride = static_cast<std::int64_t>(gridDim.x) * threads;
  const std::int64_t left = packs * n + threadIdx.x;  // one tail element per thread of the first block
  const bool has_left     = n > 1 && blockIdx.x == 0 && left < count;
  std::int64_t pack       = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;

  // Loaded while the scalars are computed.
  typename Update::template Loaded<n> loaded;
  if (pack < packs) loaded = of.template read<n>(pack * n);
  __shared__ typename Update::Scalars scalars;
  __shared__ bool skipped;
  if (threadIdx.x == 0) {
    const std::int64_t skip = of.numbers.skip == nullptr ? 0 : *of.numbers.skip;
    scalars                 = of.scalars();  // also for a skipped step, to avoid waiting for `skip`
    skipped                 = skip != 0 || isnan(scalars.factor);
  }
  __syncthreads();
  if (skipped) {
    for (; pack < packs; pack += stride) store_value(of.value, pack * n, load<n>(of.weight, pack * n));
    if (has_left) store_value(of.value, left, load<1>(of.weight, left));
    return;
  }
  const typename Update::Scalars by = scalars;
  while (pack < packs) {
    const std::int64_t next = pack + stride;
    typename Update::template Loaded<n> following;
    if (next < packs) following = of.template read<n>(next * n);
    of.template update<n>(pack * n, loaded, by);
    loaded = following;
    pack   = next;
  }
  if (has_left) of.template update<1>(left, of.template read<1>(left), by);
}

template <int n, class Update>
void launch(const DeviceQueue& queue, const Update& update, std::int64_t count, const char* name) {
  const std::int64_t most   = std::int64_t{blocks_per_multiprocessor} * num_multiprocessors();
  const std::int64_t wanted = (count / n + threads - 1) / threads;
  update_kernel<n><<<static_cast<unsigned>(std::clamp<std::int64_t>(wanted, 1, most)), threads, 0, stream_of(queue)>>>(
      update, count);
  check_launch(name);
}

// 16 bytes of weights at a time if all arrays are aligned for it.
template <class Update, class T, class... Other>
void launch_fitting(const DeviceQueue& queue, const Update& update, std::int64_t count, const char* name,
                    const Strided<T>& weight, const Other&... others) {
  if (count <= 0) return;
  constexpr int n = 16 / static_cast<int>(sizeof(T));
  if (packs_fit<n>(weight) && (packs_fit<n>(others) && ...)) {
    launch<n>(queue, update, count, name);
  } else {
    launch<1>(queue, update, count, name);
  }
}

}  // namespace

template <class T, class Gradient, class Value>
void adamw(const DeviceQueue& queue, const cpu::AdamWRows<T, Gradient, Value>& rows, const AdamWNumbers& numbers,
           std::int64_t count) {
  const AdamW<T, Native<Gradient>, Native<Value>> update{strided(rows.weight), strided(rows.first),
                                                         strided(rows.second), strided(rows.gradient),
                                                         strided(rows.value),  numbers};
  launch_fitting(queue, update, count, "adamw", update.weight, update.first, update.second, update.gradient,
                 update.value);
}

template <class T, class Gradient, class Value>
void sgd(const DeviceQueue& queue, const cpu::SgdRows<T, Gradient, Value>& rows, const SgdNumbers& numbers,
         std::int64_t count) {
  const Sgd<T, Native<Gradient>, Native<Value>> update{strided(rows.weight), strided(rows.velocity),
                                                       strided(rows.gradient), strided(rows.value), numbers};
  launch_fitting(queue, update, count, "sgd", update.weight, update.velocity, update.gradient, update.value);
}

#define STEPGRAPH_UPDATES(T, Gradient, Value)                                                             \
  template void adamw(const DeviceQueue&, const cpu::AdamWRows<T, Gradient, Value>&, const AdamWNumbers&, \
                      std::int64_t);                                                                      \
  template void sgd(const DeviceQueue&, const cpu::SgdRows<T, Gradient, Value>&, const SgdNumbers&, std::int64_t)
STEPGRAPH_UPDATES(double, double, bf16);
STEPGRAPH_UPDATES(float, float, bf16);
STEPGRAPH_UPDATES(float, float, f16);
STEPGRAPH_UPDATES(float, bf16, bf16);
STEPGRAPH_UPDATES(float, bf16, f16);
STEPGRAPH_UPDATES(float, f16, bf16);
STEPGRAPH_UPDATES(float, f16, f16);
#undef STEPGRAPH_UPDATES

}  // namespace stepgraph::cuda
