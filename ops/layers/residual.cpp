#include "ops/layers/residual.hpp"

#include "ops/cuda/common/built.hpp"
#include "ops/shared/residual_parts.hpp"

namespace stepgraph {

Tensor residual(Tape& tape, const Residual& spec) {
  const ResidualParts parts(tape, "residual", spec);
  const Tensor y = tape.tensor("residual", spec.x.shape);
  OpNode node    = parts.forward_node("residual");
  node.writes    = y;
  tape.add<AllTypes>(node, [parts]<class T>(const Context& context, T) {
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device())
        return cuda::residual_forward(*queue, parts.device_rows<T>(context));
    }
    const cpu::ResidualRows<T> rows = parts.rows<T>(context);
    cpu::for_tiles(context, parts.num_rows, cpu::rows_per_tile(parts.width),
                   [&](std::int64_t begin, std::int64_t end) { cpu::residual_forward(rows, begin, end); });
  });

  tape.on_backward({.outputs          = {y},
                    .input_gradients  = [parts, y](Tape& back) { parts.add_input_gradients(back, y); },
                    .weight_gradients = [parts, y](Tape& back) { parts.add_bias_gradient(back, y); }});
  return y;
}

}  // namespace stepgraph
