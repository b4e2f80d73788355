#include "graphs/models/gpt2.hpp"

#include <cmath>

#include "engine/base/error.hpp"
#include "graphs/models/huggingface.hpp"
#include "graphs/models/weights.hpp"
#include "ops/layers/attention.hpp"
#include "ops/layers/dropout.hpp"
#include "ops/layers/embedding.hpp"
#include "ops/layers/linear.hpp"
#include "ops/layers/norm.hpp"
#include "ops/layers/residual.hpp"
#include "ops/layers/residual_norm.hpp"
#include "ops/tape/tensor_parallel.hpp"

namespace stepgraph {
namespace {

constexpr const char* token_weight = "transformer.wte.weight";

Block embedding_block(const Gpt2Spec& spec) {
  const Init init{.deviation = spec.init_deviation};
  return {
      .name    = "embedding",
      .weights = {{.name = token_weight, .shape = {spec.vocab, spec.width}, .cut = true, .init = init},
                  {.name = "transformer.wpe.weight", .shape = {spec.context, spec.width}, .cut = true, .init = init}},
      .forward = [vocab = spec.vocab, context = spec.context, rate = spec.dropout](Tape& tape, const Tensor& tokens) {
        const auto begin = [&](std::int64_t size) { return tp_range(size, tape.tp().size, tape.tp().index).begin; };
        const Tensor x =
            embedding(tape, {.tokens = tokens, .weight = tape.weight(token_weight), .vocab_begin = begin(vocab)});
        const Tensor sum = tp_sum(tape, positional_embedding(tape, {.x      = x,
                                                                    .weight = tape.weight("transformer.wpe.weight"),
                                                                    .position_begin = begin(context)}));
        return dropout(tape, sum, {.rate = rate, .site = "transformer.drop"});
      }};
}

std::vector<WeightSpec> layer_weights(const Gpt2Spec& spec, const std::string& prefix) {
  const std::int64_t width = spec.width, inner = spec.inner, heads = spec.heads;
  const Init normal{.deviation = spec.init_deviation}, zeros{}, ones{.constant = 1},
      branch_end{.deviation = spec.init_deviation / std::sqrt(2.0 * spec.layers)};
  const auto queries_keys_values = [&](const std::string& tensor) {
    std::vector<TensorSection> sections;
    for (int i = 0; i < 3; ++i)
      sections.push_back({.tensor = tensor, .begin = i * width, .size = width, .num_heads = heads});
    return sections;
  };
  const std::string qkv = prefix + "attn.c_attn.weight", qkv_bias = prefix + "attn.c_attn.bias",
                    proj = prefix + "attn.c_proj.weight";
  const auto vector      = [&](const std::string& name, const Init& init) {
    return WeightSpec{.name = prefix + name, .shape = {width}, .init = init, .norm = name.starts_with("ln_")};
  };
  return {
      vector("ln_1.weight", ones),
      vector("ln_1.bias", zeros),
      {.name     = qkv,
       .shape    = {width, 3 * width},
       .dim      = 1,
       .cut      = true,
       .sections = queries_keys_values(qkv),
       .init     = normal},
      {.name = qkv_bias, .shape = {3 * width}, .cut = true, .sections = queries_keys_values(qkv_bias), .init = zeros},
      {.name     = proj,
       .shape    = {width, width},
       .cut      = true,
       .sections = {{.tensor = proj, .size = width, .num_heads = heads}},
       .init     = branch_end},
      vector("attn.c_proj.bias", zeros),
      vector("ln_2.weight", ones),
      vector("ln_2.bias", zeros),
      {.name = prefix + "mlp.c_fc.weight", .shape = {width, inner}, .dim = 1, .cut = true, .init = normal},
      {.name = prefix + "mlp.c_fc.bias", .shape = {inner}, .cut = true, .init = zeros},
      {.name = prefix + "mlp.c_proj.weight", .shape = {inner, width}, .cut = true, .init = branch_end},
      vector("mlp.c_proj.bias", zeros)};
}

Block layer_block(const Gpt2Spec& spec, int layer) {
  const std::string prefix = str("transformer.h.", layer, ".");
  return {.name    = str("layer", layer),
          .layer   = layer,
          .weights = layer_weights(spec, prefix),
          .forward = [spec, prefix, layer](Tape& tape, const Tensor& x) {
            const auto weight   = [&](const char* name) { return tape.weight(prefix + name); };
            const auto into_out = [&](const char* name, const Tensor& in, const char* weights, const char* bias,
                                      Activation activation = Activation::none) {
              return linear(tape, {.x          = in,
                                   .weight     = weight(weights),
                                   .bias       = bias == nullptr ? std::nullopt : std::optional(weight(bias)),
                                   .layout     = WeightLayout::in_out,
                                   .activation = activation,
                                   .name       = name});
            };
            const auto drop = [&](const char* site) { return Dropout{.rate = spec.dropout, .site = prefix + site}; };
            const Activation gelu    = spec.activation == Gelu::tanh ? Activation::gelu_tanh : Activation::gelu_exact;
            const std::int64_t heads = spec.heads / tape.tp().size, head_size = spec.width / spec.heads;
            double scale = spec.scale_attention ? 1 / std::sqrt(static_cast<double>(head_size)) : 1;
            if (spec.scale_attention_by_layer) scale /= layer + 1;

            Tensor h = layer_norm(
                tape, {.x = x, .weight = weight("ln_1.weight"), .bias = weight("ln_1.bias"), .eps = spec.eps});
            h                 = into_out("qkv", tp_copy(tape, h), "attn.c_attn.weight", "attn.c_attn.bias");
            h                 = attention(tape, {.qkv     = h,
                                                 .heads   = {.heads = heads, .kv_heads = heads, .head_size = head_size},
                                                 .scale   = scale,
                                                 .dropout = drop("attn.attn_dropout")});
            h                 = tp_sum(tape, into_out("projected", h, "attn.c_proj.weight", nullptr));
            const auto middle = residual_norm(tape, {.x           = x,
                                                     .branch      = h,
                                                     .bias        = weight("attn.c_proj.bias"),
                                                     .norm_weight = weight("ln_2.weight"),
                                                     .norm_bias   = weight("ln_2.bias"),
                                                     .eps         = spec.eps,
                                                     .dropout     = drop("attn.resid_dropout")});

            h = into_out("inner", tp_copy(tape, middle.normed), "mlp.c_fc.weight", "mlp.c_fc.bias", gelu);
            h = tp_sum(tape, into_out("mlp", h, "mlp.c_proj.weight", nullptr));
            return residual(
                tape, {.x = middle.y, .branch = h, .bias = weight("mlp.c_proj.bias"), .dropout = drop("mlp.dropout")});
          }};
}

Block head_block(const Gpt2Spec& spec) {
  WeightSpec head{.name  = "lm_head.weight",
                  .shape = {spec.vocab, spec.width},
                  .cut   = true,
                  .init  = {.deviation = spec.init_deviation}};
  if (spec.tied) head.tied_to = token_weight;
  const auto vector = [&](const char* name, double value) {
    return WeightSpec{.name = name, .shape = {spec.width}, .init = {.constant = value}, .norm = true};
  };
  return {.name    = "head",
          .weights = {vector("transformer.ln_f.weight", 1), vector("transformer.ln_f.bias", 0), head},
          .forward = [eps = spec.eps](Tape& tape, const Tensor& x) {
            const Tensor h = layer_norm(tape, {.x      = x,
                                               .weight = tape.weight("transformer.ln_f.weight"),
                                               .bias   = tape.weight("transformer.ln_f.bias"),
                                               .eps    = eps});
            return linear(tape, {.x = tp_copy(tape, h), .weight = tape.weight("lm_head.weight"), .name = "logits"});
          }};
}

}  // namespace

Model gpt2(const Gpt2Spec& given) {
  Gpt2Spec spec = given;
  if (spec.inner == 0) spec.inner = 4 * spec.width;
  if (spec.layers < 1 || spec.width < 1 || spec.heads < 1 || spec.context < 1 || spec.vocab < 1 || spec.inner < 1) {
    throw Error(ErrorKind::config,
                str("gpt2: layers ", spec.layers, ", width ", spec.width, ", heads ", spec.heads, ", context ",
                    spec.context, ", vocab ", spec.vocab, ", inner ", spec.inner, " (each at least 1)"));
  }
  if (spec.width % spec.heads != 0) {
    throw Error(ErrorKind::config, str("gpt2: width ", spec.width, " does not divide over ", spec.heads, " heads"));
  }
  Model model{.kind     = "gpt2",
              .layers   = spec.layers,
              .width    = spec.width,
              .vocab    = spec.vocab,
              .context  = spec.context,
              .heads    = spec.heads,
              .kv_heads = spec.heads,
              .inner    = spec.inner};
  model.logits_are_free = true;  // a product makes them
  model.config          = model_config(spec);
  model.blocks.push_back(embedding_block(spec));
  for (int layer = 0; layer < spec.layers; ++layer) model.blocks.push_back(layer_block(spec, layer));
  model.blocks.push_back(head_block(spec));
  return model;
}

}  // namespace stepgraph
