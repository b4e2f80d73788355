#include "ops/cpu/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#ifdef __aarch64__
#include "ops/cpu/adamw_neon.hpp"
#endif

#include "ops/tape/number.hpp"

namespace stepgraph::cpu {
namespace {

// Part of concatenated rows: from one element to the end of its row.
template <class T>
struct Stretch {
  T* data;
  std::int64_t size;
};
template <class T>
Stretch<T> stretch(const Rows<T>& rows, std::int64_t element) {
  const std::int64_t row = element / rows.length, offset = element % rows.length;
  return {rows.data + row * rows.stride + offset, rows.length - offset};
}

// The same for the rounded copy of a weight. Without one: no data, and no end.
template <class Value>
Stretch<Value> value_stretch(const Rows<Value>& rows, std::int64_t element) {
  if (rows.data == nullptr) return {nullptr, std::numeric_limits<std::int64_t>::max()};
  return stretch(rows, element);
}

// The arrays of an update. They do not overlap.
template <class T>
struct Updated {
  T* __restrict weight;
  T* __restrict first;
  T* __restrict second;
  const T* __restrict gradient;
};

// a b + c, rounded once: on machines without an instruction for it too. Explicit, so that no compiler contracts the
// vector loop and its tail differently.
[[gnu::always_inline]] inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
[[gnu::always_inline]] inline double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }

// Elements per iteration: enough that square roots and divisions, the slowest part, never wait for each other
// (measured: 1.3 times the speed of one vector per iteration).
constexpr std::int64_t unrolled = 32;
// Values are rounded after this many elements, while the weights are in the first-level cache.
constexpr std::int64_t at_a_time = 2048;

template <class Value, class T>
[[gnu::always_inline]] inline void round_into(Value* __restrict value, const T* __restrict weight, std::int64_t count) {
  if (value == nullptr) return;
  for (std::int64_t i = 0; i < count; ++i) value[i] = Value(static_cast<float>(weight[i]));
}

// Gradients in the weight's type: the gradients themselves, or up to at_a_time of them widened into a local array.
template <class T, class Gradient>
struct WideGradients {
  [[gnu::always_inline]] const T* operator()(const Gradient* __restrict of, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) room[i] = wide(of[i]);
    return room;
  }
  T room[at_a_time];
};
template <class T>
struct WideGradients<T, T> {
  [[gnu::always_inline]] const T* operator()(const T* of, std::int64_t) { return of; }
};

// The formula is in ops/shared/optimizer_scalars.hpp.
template <class T>
[[gnu::always_inline]] inline void update_one(const AdamWFactors<T>& by, const Updated<T>& of, std::int64_t i) {
  const T g    = of.gradient[i] * by.factor;
  const T m    = multiply_add(g - of.first[i], by.new1, of.first[i]);
  const T v    = multiply_add(by.new2 * g, g, of.second[i] * by.beta2);
  of.first[i]  = m;
  of.second[i] = v;
  of.weight[i] = multiply_add(-by.size, m / multiply_add(std::sqrt(v), by.unroot2, by.eps), of.weight[i] * by.keep);
}

// Always inlined: each caller compiles it for its own instructions.
template <class T, class Gradient, class Value>
[[gnu::always_inline]] inline void update(const AdamWRows<T, Gradient, Value>& rows, const AdamWScalars& scalars,
                                          std::int64_t begin, std::int64_t end) {
  const AdamWFactors<T> by = adamw_factors<T>(scalars);
  WideGradients<T, Gradient> widened;
  for (std::int64_t at = begin; at < end;) {
    const auto [weight, num_weight]     = stretch(rows.weight, at);
    const auto [first, num_first]       = stretch(rows.first, at);
    const auto [second, num_second]     = stretch(rows.second, at);
    const auto [gradient, num_gradient] = stretch(rows.gradient, at);
    const auto [value, num_value]       = value_stretch(rows.value, at);
    const bool at_once                  = std::is_same_v<T, Gradient> && value == nullptr;
    const std::int64_t count            = std::min(
                   {num_weight, num_first, num_second, num_gradient, num_value, end - at, at_once ? end - at : at_a_time});
    const Updated<T> of{weight, first, second, widened(gradient, count)};
    std::int64_t i = 0;
#ifdef __aarch64__
    if constexpr (std::is_same_v<T, float>) {
      i = adamw_turns(by, weight, first, second, of.gradient, count);
    }
#endif
    for (; i + unrolled <= count; i += unrolled) {
      for (std::int64_t k = 0; k < unrolled; ++k) update_one(by, of, i + k);
    }
    for (; i < count; ++i) update_one(by, of, i);
    round_into(value, weight, count);
    at += count;
  }
}

template <class T, class Gradient, class Value>
[[gnu::always_inline]] inline void update(const SgdRows<T, Gradient, Value>& rows, const SgdScalars& scalars,
                                          std::int64_t begin, std::int64_t end) {
  const T factor = static_cast<T>(scalars.factor), rate = static_cast<T>(scalars.rate),
          momentum = static_cast<T>(scalars.momentum), decay = static_cast<T>(scalars.weight_decay);
  WideGradients<T, Gradient> widened;
  for (std::int64_t at = begin; at < end;) {
    const auto [weight, num_weight]     = stretch(rows.weight, at);
    const auto [velocity, num_velocity] = stretch(rows.velocity, at);
    const auto [gradient, num_gradient] = stretch(rows.gradient, at);
    const auto [value, num_value]       = value_stretch(rows.value, at);
    const std::int64_t count = std::min({num_weight, num_velocity, num_gradient, num_value, end - at, at_a_time});
    T* __restrict w = weight, * __restrict v = velocity;
    const T* __restrict of = widened(gradient, count);
    for (std::int64_t i = 0; i < count; ++i) {
      const T vi = multiply_add(momentum, v[i], multiply_add(factor, of[i], decay * w[i]));
      v[i]       = vi;
      w[i]       = multiply_add(-rate, vi, w[i]);
    }
    round_into(value, w, count);
    at += count;
  }
}

#ifdef __x86_64__
#ifdef __clang__
#define STEPGRAPH_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
#else
#define STEPGRAPH_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512"
#endif
template <class Rows, class Scalars>
[[gnu::target("avx2,fma")]] void update_avx2(const Rows& rows, const Scalars& scalars, std::int64_t begin,
                                             std::int64_t end) {
  update(rows, scalars, begin, end);
}
template <class Rows, class Scalars>
[[gnu::target(STEPGRAPH_AVX512)]] void update_avx512(const Rows& rows, const Scalars& scalars, std::int64_t begin,
                                                     std::int64_t end) {
  update(rows, scalars, begin, end);
}
#undef STEPGRAPH_AVX512
#endif

template <class Rows, class Scalars>
void update_with(Instructions instructions, const Rows& rows, const Scalars& scalars, std::int64_t begin,
                 std::int64_t end) {
#ifdef __x86_64__
  if (instructions == Instructions::avx512) return update_avx512(rows, scalars, begin, end);
  if (instructions == Instructions::avx2) return update_avx2(rows, scalars, begin, end);
#endif
  static_cast<void>(instructions);
  update(rows, scalars, begin, end);
}

}  // namespace

template <class T, class Gradient, class Value>
void adamw(const AdamWRows<T, Gradient, Value>& rows, const AdamWScalars& scalars, std::int64_t begin, std::int64_t end,
           Instructions instructions) {
  update_with(instructions, rows, scalars, begin, end);
}
template <class T, class Gradient, class Value>
void sgd(const SgdRows<T, Gradient, Value>& rows, const SgdScalars& scalars, std::int64_t begin, std::int64_t end,
         Instructions instructions) {
  update_with(instructions, rows, scalars, begin, end);
}

#define STEPGRAPH_UPDATES(T, Gradient, Value)                                                                \
  template void adamw(const AdamWRows<T, Gradient, Value>&, const AdamWScalars&, std::int64_t, std::int64_t, \
                      Instructions);                                                                         \
  template void sgd(const SgdRows<T, Gradient, Value>&, const SgdScalars&, std::int64_t, std::int64_t, Instructions)
STEPGRAPH_UPDATES(double, double, bf16);
STEPGRAPH_UPDATES(float, float, bf16);
STEPGRAPH_UPDATES(float, float, f16);
STEPGRAPH_UPDATES(float, bf16, bf16);
STEPGRAPH_UPDATES(float, bf16, f16);
STEPGRAPH_UPDATES(float, f16, bf16);
STEPGRAPH_UPDATES(float, f16, f16);
#undef STEPGRAPH_UPDATES

}  // namespace stepgraph::cpu
