#include "ops/layers/norm.hpp"

#include "ops/cuda/common/built.hpp"
#include "ops/shared/norm_parts.hpp"

namespace stepgraph {

NormParts::NormParts(Tape& tape, const std::string& op, const Tensor& x, const Weight& weight_of_norm,
                     const std::optional<Weight>& bias_of_norm, double epsilon)
    : weight(weight_of_norm), bias(bias_of_norm), eps(epsilon), rows(x.rows()), width(x.cols()) {
  const auto refuse = [&](const std::string& what) { throw Error(ErrorKind::config, str(op, ": ", what)); };
  const TensorShape wanted{width};
  if (x.type != tape.type()) {
    refuse(str("x must have the tape's type ", tape.type(), ", not ", x.type));
  }
  if (x.shape.empty() || width < 1) refuse(str("x is ", to_string(x.shape), " (rows of at least one element)"));
  const auto check_weight = [&](const Weight& given, std::string_view name) {
    if (given.shape == wanted) return;
    refuse(str(name, " is ", to_string(given.shape), ", but x is ", to_string(x.shape), " (", to_string(wanted),
               ", the size of a row of x)"));
  };
  check_weight(weight, "weight");
  if (bias) check_weight(*bias, "bias");
  const auto type_of = [&](const Access& of) { return tape.graph().spec(of.buffer).type; };
  wide_weights       = is_half(tape.type()) && type_of(weight) == tape.wide_type();
  if (bias && is_half(tape.type()) && type_of(*bias) != type_of(weight))
    refuse(str("bias is ", type_of(*bias), ", but weight is ", type_of(weight), " (the type of the weight)"));
  if (!(eps >= 0)) refuse(str("eps is ", eps, " (0 or more)"));
  scale = tape.tensor(op + " scale", {rows}, tape.wide_type());
  if (bias) center = tape.tensor(op + " center", {rows}, tape.wide_type());
}

void NormParts::add_to(OpNode& node) const {
  node.reads.push_back(weight);
  node.writes.push_back(scale);
  if (!bias) return;
  node.reads.push_back(*bias);
  node.writes.push_back(center);
}

OpNode NormParts::backward_node(std::string op, const Tensor& x, const Tensor& gradient, double moved) const {
  OpNode made{.op       = std::move(op),
              .reads    = {x, gradient, scale},
              .cost     = {.flops       = (bias ? 12 : 10) * static_cast<double>(x.num_elements()),
                           .bytes_moved = moved * static_cast<double>(x.num_bytes())},
              .parallel = true,
              .device   = true};
  if (bias) made.reads.push_back(center);
  return made;
}

OpNode NormParts::weight_node(std::string op, const Tensor& x, const Tensor& gradient, double moved) const {
  OpNode made = backward_node(std::move(op), x, gradient, moved);
  made.workspace_bytes =
      cuda::norm_weight_workspace(rows, width, static_cast<std::int64_t>(size_bytes(x.type)), bias.has_value());
  return made;
}

void NormParts::add_input_gradient(Tape& back, const std::string& op, const Tensor& x, const Tensor& gradient) const {
  OpNode node = backward_node(op, x, gradient, 3);
  node.reads.push_back(weight);
  back.add_gradient<AllTypes>(x, node, [*this]<class T>(const Context& context, Into<T> dx) {
    with_param<T>([&]<class Param>(Param) {
      auto kernel   = backward_kernel<T, Param>(context);
      kernel.weight = context.read<Param>(num_backward_reads()).data();
      if constexpr (cuda::built) {
        if (const DeviceQueue* queue = context.device())
          return cuda::norm_backward(*queue, device_kernel<T, Param>(kernel), dx);
      }
      cpu::for_tiles(context, rows, cpu::rows_per_tile(width),
                     [&](std::int64_t begin, std::int64_t end) { cpu::norm_backward(kernel, dx, begin, end); });
    });
  });
}

std::vector<Weight> NormParts::weights() const {
  std::vector<Weight> all{weight};
  if (bias) all.push_back(*bias);
  return all;
}

namespace {

Tensor add_norm(Tape& tape, const std::string& op, const Tensor& x, const Weight& weight,
                const std::optional<Weight>& bias, double eps) {
  const NormParts parts(tape, op, x, weight, bias, eps);
  const Tensor y = tape.tensor(op, x.shape);
  OpNode node{.op       = op,
              .reads    = x,
              .writes   = y,
              .cost     = {.flops       = (bias ? 8 : 5) * static_cast<double>(x.num_elements()),
                           .bytes_moved = 2 * static_cast<double>(x.num_bytes())},
              .parallel = true,
              .device   = true};
  parts.add_to(node);
  tape.add<AllTypes>(node, [parts]<class T>(const Context& context, T) {
    parts.with_param<T>([&]<class Param>(Param) {
      const auto kernel = parts.kernel<T, Param>(context, context.read<T>(0).data(), context.write<T>(0).data(), 1, 1);
      if constexpr (cuda::built) {
        if (const DeviceQueue* queue = context.device())
          return cuda::norm_forward(*queue, parts.device_kernel<T, Param>(kernel));
      }
      cpu::for_tiles(context, parts.rows, cpu::rows_per_tile(parts.width),
                     [&](std::int64_t begin, std::int64_t end) { cpu::norm_forward(kernel, begin, end); });
    });
  });
  tape.on_backward(
      {.outputs         = {y},
       .input_gradients = [=](Tape& back) { parts.add_input_gradient(back, op + "_backward", x, back.gradient(y)); },
       .weight_gradients =
           [=](Tape& back) {
             back.add_weight_gradients<AllTypes>(
                 parts.weights(), parts.weight_node(op + "_weight_gradient", x, back.gradient(y), 2),
                 [parts]<class T>(const Context& context, std::span<const Into<T, Wide<T>>> sums) {
                   parts.with_param<T>([&]<class Param>(Param) {
                     const auto kernel          = parts.backward_kernel<T, Param>(context);
                     const Into<T, Wide<T>>* db = parts.bias ? &sums[1] : nullptr;
                     if constexpr (cuda::built) {
                       if (const DeviceQueue* queue = context.device())
                         return cuda::norm_weight_gradient(*queue, parts.device_kernel<T, Param>(kernel), sums[0], db);
                     }
                     cpu::for_columns(context, parts.width, [&](std::int64_t begin, std::int64_t end) {
                       cpu::norm_weight_gradient(kernel, sums[0], db, parts.rows, begin, end);
                     });
                   });
                 });
           }});
  return y;
}

}  // namespace

Tensor layer_norm(Tape& tape, const LayerNorm& spec) {
  return add_norm(tape, "layer_norm", spec.x, spec.weight, spec.bias, spec.eps);
}

Tensor rms_norm(Tape& tape, const RmsNorm& spec) {
  return add_norm(tape, "rms_norm", spec.x, spec.weight, std::nullopt, spec.eps);
}

}  // namespace stepgraph
