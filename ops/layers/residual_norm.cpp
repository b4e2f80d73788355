#include "ops/layers/residual_norm.hpp"

#include <algorithm>

#include "ops/cuda/common/built.hpp"
#include "ops/shared/norm_parts.hpp"
#include "ops/shared/residual_parts.hpp"

namespace stepgraph {

ResidualNormed residual_norm(Tape& tape, const ResidualNorm& spec) {
  const std::string op = "residual_norm";
  const ResidualParts sum(tape, op, {.x = spec.x, .branch = spec.branch, .bias = spec.bias, .dropout = spec.dropout});
  const NormParts norm(tape, op, spec.x, spec.norm_weight, spec.norm_bias, spec.eps);
  const Tensor y = tape.tensor("residual", spec.x.shape), normed = tape.tensor(op, spec.x.shape);

  OpNode node = sum.forward_node(op);
  node.writes = {y, normed};
  norm.add_to(node);
  node.cost.flops += (spec.norm_bias ? 8 : 5) * sum.num_elements();
  node.cost.bytes_moved += sum.num_bytes();
  tape.add<AllTypes>(node, [=]<class T>(const Context& context, T) {
    norm.with_param<T>([&]<class Param>(Param) {
      const auto kernel =
          norm.kernel<T, Param>(context, context.write<T>(0).data(), context.write<T>(1).data(), sum.num_reads(), 2);
      if constexpr (cuda::built) {
        if (const DeviceQueue* queue = context.device())
          return cuda::residual_norm_forward(*queue, sum.device_rows<T>(context), norm.device_kernel<T, Param>(kernel));
      }
      const cpu::ResidualRows<T> rows = sum.rows<T>(context);
      cpu::for_tiles(context, sum.num_rows, cpu::rows_per_tile(sum.width), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) {  // normalises each row while it is in the first-level cache
          cpu::residual_forward(rows, row, row + 1);
          cpu::norm_forward(kernel, row, row + 1);
        }
      });
    });
  });

  const auto input_gradients = [=](Tape& back) {
    if (back.has_gradient(normed)) norm.add_input_gradient(back, "residual_norm_backward", y, back.gradient(normed));
    if (back.has_gradient(y)) sum.add_input_gradients(back, y);
  };
  const auto weight_gradients = [=](Tape& back) {
    if (!back.has_gradient(normed)) return sum.add_bias_gradient(back, y);  // no op used the normed tensor
    std::vector<Weight> weights = norm.weights();
    OpNode of_weights = norm.weight_node("residual_norm_weight_gradient", y, back.gradient(normed), spec.bias ? 3 : 2);
    if (spec.bias) {
      weights.push_back(*spec.bias);
      of_weights.reads.push_back(back.gradient(y));
      if (sum.site.active) of_weights.reads.push_back(sum.site.step);
      of_weights.workspace_bytes = std::max(of_weights.workspace_bytes, sum.bias_workspace());  // one after the other
    }
    back.add_weight_gradients<AllTypes>(
        weights, of_weights, [=]<class T>(const Context& context, std::span<const Into<T, Wide<T>>> sums) {
          const std::size_t of_y = norm.num_backward_reads();
          const T* dy            = sum.bias ? context.read<T>(of_y).data() : nullptr;
          norm.with_param<T>([&]<class Param>(Param) {
            const auto kernel          = norm.backward_kernel<T, Param>(context);
            const Into<T, Wide<T>>* db = norm.bias ? &sums[1] : nullptr;
            if constexpr (cuda::built) {
              if (const DeviceQueue* queue = context.device()) {
                cuda::norm_weight_gradient(*queue, norm.device_kernel<T, Param>(kernel), sums[0], db);
                if (sum.bias)
                  cuda::column_sum(*queue, dy, sum.num_rows, sum.width, sum.device_drop(context, of_y + 1),
                                   sums.back());
                return;
              }
            }
            const auto drop = sum.bias ? sum.drop(context, of_y + 1) : std::nullopt;
            cpu::for_columns(context, sum.width, [&](std::int64_t begin, std::int64_t end) {
              cpu::norm_weight_gradient(kernel, sums[0], db, norm.rows, begin, end);
              if (sum.bias) cpu::column_sum(dy, sum.width, drop, sums.back(), sum.num_rows, begin, end);
            });
          });
        });
  };
  tape.on_backward({.outputs = {y, normed}, .input_gradients = input_gradients, .weight_gradients = weight_gradients});
  return {y, normed};
}

}  // namespace stepgraph
