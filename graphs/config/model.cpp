#include <algorithm>
#include <string>

#include "engine/base/error.hpp"
#include "graphs/config/reader.hpp"
#include "graphs/config/sections.hpp"

namespace stepgraph {
namespace {

// Larger than any model, and small enough that numbers of elements fit into 64 bits.
constexpr int max_layers           = 1 << 14;
constexpr std::int64_t max_width   = 1 << 20;
constexpr std::int64_t max_inner   = 1 << 22;
constexpr std::int64_t max_context = 1 << 24;
constexpr std::int64_t max_vocab   = (std::int64_t{1} << 31) - 1;  // tokens are 32-bit

using Names = ConfigReader::Names;
const Names kinds{"gpt2", "llama", "mlp"};

Names keys_of(std::string_view kind) {
  Names keys{"kind", "layers", "width", "context", "vocab", "inner", "init_deviation"};
  if (kind == "gpt2")
    for (const char* key :
         {"heads", "activation", "eps", "tied", "scale_attention", "scale_attention_by_layer", "dropout"})
      keys.emplace_back(key);
  if (kind == "llama")
    for (const char* key :
         {"heads", "kv_heads", "head_size", "eps", "rope_theta", "tied", "attention_bias", "mlp_bias", "dropout"})
      keys.emplace_back(key);
  return keys;
}

// A key of another model kind is reported as such, not as a typing error.
void refuse_keys_of_others(const JsonValue& model, std::string_view kind) {
  const Names own = keys_of(kind);
  for (const std::string& key : model.key) {
    if (std::find(own.begin(), own.end(), key) != own.end()) continue;
    Names others;
    for (const std::string_view other : kinds) {
      const Names keys = keys_of(other);
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) others.push_back(other);
    }
    if (!others.empty())
      throw Error(ErrorKind::config, str("model.", key, ": not a key of ", kind, " (kinds with this key: ",
                                         list_names(others), "; keys of ", kind, ": ", list_names(own), ")"));
  }
}

template <class Spec>
void read_sizes(const ConfigReader& model, Spec& spec) {
  model.integer("layers", spec.layers, 1, max_layers);
  model.integer("width", spec.width, 1, max_width);
  model.integer("context", spec.context, 1, max_context);
  model.integer("vocab", spec.vocab, 1, max_vocab);
  model.integer("inner", spec.inner, 0, max_inner);
  model.real("init_deviation", spec.init_deviation, not_negative);
}

// "96 or 104": the multiples of `by` next to a number that is not one.
std::string multiples_around(std::int64_t number, std::int64_t by) {
  return number < by ? str(by) : str(number / by * by, " or ", number / by * by + by);
}

void check_heads_divide(const ConfigReader& model, std::int64_t width, std::int64_t heads) {
  if (width % heads != 0)
    model.refuse("heads", str("width ", width, " does not divide into ", heads, " heads (width ",
                              multiples_around(width, heads), ")"));
}

Gpt2Spec read_gpt2(const ConfigReader& model) {
  Gpt2Spec spec;
  read_sizes(model, spec);
  model.integer("heads", spec.heads, 1, max_width);
  model.real("eps", spec.eps, positive);
  spec.activation = model.choice("activation", 0, {"gelu_new", "gelu"}) == 0 ? Gelu::tanh : Gelu::exact;
  model.boolean("tied", spec.tied);
  model.boolean("scale_attention", spec.scale_attention);
  model.boolean("scale_attention_by_layer", spec.scale_attention_by_layer);
  model.real("dropout", spec.dropout, share);
  check_heads_divide(model, spec.width, spec.heads);
  return spec;
}

LlamaSpec read_llama(const ConfigReader& model) {
  LlamaSpec spec;
  read_sizes(model, spec);
  model.integer("heads", spec.heads, 1, max_width);
  model.integer("kv_heads", spec.kv_heads, 0, max_width);
  model.integer("head_size", spec.head_size, 0, max_head_size);
  model.real("eps", spec.eps, positive);
  model.real("rope_theta", spec.rope_theta, positive);
  model.boolean("tied", spec.tied);
  model.boolean("attention_bias", spec.attention_bias);
  model.boolean("mlp_bias", spec.mlp_bias);
  model.real("dropout", spec.dropout, share);
  if (spec.head_size == 0) check_heads_divide(model, spec.width, spec.heads);
  const std::int64_t head_size = spec.head_size == 0 ? spec.width / spec.heads : spec.head_size;
  if (head_size % 2 != 0)
    model.refuse("head_size", str(head_size, spec.head_size == 0 ? " (width / heads)" : "",
                                  " is odd, but rotary embeddings rotate pairs (an even size)"));
  if (head_size > max_head_size)
    model.refuse("heads", str(spec.heads, " heads of width / heads = ", head_size, " (a head size of at most ",
                              max_head_size, ")"));
  if (spec.kv_heads != 0 && spec.heads % spec.kv_heads != 0)
    model.refuse("kv_heads", str(spec.heads, " heads are not divisible by ", spec.kv_heads,
                                 " key and value heads (a divisor of ", spec.heads, ")"));
  return spec;
}

MlpSpec read_mlp(const ConfigReader& model) {
  MlpSpec spec;
  read_sizes(model, spec);
  return spec;
}

}  // namespace

ModelSource read_model_source(const JsonValue& value) {
  if (value.find("load")) {
    for (const std::string& key : value.key) {
      if (key != "load" && key != "dropout")
        throw Error(
            ErrorKind::config,
            str("model.", key, ": cannot be combined with load (only dropout can; the folder has all other settings)"));
    }
    LoadFrom source;
    const ConfigReader model(&value, "model", {"load", "dropout"});
    model.text("load", source.folder);
    model.real("dropout", source.dropout, share);
    return source;
  }
  std::size_t kind = 0;
  if (value.kind == JsonValue::Kind::object) {
    const JsonValue only_kind = value.find("kind") ? JsonValue{{"kind", *value.find("kind")}} : JsonValue::object();
    kind                      = ConfigReader(&only_kind, "model", {"kind"}).choice("kind", 0, kinds);
    refuse_keys_of_others(value, kinds[kind]);
  }
  Names known = keys_of(kinds[kind]);
  if (value.key.size() < 2) known.push_back("load");  // suggest it only if it would be valid
  const ConfigReader model(&value, "model", known, str(" of ", kinds[kind]));
  if (kind == 1) return read_llama(model);
  if (kind == 2) return read_mlp(model);
  return read_gpt2(model);
}

}  // namespace stepgraph
