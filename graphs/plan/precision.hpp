#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

#include "engine/base/types.hpp"

// In which types a step computes, keeps and sends what.
namespace stepgraph {

// What the gradient of the loss is multiplied with before backward begins, so that small gradients are not lost in f16.
// The optimizer divides by it again; a step whose gradients overflow is skipped: weights and optimizer state keep their
// bits.
enum class Scaling : std::uint8_t {
  automatic,  // dynamic where anything is f16, else none
  none,
  fixed,
  dynamic,  // a skipped step halves the scale, growth_steps good ones in a row double it
};
struct LossScale {
  Scaling scaling                                            = Scaling::automatic;
  double value                                               = 65536;  // the first step's
  std::int64_t growth_steps                                  = 2000;
  friend bool operator==(const LossScale&, const LossScale&) = default;
};

struct PrecisionPlan {
  // Of weights, activations and their gradients: f32, f64, bf16 or f16. With those of two bytes the optimizer works on
  // f32 masters, and gradients of weights are summed in f32.
  DType param = DType::f32;
  // In which gradients of weights travel between data-parallel ranks: as they are summed, bf16 or, scaled, f16.
  DType reduce         = DType::f32;
  LossScale loss_scale = {};
  // Gradients stay in the type they travelled in until the optimizer reads them: nothing widens them again.
  bool keep_low_precision_grads = false;
  // Of the weights of norms: f32 beside a param of two bytes; none: as param.
  std::optional<DType> norm                                          = {};
  friend bool operator==(const PrecisionPlan&, const PrecisionPlan&) = default;

  [[nodiscard]] bool has_f16() const noexcept { return param == DType::f16 || reduce == DType::f16; }
  [[nodiscard]] Scaling usual_scaling() const noexcept { return has_f16() ? Scaling::dynamic : Scaling::none; }
  [[nodiscard]] Scaling scaling() const noexcept {  // never automatic
    return loss_scale.scaling == Scaling::automatic ? usual_scaling() : loss_scale.scaling;
  }
  [[nodiscard]] bool scales() const noexcept { return scaling() != Scaling::none; }
  [[nodiscard]] DType norm_type() const noexcept { return norm.value_or(param); }
};

// Throws Error(config) where they do not go together, with names as configs have them.
void check_precision(const PrecisionPlan& precision);

// "fp32": as configs have it.
[[nodiscard]] std::string_view config_name(DType type) noexcept;

}  // namespace stepgraph
