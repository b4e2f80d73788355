#pragma once
#include <optional>
#include <string>

#include "ops/tape.hpp"

namespace stepgraph {

// How a weight matrix lies in memory: GPT-2's are [in, out], everybody else's [out, in].
enum class WeightLayout : std::uint8_t { in_out, out_in };

// y = x w + bias, x: [rows, in], y: [rows, out]. Tensor parallel: a rank that has a share of the outputs (columns) or
// of the inputs (rows) computes just that; tp_copy goes before the first, tp_sum after the second.
struct Linear {
  Tensor x                   = {};
  Weight weight              = {};
  std::optional<Weight> bias = {};  // [out]
  WeightLayout layout        = WeightLayout::out_in;
  std::string name           = "linear";  // of the output
};
[[nodiscard]] Tensor linear(Tape& tape, const Linear& spec);

}  // namespace stepgraph
