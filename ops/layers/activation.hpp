#pragma once
#include "ops/tape/tape.hpp"

namespace stepgraph {

enum class Gelu : std::uint8_t { tanh, exact };  // the tanh approximation ("gelu_new"), or exactly x Phi(x)
[[nodiscard]] Tensor gelu(Tape& tape, const Tensor& x, Gelu form = Gelu::tanh);
[[nodiscard]] Tensor silu(Tape& tape, const Tensor& x);  // x / (1 + exp(-x))

// silu(gate) * up, where each row of x holds gate, then up: [rows, 2 n] -> [rows, n].
[[nodiscard]] Tensor swiglu(Tape& tape, const Tensor& gate_up);

}  // namespace stepgraph
