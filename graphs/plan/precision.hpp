#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

#include "engine/base/types.hpp"

// The types in which a step computes, stores and sends.
namespace stepgraph {

// Loss scaling: the gradient of the loss is multiplied by the scale before the backward pass, so that small gradients
// do not underflow in f16. The optimizer divides by the scale. When gradients overflow, the update is skipped: weights
// and optimizer state keep their bits.
enum class Scaling : std::uint8_t {
  automatic,  // dynamic where param or reduce is f16, else none
  none,
  fixed,
  dynamic,  // a skipped step halves the scale; growth_steps steps without a skip double it
};
struct LossScale {
  Scaling scaling                                            = Scaling::automatic;
  double value                                               = 65536;  // of the first step
  std::int64_t growth_steps                                  = 2000;
  friend bool operator==(const LossScale&, const LossScale&) = default;
};

struct PrecisionPlan {
  // Of weights, activations and their gradients: f32, f64, bf16 or f16. With bf16 and f16 the optimizer updates f32
  // masters, and gradients of weights are accumulated in f32.
  DType param = DType::f32;
  // Of gradients of weights while data-parallel ranks reduce them: bf16, or f16 with loss scaling; none: the type in
  // which they are accumulated, f64 with f64 and else f32.
  std::optional<DType> reduce = {};
  LossScale loss_scale        = {};
  // Reduced gradients stay in the type `reduce` until the optimizer reads them.
  bool keep_low_precision_grads = false;
  // Of the weights of norms: f32 beside bf16 or f16; none: the same as param.
  std::optional<DType> norm = {};
  // A type that is not set equals the type that it follows.
  friend bool operator==(const PrecisionPlan& a, const PrecisionPlan& b);

  [[nodiscard]] bool has_f16() const noexcept { return param == DType::f16 || reduce == DType::f16; }
  [[nodiscard]] Scaling usual_scaling() const noexcept { return has_f16() ? Scaling::dynamic : Scaling::none; }
  [[nodiscard]] Scaling scaling() const noexcept {  // never automatic
    return loss_scale.scaling == Scaling::automatic ? usual_scaling() : loss_scale.scaling;
  }
  [[nodiscard]] bool scales() const noexcept { return scaling() != Scaling::none; }
  [[nodiscard]] DType reduce_type() const noexcept;
  [[nodiscard]] DType norm_type() const noexcept { return norm.value_or(param); }
};

// Throws Error(config) where the types do not fit together. Messages use the names of configs.
void check_precision(const PrecisionPlan& precision);

// "fp32": the name in configs.
[[nodiscard]] std::string_view config_name(DType type) noexcept;

}  // namespace stepgraph
