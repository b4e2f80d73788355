#include "ops/cuda/layers/activation.hpp"

#include <numbers>

#include "ops/cuda/common/map.cuh"

namespace stepgraph::cuda {
namespace {

// --- functions of one element ----------------------------------------------------------------------------------------

// 2-byte elements have so few bits that the fast exponential and division are accurate enough.
template <class N, class W>
__device__ W sigmoid(W x) {
  if constexpr (sizeof(N) == 2) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  } else if constexpr (sizeof(N) == 4) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    return 1.0 / (1.0 + exp(-x));
  }
}

template <class W>
struct ValueSlope {
  W value, slope;
};

struct GeluTanh {
  template <class N, class W>
  __device__ static W twice_u(W x) {
    constexpr W a = W(2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi), b = W(0.044715);
    return a * (x + b * x * x * x);
  }
  template <class N, class W>
  __device__ static ValueSlope<W> both(W x) {
    constexpr W a = W(2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi), b = W(3 * 0.044715);
    const W s = sigmoid<N>(twice_u<N>(x));
    return {x * s, s + x * s * (W(1) - s) * (a * (W(1) + b * x * x))};
  }
  template <class N, class W>
  __device__ static W value(W x) {
    return x * sigmoid<N>(twice_u<N>(x));
  }
};

struct GeluExact {
  __device__ static float phi(float x) { return 0.5f * erfcf(x * static_cast<float>(-1 / std::numbers::sqrt2)); }
  __device__ static double phi(double x) { return 0.5 * erfc(x * (-1 / std::numbers::sqrt2)); }
  __device__ static float power(float x) { return expf(x); }
  __device__ static double power(double x) { return exp(x); }
  template <class N, class W>
  __device__ static ValueSlope<W> both(W x) {
    constexpr W density = W(std::numbers::inv_sqrtpi / std::numbers::sqrt2);
    const W share       = phi(x);
    return {x * share, share + x * density * power(W(-0.5) * x * x)};
  }
  template <class N, class W>
  __device__ static W value(W x) {
    return x * phi(x);
  }
};

struct Silu {
  template <class N, class W>
  __device__ static ValueSlope<W> both(W x) {
    const W s = sigmoid<N>(x);
    return {x * s, s + x * s * (W(1) - s)};
  }
  template <class N, class W>
  __device__ static W value(W x) {
    return x * sigmoid<N>(x);
  }
};

// Calls `of` with the function object of a curve.
template <class Of>
void with_function(Curve curve, const Of& of) {
  switch (curve) {
    case Curve::gelu_tanh:
      return of(GeluTanh{});
    case Curve::gelu_exact:
      return of(GeluExact{});
    case Curve::silu:
      return of(Silu{});
  }
}

// --- over tensors ----------------------------------------------------------------------------------------------------

template <class Function, class N>
struct Activate {
  const N* x;
  N* y;
  template <int n>
  using Loaded = Pack<N, n>;
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    return load_pack<n>(x + i);
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Pack<N, n> to;
#pragma unroll
    for (int k = 0; k < n; ++k) to.at[k] = narrow_to<N>(Function::template value<N>(widen(in.at[k])));
    store_pack<n>(y + i, to);
  }
};

template <class Function, class N>
struct Gradient {
  const N *x, *dy;
  Sum<N> dx;
  template <int n>
  struct Loaded {
    Pack<N, n> x, dy, was;
  };
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    return {load_pack<n>(x + i), load_pack<n>(dy + i), dx.template before<n>(i)};
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Computed<N> values[n];
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = widen(in.dy.at[k]) * Function::template both<N>(widen(in.x.at[k])).slope;
    dx.template put<n>(i, in.was, values);
  }
};

// Elements are those of y.
template <class N>
struct Swiglu {
  const N* gate_up;
  N* y;
  std::int64_t width;
  template <int n>
  struct Loaded {
    Pack<N, n> gate, up;
  };
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    const N* gate = gate_up + i + split(i, width).quotient * width;
    return {load_pack<n>(gate), load_pack<n>(gate + width)};
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Pack<N, n> to;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      to.at[k] = narrow_to<N>(Silu::value<N>(widen(in.gate.at[k])) * widen(in.up.at[k]));
    }
    store_pack<n>(y + i, to);
  }
};

template <class N>
struct SwigluGradient {
  const N *gate_up, *dy;
  Sum<N> dx;
  std::int64_t width;
  template <int n>
  struct Loaded {
    Pack<N, n> gate, up, dy, gate_was, up_was;
  };
  __device__ std::int64_t gate_of(std::int64_t i) const { return i + split(i, width).quotient * width; }
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    const std::int64_t gate = gate_of(i), up = gate + width;
    return {load_pack<n>(gate_up + gate), load_pack<n>(gate_up + up), load_pack<n>(dy + i), dx.template before<n>(gate),
            dx.template before<n>(up)};
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Computed<N> of_gate[n], of_up[n];
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const auto silu        = Silu::both<N>(widen(in.gate.at[k]));
      const Computed<N> from = widen(in.dy.at[k]);
      of_gate[k]             = from * widen(in.up.at[k]) * silu.slope;
      of_up[k]               = from * silu.value;
    }
    const std::int64_t gate = gate_of(i);
    store_whole<n>(dx.out + gate, dx.template with<n>(in.gate_was, of_gate));
    store_whole<n>(dx.out + gate + width, dx.template with<n>(in.up_was, of_up));
  }
};

}  // namespace

template <class T>
void activate(const DeviceQueue& queue, Curve curve, const T* x, T* y, std::int64_t size) {
  constexpr int n = elements_per_vector<T>;
  with_function(curve, [&]<class Function>(Function) {
    map<n>(queue, "activation", Activate<Function, Native<T>>{native(x), native(y)}, size, vectors_fit(x, y));
  });
}

template <class T>
void activation_gradient(const DeviceQueue& queue, Curve curve, const T* x, const T* dy, const Into<T>& dx) {
  constexpr int n = elements_per_vector<T>;
  with_function(curve, [&]<class Function>(Function) {
    map<n>(queue, "activation gradient", Gradient<Function, Native<T>>{native(x), native(dy), sum_of(dx)}, dx.size,
           vectors_fit(x, dy, dx.out, dx.base));
  });
}

template <class T>
void swiglu(const DeviceQueue& queue, const T* gate_up, T* y, std::int64_t rows, std::int64_t width) {
  constexpr int n = elements_per_vector<T>;
  map<n>(queue, "swiglu", Swiglu<Native<T>>{native(gate_up), native(y), width}, rows * width,
         width % n == 0 && vectors_fit(gate_up, y));
}

template <class T>
void swiglu_gradient(const DeviceQueue& queue, const T* gate_up, const T* dy, const Into<T>& dx, std::int64_t rows,
                     std::int64_t width) {
  constexpr int n = elements_per_vector<T>;
  map<n>(queue, "swiglu gradient", SwigluGradient<Native<T>>{native(gate_up), native(dy), sum_of(dx), width},
         rows * width, width % n == 0 && vectors_fit(gate_up, dy, dx.out, dx.base));
}

#define STEPGRAPH_ACTIVATION(T)                                                                     \
  template void activate(const DeviceQueue&, Curve, const T*, T*, std::int64_t);                    \
  template void activation_gradient(const DeviceQueue&, Curve, const T*, const T*, const Into<T>&); \
  template void swiglu(const DeviceQueue&, const T*, T*, std::int64_t, std::int64_t);               \
  template void swiglu_gradient(const DeviceQueue&, const T*, const T*, const Into<T>&, std::int64_t, std::int64_t)
STEPGRAPH_ACTIVATION(float);
STEPGRAPH_ACTIVATION(double);
STEPGRAPH_ACTIVATION(bf16);
STEPGRAPH_ACTIVATION(f16);
#undef STEPGRAPH_ACTIVATION

}  // namespace stepgraph::cuda
