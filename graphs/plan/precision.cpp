#include "graphs/plan/precision.hpp"

#include <cmath>
#include <string>

#include "engine/base/error.hpp"
#include "ops/tape/number.hpp"

namespace stepgraph {
namespace {

[[noreturn]] void refuse(std::string_view key, const std::string& why) {
  throw Error(ErrorKind::config, str("precision.", key, ": ", why));
}

}  // namespace

DType PrecisionPlan::reduce_type() const noexcept {
  return reduce.value_or(param == DType::f64 ? DType::f64 : DType::f32);
}

bool operator==(const PrecisionPlan& a, const PrecisionPlan& b) {
  return a.param == b.param && a.reduce_type() == b.reduce_type() && a.loss_scale == b.loss_scale &&
         a.keep_low_precision_grads == b.keep_low_precision_grads && a.norm_type() == b.norm_type();
}

std::string_view config_name(DType type) noexcept {
  if (type == DType::f64) return "fp64";
  if (type == DType::bf16) return "bf16";
  return type == DType::f16 ? "fp16" : "fp32";
}

void check_precision(const PrecisionPlan& precision) {
  const DType param = precision.param, reduce = precision.reduce_type();
  if (!is_float(param)) refuse("param", str(param, " (fp32, fp64, bf16 or fp16)"));
  if (!is_float(reduce)) refuse("reduce", str(reduce, " (fp32, fp64, bf16 or fp16)"));
  const std::string beside = str(" with param ", config_name(param));
  if (reduce != wide_type(param) && (!is_half(reduce) || param == DType::f64)) {
    refuse("reduce", str(config_name(reduce), beside, param == DType::f64 ? " (fp64)" : " (fp32, bf16 or fp16)"));
  }
  if (reduce == DType::f16 && !precision.scales())
    refuse("reduce", "fp16 reduce without scaling (precision.loss_scale dynamic or a number, or reduce fp32 or bf16)");
  const LossScale& scale = precision.loss_scale;
  if (!(scale.value > 0) || !std::isfinite(scale.value)) refuse("loss_scale", str(scale.value, " (above 0)"));
  if (scale.growth_steps < 1) refuse("loss_scale", str("growth_steps ", scale.growth_steps, " (at least 1)"));
  if (precision.keep_low_precision_grads && !is_half(reduce)) {
    refuse("keep_low_precision_grads", str("true, but gradients are reduced in ", config_name(reduce),
                                           " (false, or precision.reduce bf16 or fp16)"));
  }
  if (const DType norm = precision.norm_type(); norm != param && !(is_half(param) && norm == DType::f32)) {
    refuse("norm", str(is_float(norm) ? config_name(norm) : to_string(norm), beside, " (", config_name(param),
                       is_half(param) ? " or fp32)" : ")"));
  }
}

}  // namespace stepgraph
