#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/tape/tape.hpp"

// One op, or a few, on a separate tape: run, differentiated and checked. Values are doubles here, for every
// type of tape. The initial values of a case are exact in f32.
namespace stepgraph::testing {

struct OpCase {
  std::vector<TensorShape> inputs                                = {};
  std::vector<std::pair<std::string, TensorShape>> weights       = {};
  std::int64_t sequences                                         = 1;
  std::int64_t seq                                               = 1;
  std::vector<std::int32_t> tokens                               = {};  // if set: one more input, i32, after the others
  std::function<Tensor(Tape&, const std::vector<Tensor>&)> build = {};  // inputs to output
  // If set: `build` adds a loss and returns its tensor. Gradients are those of this many losses. Otherwise they are
  // those of the output's elements, each times some number.
  std::optional<double> loss_scale = {};
  bool in_place                    = false;       // the op overwrites its inputs: no other op can use them after it
  double range                     = 1;           // values are between -range and range
  double f32_tolerance             = 1e-5;        // relative, of a tensor's norm
  std::optional<std::int64_t> step = {};          // if set: tapes are random, and this is the step
  DType exact_in                   = DType::f32;  // values and gradients of outputs are exact in this type
  bool wide_weights                = false;       // weights are f32 on 2-byte tapes, with full precision
  int threads                      = 2;           // of evaluate and gradients
};

// The inputs (without tokens) and the weights of a case, in order.
using Values = std::vector<std::vector<double>>;
struct OpValues {
  Values inputs  = {};
  Values weights = {};
};
[[nodiscard]] OpValues values(const OpCase& test);

// The output for those values. The graph is verified and runs in planned memory.
[[nodiscard]] std::vector<double> evaluate(const OpCase& test, DType type = DType::f64);

// The gradient of the output: the factor of each of its elements.
[[nodiscard]] std::vector<double> output_gradient(const OpCase& test, DType type = DType::f64);

// The gradients of all inputs and weights, computed by the op's backward.
[[nodiscard]] OpValues gradients(const OpCase& test, DType type = DType::f64);

// A complete test: gradients agree with finite differences. They have the same bits whether I and W are emitted
// together or apart, and whether or not the output owns its gradient. They add to the gradients of other users of an
// input and to those of an earlier microbatch. f32 agrees with f64. Step memory and gradients are filled with NaN
// before each run.
void check_gradients(const OpCase& test);

// A complete test: output and gradients in bf16 equal those in f32 for the same values within 2^-8 of each tensor's
// norm (8 bits), and in f16 within 2^-11 (11 bits). Gradients of weights are f32 in both.
void check_halves(OpCase test);

// a - b| / |b|, in Euclidean norms; infinite if sizes differ or a value is NaN.
[[nodiscard]] double distance(const std::vector<double>& a, const std::vector<double>& b, double at_least = 1e-300);

}  // namespace stepgraph::testing
