#pragma once
#include <optional>
#include <string>

#include "ops/tape/tape.hpp"

namespace stepgraph {

// Memory layout of a weight matrix: GPT-2 uses [in, out], most other models [out, in].
enum class WeightLayout : std::uint8_t { in_out, out_in };

// The activation after a product. Same bits as the op in ops/layers/activation.hpp.
enum class Activation : std::uint8_t { none, gelu_tanh, gelu_exact, silu };

// y = activation(x w + bias), x: [rows, in], y: [rows, out]. Tensor parallel: a rank that holds a share of the outputs
// (columns) or of the inputs (rows) computes only that share; tp_copy goes before the former, tp_sum after the latter.
// The activation is applied in the epilogue of each tile, and its slope is stored if there is a backward pass. If y is
// used by exactly one op and that op is a linear, y's gradient is never stored: the backward of that linear multiplies
// each tile by the slope. The bits are those of separate nodes, except for gelu_tanh in bf16 and f16 on a device, where
// the slope is applied before rounding.
struct Linear {
  Tensor x                   = {};
  Weight weight              = {};
  std::optional<Weight> bias = {};  // [out]
  WeightLayout layout        = WeightLayout::out_in;
  Activation activation      = Activation::none;
  std::string name           = "linear";  // of the output tensor
};
[[nodiscard]] Tensor linear(Tape& tape, const Linear& spec);

}  // namespace stepgraph
