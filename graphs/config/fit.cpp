#include <numeric>
#include <string>

#include "engine/base/error.hpp"
#include "graphs/config/sections.hpp"
#include "graphs/layout/divisibility.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/search.hpp"
#include "graphs/step/pipeline.hpp"
#include "graphs/step/shard_units.hpp"

namespace stepgraph {
namespace {

// Replaces the subject of a library message by the key of the config.
template <class Check>
void at(std::string_view path, std::string_view subject, const Check& check) {
  try {
    check();
  } catch (const Error& error) {
    std::string_view what = error.what();
    if (what.starts_with(subject)) what.remove_prefix(subject.size());
    throw Error(error.kind(), str(path, ": ", what));
  }
}

// Sizes that must fit the layout. Vocabulary and MLP width can be any size of at least tp; ranks then get unequal
// parts.
struct Sizes {
  int layers                = 0;
  std::int64_t context      = 0;
  std::int64_t vocab        = 0;
  std::int64_t inner        = 0;  // 0: large enough
  TensorParallelSplit split = {};
};

Sizes sizes_of(const Gpt2Spec& spec) {
  return {spec.layers, spec.context, spec.vocab, spec.inner, {.heads = spec.heads, .kv_heads = spec.heads}};
}
Sizes sizes_of(const LlamaSpec& spec) {
  return {spec.layers,
          spec.context,
          spec.vocab,
          spec.inner,
          {.heads = spec.heads, .kv_heads = spec.kv_heads == 0 ? spec.heads : spec.kv_heads}};
}
Sizes sizes_of(const MlpSpec& spec) {
  return {spec.layers, spec.context, spec.vocab, spec.inner == 0 ? 4 * spec.width : spec.inner, {}};
}
Sizes sizes_of(const Model& model) {
  return {model.layers, model.context, model.vocab, model.inner, {.heads = model.heads, .kv_heads = model.kv_heads}};
}
Sizes sizes_of(const LoadFrom&) { return {}; }

// The stages of a schedule file are checked when the file is read.
void check_stages(const Plan& plan, int layers) {
  if (plan.pipeline.schedule.ends_with(".csv")) return;
  const int chunks              = num_chunks(plan.pipeline);
  const std::int64_t stages     = std::int64_t{plan.layout.pp} * chunks;
  const std::string product     = str("pp ", plan.layout.pp, " x chunks ", chunks);
  const std::vector<int>& split = plan.pipeline.split;
  if (!split.empty()) {
    const std::int64_t sum = std::accumulate(split.begin(), split.end(), std::int64_t{0});
    if (std::ssize(split) != stages)
      throw Error(ErrorKind::config, str("pipeline.split: ", split.size(), " stages, but ", product, " = ", stages,
                                         " (a number of layers for each stage)"));
    if (sum != layers)
      throw Error(ErrorKind::config, str("pipeline.split: ", sum, " layers in all, but the model has ", layers));
    return;
  }
  if (stages > layers)
    throw Error(ErrorKind::config, str("layout.pp: ", product, " = ", stages, " stages, but the model has ", layers,
                                       " layers (at most ", layers, " stages)"));
  if (plan.pipeline.balanced || layers % stages == 0) return;
  const std::string other =
      layers % chunks == 0 ? str(", or pp ", divisors_around(layers / chunks, plan.layout.pp)) : "";
  throw Error(ErrorKind::config, str("layout.pp: ", layers, " layers do not divide over ", stages, " stages (", product,
                                     "; ", multiples_around(layers, stages), " layers", other, ", or pipeline.split)"));
}

void check_model_fits(const Config& config, Sizes sizes) {
  const LayoutSpec& layout = config.plan.layout;
  if (config.batch.seq > sizes.context)
    throw Error(ErrorKind::config, str("batch.seq: ", config.batch.seq, " tokens are more than the model's context of ",
                                       sizes.context, " (at most ", sizes.context, ")"));
  sizes.split.tp = layout.tp;
  at("layout.tp", "tensor parallel: ", [&] { check_tensor_parallel(sizes.split); });
  for (const auto& [name, size] : {std::pair("vocab", sizes.vocab), std::pair("inner", sizes.inner)}) {
    if (size != 0 && size < layout.tp)
      throw Error(ErrorKind::config, str("layout.tp: ", layout.tp, " ranks cannot share the model's ", name, " of ",
                                         size, " (at most ", size, ")"));
  }
  check_stages(config.plan, sizes.layers);
}

}  // namespace

void check_fit(const Config& config) {
  const LayoutSpec& layout = config.plan.layout;
  at("layout.order", "layout: order ", [&] { Layout(LayoutSpec{.order = layout.order}); });
  at("layout", "layout: ", [&] { Layout{layout}; });
  check_shard_plan(config.plan);
  check_shard_keys(config.plan.shard);
  const int microbatches =
      num_microbatches({.global = config.batch.global, .micro = config.batch.micro, .dp = layout.dp});
  constexpr std::int64_t max_tokens = (std::int64_t{1} << 31) - 2;  // plus one: the last target
  if (std::int64_t{config.batch.global} * config.batch.seq > max_tokens)
    throw Error(ErrorKind::config, str("batch: global ", config.batch.global, " x seq ", config.batch.seq, " = ",
                                       std::int64_t{config.batch.global} * config.batch.seq,
                                       " tokens in one step (at most ", max_tokens, ")"));
  if (config.plan.pipeline.schedule == "auto") {
    at("pipeline", "", [&] {
      check_search({.ranks        = layout.pp,
                    .microbatches = microbatches,
                    .chunks       = num_chunks(config.plan.pipeline) == 1 ? SearchChunks::one : SearchChunks::two,
                    .limit        = config.plan.pipeline.limit});
    });
  } else if (!config.plan.pipeline.schedule.ends_with(".csv")) {
    const ScheduleKind kind = parse_schedule_kind(config.plan.pipeline.schedule);
    at("pipeline", "", [&] {
      check_schedule_spec(kind,
                          {.ranks = layout.pp, .microbatches = microbatches, .chunks = config.plan.pipeline.chunks});
    });
  }
  if (std::holds_alternative<LoadFrom>(config.model)) return;
  check_model_fits(config, std::visit([](const auto& spec) { return sizes_of(spec); }, config.model));
}

void check_fit(const Config& config, const Model& model) { check_model_fits(config, sizes_of(model)); }

}  // namespace stepgraph
