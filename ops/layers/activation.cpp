#include "ops/layers/activation.hpp"

#include "ops/cpu/activation.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/layers/activation.hpp"

namespace stepgraph {
namespace {

// Estimated flops per element: an exponential costs about a dozen multiplications.
constexpr double flops_per_element = 20;

Cost cost(const Tensor& x, double tensors_moved) {
  return {.flops       = flops_per_element * static_cast<double>(x.num_elements()),
          .bytes_moved = tensors_moved * static_cast<double>(x.num_bytes())};
}

void check_type(const Tape& tape, const Tensor& x, std::string_view op) {
  if (x.type == tape.type()) return;
  throw Error(ErrorKind::config, str(op, ": x must have the tape's type ", tape.type(), ", not ", x.type));
}

// y = Function(x), element by element. `curve` is the same function for the CUDA kernel.
template <class Function>
Tensor elementwise(Tape& tape, const Tensor& x, const std::string& op, cuda::Curve curve) {
  check_type(tape, x, op);
  const Tensor y = tape.tensor(op, x.shape);
  tape.add<AllTypes>({.op = op, .reads = x, .writes = y, .cost = cost(x, 2), .parallel = true, .device = true},
                     [curve]<class T>(const Context& context, T) {
                       const T* from = context.read<T>().data();
                       const auto to = context.write<T>();
                       if constexpr (cuda::built) {
                         if (const DeviceQueue* queue = context.device())
                           return cuda::activate(*queue, curve, from, to.data(), std::ssize(to));
                       }
                       const Into<T> out{to.data(), nullptr, std::ssize(to)};
                       cpu::for_tiles(
                           context, out.size, cpu::elements_per_tile, [&](std::int64_t begin, std::int64_t end) {
                             cpu::for_blocks(from, begin, end, cpu::values<Function, T>,
                                             [&](std::int64_t at, std::int64_t count, const Wide<T>* y0) {
                                               cpu::put(out, at, count, [y0](std::int64_t i) { return y0[i]; });
                                             });
                           });
                     });
  tape.on_backward(
      {.outputs = {y}, .input_gradients = [=](Tape& back) {
         const Tensor dy = back.gradient(y);
         back.add_gradient<AllTypes>(
             x, {.op = op + "_backward", .reads = {x, dy}, .cost = cost(x, 3), .parallel = true, .device = true},
             [curve]<class T>(const Context& context, Into<T> dx) {
               const T *from = context.read<T>(0).data(), *up = context.read<T>(1).data();
               if constexpr (cuda::built) {
                 if (const DeviceQueue* queue = context.device())
                   return cuda::activation_gradient(*queue, curve, from, up, dx);
               }
               cpu::for_tiles(context, dx.size, cpu::elements_per_tile, [&](std::int64_t begin, std::int64_t end) {
                 cpu::for_blocks(from, begin, end, cpu::slopes<Function, T>,
                                 [&](std::int64_t at, std::int64_t count, const Wide<T>* slope) {
                                   cpu::put(dx, at, count,
                                            [slope, dy0 = up + at](std::int64_t i) { return wide(dy0[i]) * slope[i]; });
                                 });
               });
             });
       }});
  return y;
}

// Row `row` of both halves of [gate | up].
template <class T>
struct GateUp {
  const T *gate, *up;
};
template <class T>
GateUp<T> gate_up_row(const T* x, std::int64_t row, std::int64_t width) {
  return {x + 2 * width * row, x + 2 * width * row + width};
}

}  // namespace

Tensor gelu(Tape& tape, const Tensor& x, Gelu form) {
  return form == Gelu::tanh ? elementwise<cpu::GeluTanh>(tape, x, "gelu", cuda::Curve::gelu_tanh)
                            : elementwise<cpu::GeluExact>(tape, x, "gelu_exact", cuda::Curve::gelu_exact);
}

Tensor silu(Tape& tape, const Tensor& x) { return elementwise<cpu::Silu>(tape, x, "silu", cuda::Curve::silu); }

Tensor swiglu(Tape& tape, const Tensor& gate_up) {
  check_type(tape, gate_up, "swiglu");
  if (gate_up.shape.empty() || gate_up.cols() % 2 != 0) {
    throw Error(ErrorKind::config, str("swiglu: rows of ", gate_up.cols(), " elements in ", to_string(gate_up.shape),
                                       " (an even number: gate, then up)"));
  }
  const std::int64_t rows = gate_up.rows(), width = gate_up.cols() / 2;
  TensorShape shape = gate_up.shape;
  shape.back()      = width;
  const Tensor y    = tape.tensor("swiglu", shape);
  tape.add<AllTypes>(
      {.op = "swiglu", .reads = gate_up, .writes = y, .cost = cost(y, 3), .parallel = true, .device = true},
      [=]<class T>(const Context& context, T) {
        const T* x = context.read<T>().data();
        T* to      = context.write<T>().data();
        if constexpr (cuda::built) {
          if (const DeviceQueue* queue = context.device()) return cuda::swiglu(*queue, x, to, rows, width);
        }
        cpu::for_tiles(context, rows, cpu::rows_per_tile(width), [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t row = begin; row < end; ++row) {
            const GateUp<T> in = gate_up_row(x, row, width);
            const Into<T> out{to + row * width, nullptr, width};
            cpu::for_blocks(in.gate, 0, width, cpu::values<cpu::Silu, T>,
                            [&](std::int64_t at, std::int64_t count, const Wide<T>* silu_of_gate) {
                              cpu::put(out, at, count, [silu_of_gate, up = in.up + at](std::int64_t i) {
                                return silu_of_gate[i] * wide(up[i]);
                              });
                            });
          }
        });
      });
  tape.on_backward(
      {.outputs = {y}, .input_gradients = [=](Tape& back) {
         const Tensor dy = back.gradient(y);
         back.add_gradient<AllTypes>(
             gate_up,
             {.op = "swiglu_backward", .reads = {gate_up, dy}, .cost = cost(y, 5), .parallel = true, .device = true},
             [=]<class T>(const Context& context, Into<T> dx) {
               const T *x = context.read<T>(0).data(), *gradient = context.read<T>(1).data();
               if constexpr (cuda::built) {
                 if (const DeviceQueue* queue = context.device())
                   return cuda::swiglu_gradient(*queue, x, gradient, dx, rows, width);
               }
               cpu::for_tiles(context, rows, cpu::rows_per_tile(width), [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) {
                   const GateUp<T> in         = gate_up_row(x, row, width);
                   const T* above             = gradient + row * width;
                   const std::int64_t of_gate = 2 * width * row, of_up = of_gate + width;
                   cpu::for_blocks(in.gate, 0, width, cpu::slopes<cpu::Silu, T>,
                                   [&](std::int64_t at, std::int64_t count, const Wide<T>* slope) {
                                     cpu::put(dx, of_gate + at, count,
                                              [slope, dy0 = above + at, up = in.up + at](std::int64_t i) {
                                                return wide(dy0[i]) * wide(up[i]) * slope[i];
                                              });
                                   });
                   cpu::for_blocks(in.gate, 0, width, cpu::values<cpu::Silu, T>,
                                   [&](std::int64_t at, std::int64_t count, const Wide<T>* silu_of_gate) {
                                     cpu::put(dx, of_up + at, count, [silu_of_gate, dy0 = above + at](std::int64_t i) {
                                       return wide(dy0[i]) * silu_of_gate[i];
                                     });
                                   });
                 }
               });
             });
       }});
  return y;
}

}  // namespace stepgraph
