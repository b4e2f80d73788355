#pragma once
#include <cstdint>

#include "engine/base/half.hpp"
#include "engine/run/context.hpp"
#include "ops/cpu/instructions.hpp"
#include "ops/shared/optimizer_scalars.hpp"

// Weight updates, element by element. Scalars that change from step to step are passed as doubles and rounded to the
// weight's type once. Gradients have the weight's type, or a 2-byte type beside an f32 weight. Values have a 2-byte
// type. All instructions give the same bits: those of a device, which fuses the same products with additions.
// `of_the_build` calls a function of the C library for each of these, unless it is compiled for a machine that fuses
// them.
namespace stepgraph::cpu {

using stepgraph::AdamWScalars;
template <class T, class Gradient = T, class Value = bf16>
struct AdamWRows {
  Rows<T> weight, first, second;
  Rows<const Gradient> gradient;
  Rows<Value> value = {};  // without data: none; otherwise receives the rounded weight
};
// Elements [begin, end) of concatenated rows.
template <class T, class Gradient = T, class Value = bf16>
void adamw(const AdamWRows<T, Gradient, Value>& rows, const AdamWScalars& scalars, std::int64_t begin, std::int64_t end,
           Instructions instructions = best_instructions());

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
void sgd(const SgdRows<T, Gradient, Value>& rows, const SgdScalars& scalars, std::int64_t begin, std::int64_t end,
         Instructions instructions = best_instructions());

}  // namespace stepgraph::cpu
