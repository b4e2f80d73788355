#pragma once
#include <optional>
#include <string>
#include <type_traits>

#include "ops/cpu/into.hpp"
#include "ops/cpu/lanes.hpp"
#include "ops/cpu/norm.hpp"
#include "ops/cuda/norm.hpp"
#include "ops/tape/tape.hpp"

// What ops that norm rows have in common: internal to ops/.
namespace stepgraph {

// Both norms. One that is not centered, over the root mean square, has no bias.
struct NormParts {
  Weight weight;
  std::optional<Weight> bias;
  double eps;
  std::int64_t rows, width;
  Tensor scale, center;  // of each row; no center for an RMS norm
  bool wide_weights;     // those of a tape of two bytes are f32

  // Throws Error(config), naming the op, where x does not fit.
  NormParts(Tape& tape, const std::string& op, const Tensor& x, const Weight& weight_of_norm,
            const std::optional<Weight>& bias_of_norm, double epsilon);

  // f with a number of the weights' type.
  template <class T, class Function>
  void with_param(const Function& f) const {
    if constexpr (!std::is_same_v<T, Wide<T>>) {
      if (wide_weights) return f(Wide<T>{});
    }
    f(T{});
  }

  // Adds what the forward kernel reads and writes beside x and the normed; `reads` and `writes` are how many accesses
  // the node has before.
  void add_to(OpNode& node) const;
  template <class T, class Param>
  [[nodiscard]] cpu::Norm<T, Param> kernel(const Context& context, const T* x, T* normed, std::size_t reads,
                                           std::size_t writes) const {
    return {.width  = width,
            .x      = x,
            .weight = context.read<Param>(reads).data(),
            .bias   = bias ? context.read<Param>(reads + 1).data() : nullptr,
            .center = bias ? context.write<Wide<T>>(writes + 1).data() : nullptr,
            .scale  = context.write<Wide<T>>(writes).data(),
            .y      = normed,
            .eps    = eps};
  }

  // What a kernel is for the CPU, for a device.
  template <class T, class Param>
  [[nodiscard]] cuda::Norm<T, Param> device_kernel(const cpu::Norm<T, Param>& of) const {
    return {.rows   = rows,
            .width  = width,
            .x      = of.x,
            .weight = of.weight,
            .bias   = of.bias,
            .center = of.center,
            .scale  = of.scale,
            .y      = of.y,
            .eps    = of.eps};
  }
  template <class T, class Param>
  [[nodiscard]] cuda::NormBackward<T, Param> device_kernel(const cpu::NormBackward<T, Param>& of) const {
    return {.rows   = rows,
            .width  = width,
            .x      = of.x,
            .weight = of.weight,
            .center = of.center,
            .scale  = of.scale,
            .dy     = of.dy};
  }

  // A node of the backward pass: reads x, the normed's gradient, the scale and, last, the center. The input's gradient
  // needs the weight too, those of the weights do not: they may be made when it is not there any more.
  [[nodiscard]] OpNode backward_node(std::string op, const Tensor& x, const Tensor& gradient, double moved) const;
  [[nodiscard]] std::size_t num_backward_reads() const { return bias ? 4 : 3; }
  template <class T, class Param>
  [[nodiscard]] cpu::NormBackward<T, Param> backward_kernel(const Context& context) const {
    return {.width  = width,
            .x      = context.read<T>(0).data(),
            .weight = nullptr,
            .center = bias ? context.read<Wide<T>>(3).data() : nullptr,
            .scale  = context.read<Wide<T>>(2).data(),
            .dy     = context.read<T>(1).data()};
  }
  // Adds to the gradient of x.
  void add_input_gradient(Tape& back, const std::string& op, const Tensor& x, const Tensor& gradient) const;
  // The weight and, where there is one, the bias.
  [[nodiscard]] std::vector<Weight> weights() const;
};

}  // namespace stepgraph
