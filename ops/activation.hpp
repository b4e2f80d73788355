#pragma once
#include "ops/tape/tape.hpp"

namespace stepgraph {

enum class Gelu : std::uint8_t { tanh, exact };  // the approximation by tanh ("gelu_new"), or x Phi(x) itself
[[nodiscard]] Tensor gelu(Tape& tape, const Tensor& x, Gelu form = Gelu::tanh);
[[nodiscard]] Tensor silu(Tape& tape, const Tensor& x);  // x / (1 + exp(-x))

// silu(gate) * up, where a row of x is gate, then up: [rows, 2 n] -> [rows, n].
[[nodiscard]] Tensor swiglu(Tape& tape, const Tensor& gate_up);

}  // namespace stepgraph
