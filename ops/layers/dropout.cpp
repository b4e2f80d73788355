#include "ops/layers/dropout.hpp"

#include "ops/cpu/into.hpp"
#include "ops/cpu/residual.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/common/device_drop.hpp"
#include "ops/shared/dropout_mask.hpp"
#include "ops/tape/op_checks.hpp"

namespace stepgraph {

Tensor dropout(Tape& tape, const Tensor& x, const Dropout& spec) {
  check_tensor(tape, "dropout", "x", x);
  const DropoutSite site = dropout_site(tape, spec);
  if (!site.active) return x;
  const Tensor y       = tape.tensor("dropout", x.shape);
  const auto node_that = [site](std::string op, const Tensor& from) {  // a node that reads `from` and the step
    return OpNode{.op       = std::move(op),
                  .reads    = {from, site.step},
                  .cost     = {.flops       = static_cast<double>(from.num_elements()),
                               .bytes_moved = 2 * static_cast<double>(from.num_bytes())},
                  .parallel = true,
                  .device   = true};
  };
  const auto drop = [site, first = tape.first_row(x) * x.cols()]<class T>(const Context& context, const Into<T>& into) {
    const T* from = context.read<T>(0).data();
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device())
        return cuda::put_dropped(*queue, cuda::device_drop(site, context, 1, first), from, into);
    }
    const cpu::Drop elements{.mask = site.mask(context, 1), .first = first};
    cpu::for_tiles(context, into.size, cpu::elements_per_tile,
                   [&](std::int64_t begin, std::int64_t end) { cpu::put_dropped(elements, from, into, begin, end); });
  };
  OpNode forward = node_that("dropout", x);
  forward.writes = y;
  tape.add<AllTypes>(forward, [drop]<class T>(const Context& context, T) {
    const std::span<T> out = context.write<T>();
    drop(context, Into<T>{out.data(), nullptr, std::ssize(out)});
  });
  tape.on_backward({.outputs = {y}, .input_gradients = [=](Tape& back) {
                      back.add_gradient<AllTypes>(
                          x, node_that("dropout_backward", back.gradient(y)),
                          [drop]<class T>(const Context& context, Into<T> dx) { drop(context, dx); });
                    }});
  return y;
}

}  // namespace stepgraph
