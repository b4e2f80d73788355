#include "ops/norm.hpp"

#include "ops/cpu/into.hpp"
#include "ops/cpu/norm.hpp"

namespace stepgraph {
namespace {

// Both norms. One that is not centered, over the root mean square, has no bias.
struct AnyNorm {
  std::string op;
  Tensor x;
  Weight weight;
  Weight bias;
  bool centered;
  double eps;
};

void check(const Tape& tape, const AnyNorm& norm) {
  const auto refuse = [&](const std::string& what) { throw Error(ErrorKind::config, str(norm.op, ": ", what)); };
  const TensorShape wanted{norm.x.cols()};
  if (norm.x.type != tape.type()) {
    refuse(str("takes elements of ", tape.type(), ", as its tape has them, not ", norm.x.type));
  }
  if (norm.x.shape.empty() || norm.x.cols() < 1) {
    refuse(str("x is ", to_string(norm.x.shape), " (rows of at least one element)"));
  }
  const auto check_weight = [&](const Weight& weight, std::string_view name) {
    if (weight.shape == wanted) return;
    refuse(str(name, " is ", to_string(weight.shape), ", but x is ", to_string(norm.x.shape), " (", to_string(wanted),
               ", as rows of x are)"));
  };
  check_weight(norm.weight, "weight");
  if (norm.centered) check_weight(norm.bias, "bias");
  if (!(norm.eps >= 0)) refuse(str("eps is ", norm.eps, " (0 or more)"));
}

Tensor add_norm(Tape& tape, const AnyNorm& norm) {
  check(tape, norm);
  const std::int64_t rows = norm.x.rows(), width = norm.x.cols();
  const auto elements = static_cast<double>(norm.x.num_elements()), bytes = static_cast<double>(norm.x.num_bytes());
  const bool centered = norm.centered;
  const Tensor x = norm.x, y = tape.tensor(norm.op, x.shape), scale = tape.tensor(norm.op + " scale", {rows});
  // A row's mean; an RMS norm has none.
  const Tensor center = centered ? tape.tensor(norm.op + " center", {rows}) : Tensor{};

  OpNode node{.op       = norm.op,
              .reads    = {x, norm.weight},
              .writes   = {y, scale},
              .cost     = {.flops = (centered ? 8 : 5) * elements, .bytes_moved = 2 * bytes},
              .parallel = true};
  if (centered) {
    node.reads.push_back(norm.bias);
    node.writes.push_back(center);
  }
  tape.add(node, [rows, width, centered, eps = norm.eps]<class T>(const Context& context, T) {
    const cpu::Norm<T> kernel{.width  = width,
                              .x      = context.read<T>(0).data(),
                              .weight = context.read<T>(1).data(),
                              .bias   = centered ? context.read<T>(2).data() : nullptr,
                              .center = centered ? context.write<T>(2).data() : nullptr,
                              .scale  = context.write<T>(1).data(),
                              .y      = context.write<T>(0).data(),
                              .eps    = eps};
    cpu::for_tiles(context, rows, cpu::rows_per_tile(width),
                   [&](std::int64_t begin, std::int64_t end) { cpu::norm_forward(kernel, begin, end); });
  });

  // What both backward kernels read, in this order: x, weight, dy, scale and, last, the center.
  const auto backward_node = [=](const Tensor& dy, std::string_view suffix, double moved) {
    OpNode made{.op       = str(norm.op, suffix),
                .reads    = {x, norm.weight, dy, scale},
                .cost     = {.flops = (centered ? 12 : 10) * elements, .bytes_moved = moved * bytes},
                .parallel = true};
    if (centered) made.reads.push_back(center);
    return made;
  };
  const auto backward_kernel = [width, centered]<class T>(const Context& context, T) {
    return cpu::NormBackward<T>{.width  = width,
                                .x      = context.read<T>(0).data(),
                                .weight = context.read<T>(1).data(),
                                .center = centered ? context.read<T>(4).data() : nullptr,
                                .scale  = context.read<T>(3).data(),
                                .dy     = context.read<T>(2).data()};
  };
  const auto input_gradients = [=](Tape& back) {
    back.add_gradient(
        x, backward_node(back.gradient(y), "_backward", 3), [=]<class T>(const Context& context, Into<T> dx) {
          const cpu::NormBackward<T> kernel = backward_kernel(context, T{});
          cpu::for_tiles(context, rows, cpu::rows_per_tile(width),
                         [&](std::int64_t begin, std::int64_t end) { cpu::norm_backward(kernel, dx, begin, end); });
        });
  };
  const auto weight_gradients = [=](Tape& back) {
    const Tensor dy = back.gradient(y);
    back.add_weight_gradient(
        norm.weight, backward_node(dy, "_weight_gradient", 2), [=]<class T>(const Context& context, Into<T> dw) {
          const cpu::NormBackward<T> kernel = backward_kernel(context, T{});
          cpu::for_tiles(context, width, cpu::columns_per_tile, [&](std::int64_t begin, std::int64_t end) {
            cpu::norm_weight_gradient(kernel, dw, rows, begin, end);
          });
        });
    if (!centered) return;
    back.add_weight_gradient(norm.bias,
                             {.op       = norm.op + "_bias_gradient",
                              .reads    = dy,
                              .cost     = {.flops = elements, .bytes_moved = bytes},
                              .parallel = true},
                             [=]<class T>(const Context& context, Into<T> db) {
                               const T* gradient = context.read<T>().data();
                               cpu::for_tiles(context, width, cpu::columns_per_tile,
                                              [&](std::int64_t begin, std::int64_t end) {
                                                cpu::column_sum(gradient, width, db, rows, begin, end);
                                              });
                             });
  };
  tape.on_backward({.outputs = {y}, .input_gradients = input_gradients, .weight_gradients = weight_gradients});
  return y;
}

}  // namespace

Tensor layer_norm(Tape& tape, const LayerNorm& spec) {
  return add_norm(
      tape,
      {.op = "layer_norm", .x = spec.x, .weight = spec.weight, .bias = spec.bias, .centered = true, .eps = spec.eps});
}

Tensor rms_norm(Tape& tape, const RmsNorm& spec) {
  return add_norm(
      tape, {.op = "rms_norm", .x = spec.x, .weight = spec.weight, .bias = {}, .centered = false, .eps = spec.eps});
}

}  // namespace stepgraph
