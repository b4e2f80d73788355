#pragma once
#include <cstdint>

#include "engine/base/half.hpp"
#include "engine/run/context.hpp"

// Updates of weights, element by element. What changes from step to step comes in as doubles and is rounded to the
// weight's type once. Gradients are of that type too, or of two bytes beside a weight of f32; so are values.
namespace stepgraph::cpu {

struct AdamWScalars {
  double factor, rate, beta1, beta2, eps, weight_decay;
  std::int64_t step;  // from 1
};
template <class T, class Gradient = T, class Value = bf16>
struct AdamWRows {
  Rows<T> weight, first, second;
  Rows<const Gradient> gradient;
  Rows<Value> value = {};  // of no data: none; else it gets the weight, rounded
};
// Elements [begin, end) of rows laid end to end.
template <class T, class Gradient = T, class Value = bf16>
void adamw(const AdamWRows<T, Gradient, Value>& rows, const AdamWScalars& scalars, std::int64_t begin,
           std::int64_t end);

struct SgdScalars {
  double factor, rate, momentum, weight_decay;
};
template <class T, class Gradient = T, class Value = bf16>
struct SgdRows {
  Rows<T> weight, velocity;
  Rows<const Gradient> gradient;
  Rows<Value> value = {};
};
template <class T, class Gradient = T, class Value = bf16>
void sgd(const SgdRows<T, Gradient, Value>& rows, const SgdScalars& scalars, std::int64_t begin, std::int64_t end);

}  // namespace stepgraph::cpu
