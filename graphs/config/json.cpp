#include <nlohmann/json.hpp>

#include "graphs/config/config.hpp"

namespace stepgraph {
namespace {

using Json = nlohmann::ordered_json;

Json model_json(const Gpt2Spec& spec) {
  return {{"kind", "gpt2"},
          {"layers", spec.layers},
          {"width", spec.width},
          {"heads", spec.heads},
          {"context", spec.context},
          {"vocab", spec.vocab},
          {"inner", spec.inner},
          {"activation", spec.activation == Gelu::tanh ? "gelu_new" : "gelu"},
          {"eps", spec.eps},
          {"init_deviation", spec.init_deviation},
          {"tied", spec.tied},
          {"scale_attention", spec.scale_attention},
          {"scale_attention_by_layer", spec.scale_attention_by_layer},
          {"dropout", spec.dropout}};
}

Json model_json(const LlamaSpec& spec) {
  return {{"kind", "llama"},
          {"layers", spec.layers},
          {"width", spec.width},
          {"heads", spec.heads},
          {"kv_heads", spec.kv_heads},
          {"head_size", spec.head_size},
          {"context", spec.context},
          {"vocab", spec.vocab},
          {"inner", spec.inner},
          {"eps", spec.eps},
          {"rope_theta", spec.rope_theta},
          {"init_deviation", spec.init_deviation},
          {"tied", spec.tied},
          {"attention_bias", spec.attention_bias},
          {"mlp_bias", spec.mlp_bias},
          {"dropout", spec.dropout}};
}

Json model_json(const MlpSpec& spec) {
  return {{"kind", "mlp"},
          {"layers", spec.layers},
          {"width", spec.width},
          {"context", spec.context},
          {"vocab", spec.vocab},
          {"inner", spec.inner},
          {"init_deviation", spec.init_deviation}};
}

Json model_json(const LoadFrom& source) { return {{"load", source.folder}, {"dropout", source.dropout}}; }

Json data_json(const TokenFile& file) { return {{"tokens", file.path.string()}}; }
Json data_json(const TextFile& file) { return {{"text", file.path.string()}}; }
Json data_json(const SyntheticTokens& tokens) { return {{"synthetic", tokens.seed}}; }

Json optimizer_json(const OptimizerPlan& plan) {
  Json out = {{"kind", plan.kind == OptimizerKind::sgd ? "sgd" : "adamw"}, {"lr", plan.lr}};
  if (plan.kind == OptimizerKind::sgd) {
    out["momentum"] = plan.momentum;
  } else {
    out["beta1"] = plan.beta1;
    out["beta2"] = plan.beta2;
    out["eps"]   = plan.eps;
  }
  out["weight_decay"] = plan.weight_decay;
  out["clip"]         = plan.clip;
  return out;
}

Json shard_json(const ShardPlan& plan) {
  return {{"strategy", to_string(plan.strategy)},
          {"reduce", to_string(plan.reduce)},
          {"prefetch", to_string(plan.prefetch)},
          {"forward_prefetch", plan.forward_prefetch},
          {"slots", plan.slots},
          {"grad_slots", plan.grad_slots},
          {"units", plan.units},
          {"min_params", plan.min_params},
          {"flat", plan.flat},
          {"group", plan.group},
          {"reshard_after_forward", plan.reshard_after_forward},
          {"reshard_group", plan.reshard_group},
          {"keep_between_microbatches", plan.keep_between_microbatches},
          {"bucket_mb", plan.bucket_mb},
          {"first_bucket_mb", plan.first_bucket_mb},
          {"bucket_views", plan.bucket_views},
          {"delay_all_reduce", plan.delay_all_reduce},
          {"find_unused_parameters", plan.find_unused_parameters},
          {"static_graph", plan.static_graph},
          {"reduction", to_string(plan.reduction)}};
}

Json precision_json(const PrecisionPlan& plan) {
  Json out         = {{"param", config_name(plan.param)}, {"reduce", config_name(plan.reduce)}};
  const auto scale = plan.scaling();
  if (scale == Scaling::fixed) {
    out["loss_scale"] = plan.loss_scale.value;
  } else {
    out["loss_scale"] = scale == Scaling::dynamic ? "dynamic" : "none";
  }
  out["keep_low_precision_grads"] = plan.keep_low_precision_grads;
  out["norm"]                     = config_name(plan.norm_type());
  return out;
}

}  // namespace

std::string to_json(const Config& config) {
  const Plan& plan         = config.plan;
  const LayoutSpec& layout = plan.layout;
  const Json out           = {
                {"model", std::visit([](const auto& source) { return model_json(source); }, config.model)},
                {"data", std::visit([](const auto& data) { return data_json(data); }, config.data)},
                {"batch", {{"global", config.batch.global}, {"micro", config.batch.micro}, {"seq", config.batch.seq}}},
                {"layout",
                 {{"dp", layout.dp},
                  {"tp", layout.tp},
                  {"pp", layout.pp},
                  {"order", layout.order},
                  {"devices_per_node", layout.devices_per_node},
                  {"sequence_parallel", layout.sequence_parallel}}},
                {"pipeline", {{"schedule", plan.pipeline.schedule}, {"chunks", plan.pipeline.chunks}}},
                {"shard", shard_json(plan.shard)},
                {"offload", {{"params", false}, {"grads", false}, {"optimizer", false}}},
                {"precision", precision_json(plan.precision)},
                {"optimizer", optimizer_json(plan.optimizer)},
                {"recompute", to_string(plan.recompute)},
                {"memory",
                 {{"limit_bytes", plan.memory_limit_bytes},
                  {"reuse", to_string(plan.reuse)},
                  {"preset", to_string(config.preset)}}},
                {"comm", {{"algorithm", to_string(plan.algorithm)}, {"timeout_ms", config.timeout_ms}}},
                {"seed", config.seed},
                {"threads", config.threads},
                {"backend", config.backend},
  };
  // A file's name need not be UTF-8.
  return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace stepgraph
