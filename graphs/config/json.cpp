#include "graphs/config/config.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/step/pipeline.hpp"

namespace stepgraph {
namespace {

JsonValue pipeline_json(const PipelinePlan& pipeline) {
  JsonValue out = {{"schedule", pipeline.schedule}, {"chunks", num_chunks(pipeline)}};
  out.set("split", !pipeline.split.empty() ? JsonValue(pipeline.split) : pipeline.balanced ? "balanced" : "even");
  if (pipeline.limit_bytes > 0) {
    out.set("limit", str(pipeline.limit_bytes));
  } else {
    out.set("limit", pipeline.limit);
  }
  return out;
}

JsonValue model_json(const Gpt2Spec& spec) {
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

JsonValue model_json(const LlamaSpec& spec) {
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

JsonValue model_json(const MlpSpec& spec) {
  return {{"kind", "mlp"},
          {"layers", spec.layers},
          {"width", spec.width},
          {"context", spec.context},
          {"vocab", spec.vocab},
          {"inner", spec.inner},
          {"init_deviation", spec.init_deviation}};
}

JsonValue model_json(const LoadFrom& source) { return {{"load", source.folder}, {"dropout", source.dropout}}; }

JsonValue names_json(const std::vector<std::filesystem::path>& paths) {
  std::vector<std::string> names;
  for (const std::filesystem::path& path : paths) names.push_back(path.string());
  return names.size() == 1 ? JsonValue(names.front()) : JsonValue(names);
}

JsonValue source_json(const TokenFiles& files) {
  JsonValue out = {{"tokens", names_json(files.paths)}};
  if (files.type) out.set("type", to_string(*files.type));
  return out;
}
JsonValue source_json(const TextFiles& files) { return {{"text", names_json(files.paths)}}; }
JsonValue source_json(const SyntheticTokens& tokens) { return {{"synthetic", tokens.seed}}; }

// Of a run's data, or of the data of its validation, which has fewer keys.
JsonValue data_json(const DataSpec& spec, bool of_run) {
  JsonValue out = std::visit([](const auto& source) { return source_json(source); }, spec.source);
  if (of_run && !std::holds_alternative<SyntheticTokens>(spec.source))
    out.add({{"epochs", spec.epochs}, {"shuffle", spec.shuffle}, {"validation", spec.validation}});
  if (spec.ignore) out.set("ignore", *spec.ignore);
  return out;
}

JsonValue eval_json(const EvalPlan& plan) {
  JsonValue out = JsonValue::object();
  if (plan.data) out.set("data", data_json(*plan.data, false));
  out.set("every", plan.every);
  out.set("steps", plan.steps);
  return out;
}

JsonValue groups_json(const std::vector<OptimizerGroup>& groups) {
  JsonValue list = JsonValue::list();
  for (const OptimizerGroup& group : groups) {
    JsonValue& item = list.items.emplace_back(JsonValue{{"match", group.match}});
    if (group.lr) item.set("lr", *group.lr);
    if (group.weight_decay) item.set("weight_decay", *group.weight_decay);
  }
  return list;
}

JsonValue optimizer_json(const OptimizerPlan& plan) {
  JsonValue out = {{"kind", plan.kind == OptimizerKind::sgd ? "sgd" : "adamw"}, {"lr", plan.lr}};
  if (plan.kind == OptimizerKind::sgd) {
    out.set("momentum", plan.momentum);
  } else {
    out.set("beta1", plan.beta1);
    out.set("beta2", plan.beta2);
    out.set("eps", plan.eps);
  }
  out.set("weight_decay", plan.weight_decay);
  out.set("clip", plan.clip);
  out.set("schedule", JsonValue{{"kind", to_string(plan.schedule.kind)},
                                {"warmup", plan.schedule.warmup},
                                {"decay", plan.schedule.decay},
                                {"steps", plan.schedule.steps},
                                {"min", plan.schedule.min}});
  out.set("groups", groups_json(plan.groups));
  return out;
}

JsonValue shard_json(const ShardPlan& plan) {
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

JsonValue offload_json(const OffloadPlan& plan) {
  return {{"params", plan.params},
          {"grads", plan.grads},
          {"optimizer", plan.optimizer},
          {"activations", plan.activations},
          {"strategy", to_string(plan.strategy)},
          {"device_bytes", plan.device_bytes},
          {"device_param_bytes", plan.device_param_bytes},
          {"host_bytes", plan.host_bytes},
          {"disk_bytes", plan.disk_bytes},
          {"disk", plan.disk},
          {"slots", plan.slots},
          {"async", plan.async},
          {"overlap", plan.overlap},
          {"pinned", plan.pinned},
          {"compress", to_string(plan.compress)}};
}

JsonValue precision_json(const PrecisionPlan& plan) {
  JsonValue out    = {{"param", config_name(plan.param)}, {"reduce", config_name(plan.reduce_type())}};
  const auto scale = plan.scaling();
  if (scale == Scaling::fixed) {
    out.set("loss_scale", plan.loss_scale.value);
  } else {
    out.set("loss_scale", scale == Scaling::dynamic ? "dynamic" : "none");
  }
  out.set("keep_low_precision_grads", plan.keep_low_precision_grads);
  out.set("norm", config_name(plan.norm_type()));
  return out;
}

}  // namespace

std::string to_json(const Config& config) {
  const Plan& plan         = config.plan;
  const LayoutSpec& layout = plan.layout;
  JsonValue out            = {
                 {"model", std::visit([](const auto& source) { return model_json(source); }, config.model)},
                 {"data", data_json(config.data, true)},
                 {"batch", {{"global", config.batch.global}, {"micro", config.batch.micro}, {"seq", config.batch.seq}}},
                 {"layout",
                  {{"dp", layout.dp},
                   {"tp", layout.tp},
                   {"pp", layout.pp},
                   {"order", layout.order},
                   {"devices_per_node", layout.devices_per_node},
                   {"sequence_parallel", layout.sequence_parallel}}},
                 {"pipeline", pipeline_json(plan.pipeline)},
                 {"shard", shard_json(plan.shard)},
                 {"offload", offload_json(plan.offload)},
                 {"update", {{"mode", to_string(plan.update.mode)}, {"max_staleness", plan.update.max_staleness}}},
                 {"precision", precision_json(plan.precision)},
                 {"optimizer", optimizer_json(plan.optimizer)},
                 {"recompute", to_string(plan.recompute)},
                 {"memory",
                  {{"limit_bytes", plan.memory_limit_bytes},
                   {"reuse", to_string(plan.reuse)},
                   {"preset", to_string(config.preset)}}},
                 {"comm",
                  {{"algorithm", to_string(config.backend == "nccl" ? config.nccl_algorithm : plan.algorithm)},
                   {"timeout_ms", config.timeout_ms},
                   {"machine", config.machine},
                   {"exact", config.exact}}},
                 {"checkpoint",
                  {{"folder", config.checkpoint.folder},
                   {"every", config.checkpoint.every},
                   {"every_s", config.checkpoint.every_s},
                   {"keep", config.checkpoint.keep},
                   {"async", config.checkpoint.async}}},
                 {"eval", eval_json(config.eval)},
                 {"world", {{"rank", config.world.rank}, {"size", config.world.size}, {"address", config.world.address}}},
                 {"seed", config.seed},
                 {"threads", config.threads},
                 {"backend", config.backend},
  };
  // Only if given: with another backend it may be wrong.
  if (config.devices) out.set("devices", config.devices->empty() ? JsonValue("all") : JsonValue(*config.devices));
  return json_line(out);
}

}  // namespace stepgraph
