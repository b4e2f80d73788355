#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/tape/tape.hpp"

// One op, or a few, on a tape of their own: run, differentiated and checked. Numbers are doubles here, whatever the
// tape's type; those a case starts from can be told exactly in f32.
namespace stepgraph::testing {

struct OpCase {
  std::vector<TensorShape> inputs                                = {};
  std::vector<std::pair<std::string, TensorShape>> weights       = {};
  std::int64_t sequences                                         = 1;
  std::int64_t seq                                               = 1;
  std::vector<std::int32_t> tokens                               = {};  // given: one more input, i32, after the others
  std::function<Tensor(Tape&, const std::vector<Tensor>&)> build = {};  // inputs to output
  // Given: `build` adds a loss, and returns where it is. Gradients are those of this many losses; else they are those
  // of the output's elements, each times some number.
  std::optional<double> loss_scale = {};
  bool in_place                    = false;       // the op overwrites its inputs: nobody else can use them after it
  double range                     = 1;           // values are between -range and range
  double f32_tolerance             = 1e-5;        // relative, of a tensor's norm
  std::optional<std::int64_t> step = {};          // given: tapes are random, and this is the step
  DType exact_in                   = DType::f32;  // values and gradients of outputs can be told exactly in this type
  bool wide_weights                = false;       // weights are f32 on tapes of two bytes, and have as many bits
};

// The inputs (tokens aside) and the weights of a case, in its order.
using Values = std::vector<std::vector<double>>;
struct OpValues {
  Values inputs  = {};
  Values weights = {};
};
[[nodiscard]] OpValues values(const OpCase& test);

// The output on those values; the graph is verified and runs in planned memory.
[[nodiscard]] std::vector<double> evaluate(const OpCase& test, DType type = DType::f64);

// What each element of the output is multiplied with: the gradient of the output.
[[nodiscard]] std::vector<double> output_gradient(const OpCase& test, DType type = DType::f64);

// The gradients of all inputs and weights, as the op's backward has them.
[[nodiscard]] OpValues gradients(const OpCase& test, DType type = DType::f64);

// A test by itself: gradients agree with finite differences; they are the same bits when I and W are emitted apart, and
// when the output's gradient is its own or another tensor's; they add to what other users of an input have left there,
// and to those of an earlier microbatch; f32 agrees with f64. Step memory and gradients are full of NaN before each
// run.
void check_gradients(const OpCase& test);

// A test by itself: output and gradients in bf16 are those in f32 from the same values, within 2^-8 of each tensor's
// norm, as 8 bits have it; and in f16 within 2^-11, as 11 bits have it. Gradients of weights are f32 in both.
void check_halves(OpCase test);

// |a - b| / |b|, of Euclidean norms; infinite where sizes differ or a number is none.
[[nodiscard]] double distance(const std::vector<double>& a, const std::vector<double>& b, double at_least = 1e-300);

}  // namespace stepgraph::testing
