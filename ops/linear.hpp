#pragma once
#include <optional>
#include <string>

#include "ops/tape/tape.hpp"

namespace stepgraph {

// How a weight matrix lies in memory: GPT-2's are [in, out], everybody else's [out, in].
enum class WeightLayout : std::uint8_t { in_out, out_in };

// What follows a product, element by element: nothing, or an op of ops/activation.hpp, with its bits.
enum class Activation : std::uint8_t { none, gelu_tanh, gelu_exact, silu };

// y = activation(x w + bias), x: [rows, in], y: [rows, out]. Tensor parallel: a rank that has a share of the outputs
// (columns) or of the inputs (rows) computes just that; tp_copy goes before the first, tp_sum after the second.
// An activation is applied to each tile of the product as it is made; its slope is kept where a backward pass will ask
// for it. Where y is then used by one linear and nobody else, y's gradient is never stored: that linear multiplies what
// it would add to it with the slope, tile by tile, with the bits of one node after the other (on a device, of gelu_tanh
// in bf16 and f16, before it is rounded).
struct Linear {
  Tensor x                   = {};
  Weight weight              = {};
  std::optional<Weight> bias = {};  // [out]
  WeightLayout layout        = WeightLayout::out_in;
  Activation activation      = Activation::none;
  std::string name           = "linear";  // of the output
};
[[nodiscard]] Tensor linear(Tape& tape, const Linear& spec);

}  // namespace stepgraph
