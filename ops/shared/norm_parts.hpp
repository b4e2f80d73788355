#pragma once
#include <optional>
#include <string>
#include <type_traits>

#include "ops/cpu/into.hpp"
#include "ops/cpu/lanes.hpp"
#include "ops/cpu/norm.hpp"
#include "ops/cuda/common/workspace_bytes.hpp"
#include "ops/cuda/layers/norm.hpp"
#include "ops/tape/tape.hpp"

// Shared by ops that normalise rows. Internal to ops/.
namespace stepgraph {

// Layer norm and RMS norm. An RMS norm is not centered and has no bias.
struct NormParts {
  Weight weight;
  std::optional<Weight> bias;
  double eps;
  std::int64_t rows, width;
  Tensor scale, center;  // per row; an RMS norm has no center
  bool wide_weights;     // weights of a 2-byte tape are stored as f32

  // Throws Error(config) that names the op if x does not fit.
  NormParts(Tape& tape, const std::string& op, const Tensor& x, const Weight& weight_of_norm,
            const std::optional<Weight>& bias_of_norm, double epsilon);

  // Calls f with a value of the weights' element type.
  template <class T, class Function>
  void with_param(const Function& f) const {
    if constexpr (!std::is_same_v<T, Wide<T>>) {
      if (wide_weights) return f(Wide<T>{});
    }
    f(T{});
  }

  // Adds the accesses of the forward kernel beyond x and the output. In kernel(), `reads` and `writes` are the numbers
  // of accesses that the node had before.
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

  // Translates a CPU kernel's arguments for the CUDA kernel.
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

  // A node of the backward pass: reads x, the output's gradient, the scale and, last, the center. The input gradient
  // also needs the weight. The weight gradients do not, so they can run after the weight has been freed.
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
  // A node of the weight gradients.
  [[nodiscard]] OpNode weight_node(std::string op, const Tensor& x, const Tensor& gradient, double moved) const;
  // Adds to the gradient of x.
  void add_input_gradient(Tape& back, const std::string& op, const Tensor& x, const Tensor& gradient) const;
  // The weight and, for a layer norm, the bias.
  [[nodiscard]] std::vector<Weight> weights() const;
};

}  // namespace stepgraph
