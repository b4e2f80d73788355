#pragma once
#include <cstdint>

#include "engine/context.hpp"
#include "engine/half.hpp"

// Updates of weights, element by element. What changes from step to step comes
// in as doubles and is rounded to the weight's type once.
namespace stepgraph::cpu {

struct AdamWScalars {
  double factor, rate, beta1, beta2, eps, weight_decay;
  std::int64_t step;  // from 1
};
template <class T>
struct AdamWRows {
  Rows<T> weight, first, second;
  Rows<const T> gradient;
  Rows<bf16> value = {};  // of no data: none; else it gets the weight, rounded
};
// Elements [begin, end) of rows laid end to end.
template <class T>
void adamw(const AdamWRows<T>& rows, const AdamWScalars& scalars, std::int64_t begin, std::int64_t end);

struct SgdScalars {
  double factor, rate, momentum, weight_decay;
};
template <class T>
struct SgdRows {
  Rows<T> weight, velocity;
  Rows<const T> gradient;
  Rows<bf16> value = {};
};
template <class T>
void sgd(const SgdRows<T>& rows, const SgdScalars& scalars, std::int64_t begin, std::int64_t end);

}  // namespace stepgraph::cpu
