#include "graphs/models/llama.hpp"

#include <algorithm>
#include <cmath>

#include "engine/base/error.hpp"
#include "graphs/models/huggingface.hpp"
#include "graphs/models/weights.hpp"
#include "ops/layers/activation.hpp"
#include "ops/layers/attention.hpp"
#include "ops/layers/embedding.hpp"
#include "ops/layers/linear.hpp"
#include "ops/layers/norm.hpp"
#include "ops/layers/residual.hpp"
#include "ops/layers/residual_norm.hpp"
#include "ops/tape/tensor_parallel.hpp"

namespace stepgraph {
namespace {

constexpr const char* token_weight = "model.embed_tokens.weight";

Block embedding_block(const LlamaSpec& spec) {
  return {.name    = "embedding",
          .weights = {{.name  = token_weight,
                       .shape = {spec.vocab, spec.width},
                       .cut   = true,
                       .init  = {.deviation = spec.init_deviation}}},
          .forward = [vocab = spec.vocab](Tape& tape, const Tensor& tokens) {
            return tp_sum(tape,
                          embedding(tape, {.tokens      = tokens,
                                           .weight      = tape.weight(token_weight),
                                           .vocab_begin = tp_range(vocab, tape.tp().size, tape.tp().index).begin}));
          }};
}

// Queries, keys and values are one weight, and so are gate and up: one matrix product each. A bias goes with them.
std::vector<WeightSpec> layer_weights(const LlamaSpec& spec, const std::string& prefix) {
  const std::int64_t queries = spec.heads * spec.head_size, keys = spec.kv_heads * spec.head_size;
  const Init normal{.deviation = spec.init_deviation}, zeros{}, ones{.constant = 1};
  std::vector<WeightSpec> weights;
  const auto norm = [&](const char* name) {
    weights.push_back({.name = prefix + name, .shape = {spec.width}, .init = ones, .norm = true});
  };
  // Outputs are cut: the weight [out, in] along dim 0, its bias alike.
  const auto columns = [&](const char* name, std::vector<TensorSection> sections, bool bias) {
    std::int64_t out = 0;
    for (const TensorSection& section : sections) out += section.size;
    std::vector<TensorSection> matrices = sections, vectors = sections;
    for (std::size_t i = 0; i < sections.size(); ++i) {
      matrices[i].tensor = prefix + sections[i].tensor + ".weight";
      vectors[i].tensor  = prefix + sections[i].tensor + ".bias";
    }
    weights.push_back(
        {.name = prefix + name, .shape = {out, spec.width}, .cut = true, .sections = matrices, .init = normal});
    if (!bias) return;
    weights.push_back(
        {.name = prefix + name + ".bias", .shape = {out}, .cut = true, .sections = vectors, .init = zeros});
  };
  // Inputs are cut: the weight along dim 1. Every rank has the whole bias.
  const auto rows = [&](const std::string& name, std::int64_t in, std::int64_t num_heads, bool bias) {
    const std::string tensor = prefix + name + ".weight";
    weights.push_back({.name     = prefix + name,
                       .shape    = {spec.width, in},
                       .dim      = 1,
                       .cut      = true,
                       .sections = {{.tensor = tensor, .size = in, .num_heads = num_heads}},
                       .init     = normal});
    if (bias) weights.push_back({.name = prefix + name + ".bias", .shape = {spec.width}, .init = zeros});
  };
  norm("input_layernorm.weight");
  columns("self_attn.qkv",
          {{.tensor = "self_attn.q_proj", .size = queries, .num_heads = spec.heads},
           {.tensor = "self_attn.k_proj", .size = keys, .num_heads = spec.kv_heads},
           {.tensor = "self_attn.v_proj", .size = keys, .num_heads = spec.kv_heads}},
          spec.attention_bias);
  rows("self_attn.o_proj", queries, spec.heads, spec.attention_bias);
  norm("post_attention_layernorm.weight");
  columns("mlp.gate_up",
          {{.tensor = "mlp.gate_proj", .size = spec.inner}, {.tensor = "mlp.up_proj", .size = spec.inner}},
          spec.mlp_bias);
  rows("mlp.down_proj", spec.inner, 0, spec.mlp_bias);
  return weights;
}

Block layer_block(const LlamaSpec& spec, int layer) {
  const std::string prefix = str("model.layers.", layer, ".");
  return {.name    = str("layer", layer),
          .layer   = layer,
          .weights = layer_weights(spec, prefix),
          .forward = [spec, prefix](Tape& tape, const Tensor& x) {
            const auto weight  = [&](const std::string& name) { return tape.weight(prefix + name); };
            const auto bias_of = [&](const std::string& name, bool has) {
              return has ? std::optional(weight(name + ".bias")) : std::nullopt;
            };
            const Heads heads{.heads     = spec.heads / tape.tp().size,
                              .kv_heads  = std::max<std::int64_t>(1, spec.kv_heads / tape.tp().size),
                              .head_size = spec.head_size};

            Tensor h = rms_norm(tape, {.x = x, .weight = weight("input_layernorm.weight"), .eps = spec.eps});
            h        = linear(tape, {.x      = tp_copy(tape, h),
                                     .weight = weight("self_attn.qkv"),
                                     .bias   = bias_of("self_attn.qkv", spec.attention_bias),
                                     .name   = "qkv"});
            h        = rotary_embedding(
                       tape, {.qkv = h, .heads = heads, .frequencies = rotary_frequencies(spec.head_size, spec.rope_theta)});
            h = attention(tape, {.qkv     = h,
                                 .heads   = heads,
                                 .scale   = 1 / std::sqrt(static_cast<double>(spec.head_size)),
                                 .dropout = {.rate = spec.dropout, .site = prefix + "self_attn"}});
            h = tp_sum(tape, linear(tape, {.x = h, .weight = weight("self_attn.o_proj"), .name = "projected"}));
            const auto middle = residual_norm(tape, {.x           = x,
                                                     .branch      = h,
                                                     .bias        = bias_of("self_attn.o_proj", spec.attention_bias),
                                                     .norm_weight = weight("post_attention_layernorm.weight"),
                                                     .eps         = spec.eps});

            h = linear(tape, {.x      = tp_copy(tape, middle.normed),
                              .weight = weight("mlp.gate_up"),
                              .bias   = bias_of("mlp.gate_up", spec.mlp_bias),
                              .name   = "gate_up"});
            h = swiglu(tape, h);
            h = tp_sum(tape, linear(tape, {.x = h, .weight = weight("mlp.down_proj"), .name = "mlp"}));
            return residual(tape, {.x = middle.y, .branch = h, .bias = bias_of("mlp.down_proj", spec.mlp_bias)});
          }};
}

Block head_block(const LlamaSpec& spec) {
  WeightSpec head{.name  = "lm_head.weight",
                  .shape = {spec.vocab, spec.width},
                  .cut   = true,
                  .init  = {.deviation = spec.init_deviation}};
  if (spec.tied) head.tied_to = token_weight;
  return {
      .name    = "head",
      .weights = {{.name = "model.norm.weight", .shape = {spec.width}, .init = {.constant = 1}, .norm = true}, head},
      .forward = [eps = spec.eps](Tape& tape, const Tensor& x) {
        const Tensor h = rms_norm(tape, {.x = x, .weight = tape.weight("model.norm.weight"), .eps = eps});
        return linear(tape, {.x = tp_copy(tape, h), .weight = tape.weight("lm_head.weight"), .name = "logits"});
      }};
}

}  // namespace

Model llama(const LlamaSpec& given) {
  LlamaSpec spec = given;
  if (spec.kv_heads == 0) spec.kv_heads = spec.heads;
  if (spec.head_size == 0 && spec.heads > 0) {
    if (spec.width % spec.heads != 0) {
      throw Error(ErrorKind::config, str("llama: width ", spec.width, " does not divide over ", spec.heads,
                                         " heads (a multiple of the heads, or set head_size)"));
    }
    spec.head_size = spec.width / spec.heads;
  }
  if (spec.inner == 0) spec.inner = (spec.width * 8 / 3 + 63) / 64 * 64;
  if (spec.layers < 1 || spec.width < 1 || spec.heads < 1 || spec.kv_heads < 1 || spec.head_size < 1 ||
      spec.context < 1 || spec.vocab < 1 || spec.inner < 1) {
    throw Error(ErrorKind::config,
                str("llama: layers ", spec.layers, ", width ", spec.width, ", heads ", spec.heads, ", kv_heads ",
                    spec.kv_heads, ", head_size ", spec.head_size, ", context ", spec.context, ", vocab ", spec.vocab,
                    ", inner ", spec.inner, " (each at least 1)"));
  }
  if (spec.heads % spec.kv_heads != 0) {
    throw Error(ErrorKind::config,
                str("llama: ", spec.heads, " heads do not divide over ", spec.kv_heads, " key and value heads"));
  }
  if (spec.head_size % 2 != 0) {
    throw Error(ErrorKind::config,
                str("llama: head_size ", spec.head_size, " is odd, but rotary embeddings rotate pairs (an even size)"));
  }
  if (spec.head_size > max_head_size) {
    throw Error(ErrorKind::config, str("llama: head_size ", spec.head_size, " (at most ", max_head_size, ")"));
  }
  Model model{.kind     = "llama",
              .layers   = spec.layers,
              .width    = spec.width,
              .vocab    = spec.vocab,
              .context  = spec.context,
              .heads    = spec.heads,
              .kv_heads = spec.kv_heads,
              .inner    = spec.inner};
  model.logits_are_free = true;  // a product makes them
  model.config          = model_config(spec);
  model.blocks.push_back(embedding_block(spec));
  for (int layer = 0; layer < spec.layers; ++layer) model.blocks.push_back(layer_block(spec, layer));
  model.blocks.push_back(head_block(spec));
  return model;
}

}  // namespace stepgraph
