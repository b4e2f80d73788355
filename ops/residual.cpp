#include "ops/residual.hpp"

#include "ops/cpu/column_sums.hpp"
#include "ops/op_checks.hpp"

namespace stepgraph {

Tensor residual(Tape& tape, const Residual& spec) {
  check_tensor(tape, "residual", "x", spec.x);
  check_tensor(tape, "residual", "branch", spec.branch);
  check_same_shape("residual", "branch", spec.branch.shape, spec.x.shape);
  const std::int64_t rows = spec.x.rows(), cols = spec.x.cols();
  if (spec.bias) check_same_shape("residual", "bias", spec.bias->shape, {cols});
  const Tensor y = tape.tensor("residual", spec.x.shape);
  const double n = static_cast<double>(y.num_elements()), bytes = static_cast<double>(y.num_bytes());

  OpNode node{
      .op = "residual", .reads = {spec.x, spec.branch}, .writes = y, .cost = {.flops = n, .bytes_moved = 3 * bytes}};
  if (spec.bias) {
    node.reads.push_back(*spec.bias);
    node.cost.flops = 2 * n;
  }
  tape.add(node, [rows, cols, biased = spec.bias.has_value()]<class T>(const Context& context, T) {
    const T* const x      = context.read<T>(0).data();
    const T* const branch = context.read<T>(1).data();
    const T* const bias   = biased ? context.read<T>(2).data() : nullptr;
    T* const out          = context.write<T>().data();
    for (std::int64_t i = 0; i < rows * cols; i += cols) {
      if (biased) {
        for (std::int64_t j = 0; j < cols; ++j) out[i + j] = x[i + j] + (branch[i + j] + bias[j]);
      } else {
        for (std::int64_t j = 0; j < cols; ++j) out[i + j] = x[i + j] + branch[i + j];
      }
    }
  });

  Tape::Backward backward{.outputs = {y}, .input_gradients = [x = spec.x, branch = spec.branch, y](Tape& back) {
                            back.pass_gradient(branch, y);
                            back.pass_gradient(x, y);
                          }};
  if (spec.bias) {
    backward.weight_gradients = [=, bias = *spec.bias](Tape& back) {
      const OpNode of_bias{
          .op = "bias_gradient", .reads = back.gradient(y), .cost = {.flops = n, .bytes_moved = bytes}};
      back.add_weight_gradient(bias, of_bias, [rows, cols]<class T>(const Context& context, Into<T> into) {
        column_sums(context.read<T>().data(), rows, cols, into);
      });
    };
  }
  tape.on_backward(std::move(backward));
  return y;
}

}  // namespace stepgraph
