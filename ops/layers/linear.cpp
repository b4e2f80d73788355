#include "ops/layers/linear.hpp"

#include "ops/cpu/activation.hpp"
#include "ops/cpu/gemm/gemm.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cpu/lanes.hpp"
#include "ops/cpu/residual.hpp"
#include "ops/cpu/with_best.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/common/workspace_bytes.hpp"
#include "ops/cuda/gemm/gemm.hpp"
#include "ops/cuda/layers/activation.hpp"
#include "ops/cuda/layers/column_sum.hpp"
#include "ops/tape/op_checks.hpp"

namespace stepgraph {
namespace {

struct Sizes {
  std::int64_t rows, in, out;
  bool out_in;
};

// The weight as an [in, out] matrix, in either layout.
template <class T>
Matrix<T> in_by_out(const T* weight, const Sizes& sizes) {
  if (sizes.out_in) return {weight, 1, sizes.in};
  return {weight, sizes.out, 1};
}

// A row-major matrix.
template <class T>
Matrix<T> matrix(std::span<const T> elements, std::int64_t cols) {
  return {elements.data(), cols, 1};
}

// In parallel if there is more than one tile; such a node is declared parallel.
template <class T, class Sum>
void multiply(const Context& context, const Gemm<T, Sum>& problem) {
  const std::int64_t tiles = num_gemm_tiles<T>(problem.m, problem.n);
  if (tiles <= 1) return gemm(problem);
  context.parallel_for(tiles, gemm_joined<T>(problem.m, problem.n),
                       [&](std::int64_t first, std::int64_t end) { gemm_tiles(problem, first, end); });
}

OpNode product(const Tape& tape, std::string op, std::int64_t m, std::int64_t n, std::int64_t k) {
  const double element  = static_cast<double>(size_bytes(tape.type()));
  const auto wide_bytes = static_cast<std::int64_t>(size_bytes(tape.wide_type()));
  const auto size       = [](std::int64_t rows, std::int64_t cols) { return static_cast<double>(rows * cols); };
  return {.op                       = std::move(op),
          .cost                     = {.flops       = 2 * size(m, n) * static_cast<double>(k),
                                       .bytes_moved = element * (size(m, k) + size(k, n) + size(m, n))},
          .parallel                 = num_gemm_tiles(m, n) > 1,
          .device                   = true,
          .workspace_bytes          = cuda::product_workspace(m, n, k, wide_bytes),
          .in_place_workspace_bytes = cuda::product_in_place_workspace(m, n, k, wide_bytes)};
}

// --- activations -----------------------------------------------------------------------------------------------------

constexpr double flops_per_activation = 20;  // an exponential is about a dozen multiplications

// Calls `of` with the activation's function object from ops/cpu/activation.hpp.
template <class Of>
auto with_function(Activation activation, const Of& of) {
  switch (activation) {
    case Activation::gelu_exact:
      return of(cpu::GeluExact{});
    case Activation::silu:
      return of(cpu::Silu{});
    default:
      return of(cpu::GeluTanh{});
  }
}

const char* name(Activation activation) {
  switch (activation) {
    case Activation::gelu_exact:
      return "gelu_exact";
    case Activation::silu:
      return "silu";
    default:
      return "gelu";
  }
}

cuda::Curve curve(Activation activation) {
  switch (activation) {
    case Activation::gelu_exact:
      return cuda::Curve::gelu_exact;
    case Activation::silu:
      return cuda::Curve::silu;
    default:
      return cuda::Curve::gelu_tanh;
  }
}

// In place, if no backward pass needs the slope.
template <class Function, class T>
void activate(T* c, T* y, std::int64_t size) {
  cpu::for_blocks(
      c, 0, size, [](const T* x, std::int64_t count, Wide<T>* out) { cpu::values<Function>(x, count, out); },
      [y](std::int64_t at, std::int64_t count, const Wide<T>* results) {
        for (std::int64_t i = 0; i < count; ++i) y[at + i] = narrow<T>(results[i]);
      });
}
template <class Function, class T>
void activate_keeping_slope(T* c, T* y, std::int64_t size) {
  cpu::values_and_slopes<Function>(c, size, y);
}

// An input gradient that is still to be computed. A linear defers it to the op that made its input.
struct InputGradient {
  Linear spec;
  Tensor y;
  Sizes sizes;
};
// The activation that made a linear's input. `slope` holds its slope; on a device it holds the activation's input
// instead.
struct Through {
  Tensor slope;
  Activation activation;
};
void add_input_gradient(Tape& back, const InputGradient& of, const std::optional<Through>& through);

// Adds the gradient of the activation's input: dy times the slope, which the product stored in `slope`. A device stores
// the activation's input there instead: the product has it at hand, and reading it costs the same. If y owns its
// gradient, it is overwritten in place. If y's gradient is one deferred product, that product applies the slope itself
// and y's gradient is never stored.
void add_activation_gradient(Tape& back, Activation activation, const Tensor& slope, const Tensor& y) {
  if (!back.has_gradient(slope)) {
    if (const auto product = back.take_left_gradient<InputGradient>(y))
      return add_input_gradient(back, *product, Through{slope, activation});
  }
  const Tensor dy          = back.gradient(y);
  const std::int64_t total = y.num_elements();
  OpNode node{.op       = str(name(activation), "_backward"),
              .reads    = slope,
              .cost     = {.flops = static_cast<double>(total), .bytes_moved = 3 * static_cast<double>(y.num_bytes())},
              .parallel = total > cpu::elements_per_tile,
              .device   = true};
  const auto kernel = [activation]<class T>(const Context& context, const T* dy0, const Into<T>& into) {
    const T* const slopes = context.read<T>(0).data();
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device())
        return cuda::activation_gradient<T>(*queue, curve(activation), slopes, dy0, into);
    }
    cpu::for_tiles(context, into.size, cpu::elements_per_tile, [&](std::int64_t begin, std::int64_t end) {
      cpu::with_best([&] {
        cpu::put(into, begin, end - begin,
                 [by = slopes + begin, up = dy0 + begin](std::int64_t i) { return wide(up[i]) * wide(by[i]); });
      });
    });
  };
  if (back.owns_gradient(y) && !back.has_gradient(slope)) {
    node.accumulates = dy;
    back.add<AllTypes>(node, [kernel]<class T>(const Context& context, T) {
      const std::span<T> both = context.accumulate<T>();
      kernel(context, both.data(), Into<T>{both.data(), nullptr, static_cast<std::int64_t>(both.size())});
    });
    back.hand_over_gradient(slope, y);
  } else {
    node.reads.push_back(dy);
    back.add_gradient<AllTypes>(slope, node, [kernel]<class T>(const Context& context, Into<T> into) {
      kernel(context, context.read<T>(1).data(), into);
    });
  }
}

// --- the op ----------------------------------------------------------------------------------------------------------

void check(const Tape& tape, const Linear& spec) {
  check_tensor(tape, spec.name, "x", spec.x);
  const bool out_in = spec.layout == WeightLayout::out_in;
  const auto& shape = spec.weight.shape;
  if (shape.size() != 2 || shape[out_in ? 1 : 0] != spec.x.cols()) {
    throw Error(ErrorKind::config,
                str(spec.name, ": weight is ", to_string(shape), " for x of ", to_string(spec.x.shape),
                    out_in ? str(" (OUTx", spec.x.cols(), ")") : str(" (", spec.x.cols(), "xOUT)")));
  }
  if (spec.bias) check_same_shape(spec.name, "bias", spec.bias->shape, {shape[out_in ? 0 : 1]});
}

template <class T>
cuda::Operand<T> device_weight(const Context& context, std::size_t read, const Sizes& sizes, bool transposed) {
  return {context.read<T>(read).data(), sizes.out_in != transposed};
}

// c = x w + bias, y = activation(c). c and y may be the same; otherwise c keeps its value.
template <class T>
void multiply_and_activate(const DeviceQueue& queue, const cuda::Product<T>& product, Activation activation, T* y) {
  if (activation == Activation::gelu_tanh && cuda::multiply_gelu(queue, product, y)) return;
  cuda::multiply(queue, product);
  if (activation != Activation::none) cuda::activate<T>(queue, curve(activation), product.c.out, y, product.c.size);
}

// y = x w + bias and, with an activation, `activated` = activation(y). Without a backward pass both are the same
// tensor; otherwise y is overwritten with the slopes (on a device it keeps the activation's input).
void add_product(Tape& tape, const Linear& spec, const Sizes& sizes, const Tensor& y, const Tensor& activated) {
  const bool active = spec.activation != Activation::none, kept = activated.id != y.id;
  OpNode node =
      product(tape, active ? str("linear_", name(spec.activation)) : "linear", sizes.rows, sizes.out, sizes.in);
  if (active) {
    node.cost.flops += flops_per_activation * static_cast<double>(y.num_elements());
    if (kept) node.cost.bytes_moved += static_cast<double>(y.num_bytes());
  }
  node.reads = {spec.x, spec.weight};
  if (spec.bias) node.reads.push_back(*spec.bias);
  node.writes = y;
  if (kept) node.writes.push_back(activated);
  tape.add<AllTypes>(node, [sizes, kept, activation = spec.activation, biased = spec.bias.has_value()]<class T>(
                               const Context& context, T) {
    const std::span<T> out = context.write<T>(0);
    const Into<T> c{out.data(), nullptr, static_cast<std::int64_t>(out.size())};
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device()) {
        return multiply_and_activate<T>(*queue,
                                        {.m    = sizes.rows,
                                         .n    = sizes.out,
                                         .k    = sizes.in,
                                         .a    = {context.read<T>(0).data()},
                                         .b    = device_weight<T>(context, 1, sizes, false),
                                         .c    = c,
                                         .bias = biased ? context.read<T>(2).data() : nullptr},
                                        activation, kept ? context.write<T>(1).data() : out.data());
      }
    }
    Gemm<T> gemm{.m        = sizes.rows,
                 .n        = sizes.out,
                 .k        = sizes.in,
                 .a        = matrix(context.read<T>(0), sizes.in),
                 .b        = in_by_out(context.read<T>(1).data(), sizes),
                 .c        = c,
                 .c_stride = sizes.out,
                 .bias     = biased ? context.read<T>(2).data() : nullptr};
    if (activation != Activation::none) {
      gemm.y        = kept ? context.write<T>(1).data() : out.data();
      gemm.activate = with_function(activation, [kept]<class Function>(Function) {
        return kept ? &activate_keeping_slope<Function, T> : &activate<Function, T>;
      });
    }
    multiply(context, gemm);
  });
}

// c = a b * slope of the activation at x.
template <class T>
void multiply_by_slope(const DeviceQueue& queue, const cuda::Product<T>& product, Activation activation, const T* x) {
  if (activation == Activation::gelu_tanh && cuda::multiply_gelu_gradient(queue, product, x)) return;
  cuda::multiply(queue, product);
  const Into<T>& c = product.c;
  cuda::activation_gradient<T>(queue, curve(activation), x, c.out, {c.out, nullptr, c.size});
}

// dx = dy w^T. With `through`: the gradient of the activation's input, if x is the output of that activation.
void add_input_gradient(Tape& back, const InputGradient& of, const std::optional<Through>& through) {
  const auto& [spec, y, sizes] = of;
  OpNode node =
      product(back, through ? str("linear_input_gradient_", name(through->activation)) : "linear_input_gradient",
              sizes.rows, sizes.in, sizes.out);
  node.reads = {back.gradient(y), spec.weight};
  if (through) {
    node.reads.push_back(through->slope);
    node.cost.flops += static_cast<double>(through->slope.num_elements());
    node.cost.bytes_moved += static_cast<double>(through->slope.num_bytes());
  }
  const std::optional<Activation> activation = through ? std::optional(through->activation) : std::nullopt;
  const auto kernel = [sizes = sizes, activation]<class T>(const Context& context, Into<T> dx) {
    const T* const slope = activation ? context.read<T>(2).data() : nullptr;
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device()) {
        const cuda::Product<T> product{.m = sizes.rows,
                                       .n = sizes.in,
                                       .k = sizes.out,
                                       .a = {context.read<T>(0).data()},
                                       .b = device_weight<T>(context, 1, sizes, true),
                                       .c = dx};
        return activation ? multiply_by_slope<T>(*queue, product, *activation, slope) : cuda::multiply(*queue, product);
      }
    }
    multiply(context, Gemm<T>{.m        = sizes.rows,
                              .n        = sizes.in,
                              .k        = sizes.out,
                              .a        = matrix(context.read<T>(0), sizes.out),
                              .b        = transposed(in_by_out(context.read<T>(1).data(), sizes)),
                              .c        = dx,
                              .c_stride = sizes.in,
                              .times    = slope});
  };
  back.add_gradient<AllTypes>(through ? through->slope : spec.x, node, kernel);
}

void add_weight_gradients(Tape& back, const Linear& spec, const Tensor& y, const Sizes& sizes) {
  const Tensor dy      = back.gradient(y);
  const std::int64_t m = sizes.out_in ? sizes.out : sizes.in, n = sizes.out_in ? sizes.in : sizes.out;
  OpNode node = product(back, "linear_weight_gradient", m, n, sizes.rows);
  node.reads  = {spec.x, dy};
  back.add_weight_gradient<AllTypes>(
      spec.weight, node, [sizes, m, n]<class T, class Sum>(const Context& context, Into<T, Sum> into) {
        if constexpr (cuda::built) {
          if (const DeviceQueue* queue = context.device()) {
            return cuda::multiply(*queue,
                                  cuda::Product<T, Sum>{.m = m,
                                                        .n = n,
                                                        .k = sizes.rows,
                                                        .a = {context.read<T>(sizes.out_in ? 1 : 0).data(), true},
                                                        .b = {context.read<T>(sizes.out_in ? 0 : 1).data()},
                                                        .c = into});
          }
        }
        const Matrix<T> x = matrix(context.read<T>(0), sizes.in), of_y = matrix(context.read<T>(1), sizes.out);
        multiply(context, Gemm<T, Sum>{.m        = m,
                                       .n        = n,
                                       .k        = sizes.rows,
                                       .a        = transposed(sizes.out_in ? of_y : x),
                                       .b        = sizes.out_in ? x : of_y,
                                       .c        = into,
                                       .c_stride = n});
      });
  if (!spec.bias) return;
  const Cost cost{.flops = static_cast<double>(dy.num_elements()), .bytes_moved = static_cast<double>(dy.num_bytes())};
  back.add_weight_gradient<AllTypes>(
      *spec.bias,
      {.op              = "bias_gradient",
       .reads           = dy,
       .cost            = cost,
       .parallel        = sizes.out > cpu::columns_per_tile,
       .device          = true,
       .workspace_bytes = cuda::column_sum_workspace(sizes.rows, sizes.out,
                                                     static_cast<std::int64_t>(size_bytes(back.type())), false)},
      [sizes]<class T>(const Context& context, Into<T, Wide<T>> into) {
        const T* const of_y = context.read<T>().data();
        if constexpr (cuda::built) {
          if (const DeviceQueue* queue = context.device())
            return cuda::column_sum<T>(*queue, of_y, sizes.rows, sizes.out, std::nullopt, into);
        }
        cpu::for_columns(context, sizes.out, [&](std::int64_t begin, std::int64_t end) {
          cpu::column_sum<T>(of_y, sizes.out, std::nullopt, into, sizes.rows, begin, end);
        });
      });
}

}  // namespace

Tensor linear(Tape& tape, const Linear& spec) {
  check(tape, spec);
  const bool out_in = spec.layout == WeightLayout::out_in, active = spec.activation != Activation::none;
  const Sizes sizes{spec.x.rows(), spec.x.cols(), spec.weight.shape[out_in ? 0 : 1], out_in};
  TensorShape shape      = spec.x.shape;
  shape.back()           = sizes.out;
  const bool kept        = active && tape.records();
  const Tensor y         = tape.tensor(kept ? str(spec.name, " slope") : spec.name, shape);
  const Tensor activated = kept ? tape.tensor(spec.name, shape) : y;
  add_product(tape, spec, sizes, y, activated);

  tape.on_backward({.outputs = {y},
                    .input_gradients =
                        [spec, y, sizes](Tape& back) {
                          const InputGradient gradient{spec, y, sizes};
                          back.leave_gradient(spec.x, gradient,
                                              [gradient](Tape& later) { add_input_gradient(later, gradient, {}); });
                        },
                    .weight_gradients = [spec, y, sizes](Tape& back) { add_weight_gradients(back, spec, y, sizes); }});
  if (kept) {
    tape.on_backward({.outputs         = {activated},
                      .input_gradients = [=, activation = spec.activation](
                                             Tape& back) { add_activation_gradient(back, activation, y, activated); },
                      .takes_gradients = true});
  }
  return activated;
}

}  // namespace stepgraph
