#include "graphs/models/huggingface.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/json_value.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t most_size =
    (std::int64_t{1} << 30) - 1;  // a matrix with two such sides has fewer than 2^60 elements
constexpr std::int64_t most_layers = 10'000;

// Reads typed fields of an object. A null field counts as missing.
class Fields {
 public:
  Fields(const JsonValue& object, std::string subject) : object_(object), subject_(std::move(subject)) {}

  [[noreturn]] void refuse(const std::string& what) const { throw Error(ErrorKind::config, str(subject_, ": ", what)); }

  [[nodiscard]] const JsonValue* find(const char* name) const {
    const JsonValue* const found = object_.find(name);
    return !found || found->is_null() ? nullptr : found;
  }

  // A field with two names; transformers reads both.
  [[nodiscard]] const JsonValue* find(const char* name, const char* other) const {
    const JsonValue* value = find(name);
    const JsonValue* same  = find(other);
    if (value && same && *value != *same)
      refuse(str(name, " is ", json_line(*value), ", but ", other, ", another name for it, is ", json_line(*same)));
    return value ? value : same;
  }

  [[nodiscard]] std::int64_t size(const char* name, const JsonValue* value, std::int64_t otherwise,
                                  std::int64_t most = most_size) const {
    if (!value) return otherwise;
    const auto number = value->kind == JsonValue::Kind::integer ? to_number<std::int64_t>(value->text) : std::nullopt;
    if (!number || *number < 1 || *number > most)
      refuse(str(name, " is ", json_line(*value), " (an integer from 1 to ", most, ")"));
    return *number;
  }
  [[nodiscard]] std::int64_t size(const char* name, std::int64_t otherwise) const {
    return size(name, find(name), otherwise);
  }

  [[nodiscard]] double number(const char* name, double otherwise, double least) const {
    const JsonValue* value = find(name);
    if (!value) return otherwise;
    if (!value->is_number() || !(value->number >= least))
      refuse(str(name, " is ", json_line(*value), " (a number, ", least == 0 ? "0 or more)" : "more than 0)"));
    return value->number;
  }
  [[nodiscard]] double positive(const char* name, double otherwise) const { return number(name, otherwise, 1e-300); }

  [[nodiscard]] bool flag(const char* name, bool otherwise) const {
    const JsonValue* value = find(name);
    if (!value) return otherwise;
    if (!value->is_boolean()) refuse(str(name, " is ", json_line(*value), " (true or false)"));
    return value->truth;
  }

  [[nodiscard]] std::string text(const char* name, const char* otherwise) const {
    const JsonValue* value = find(name);
    if (!value) return otherwise;
    if (!value->is_string()) refuse(str(name, " is ", json_line(*value), " (a string)"));
    return value->text;
  }

  void note_dropout(const char* name, double otherwise, std::vector<std::string>& notes) const {
    const double share = number(name, otherwise, 0);
    if (share > 0) notes.push_back(str(name, " ", share, ": ignored (set model.dropout)"));
  }

 private:
  const JsonValue& object_;
  std::string subject_;
};

Gelu parse_gelu(const Fields& fields) {
  const std::string name = fields.text("activation_function", "gelu_new");
  // Names of the same function; "gelu_fast" rounds its constant to ten digits.
  for (const char* same : {"gelu_new", "gelu_pytorch_tanh", "gelu_fast"})
    if (name == same) return Gelu::tanh;
  for (const char* same : {"gelu", "gelu_python"})
    if (name == same) return Gelu::exact;
  fields.refuse(str("activation_function '", name, "' is not known (gelu_new, gelu_pytorch_tanh, gelu_fast, gelu)"));
}

ModelConfig parse_gpt2(const Fields& fields) {
  ModelConfig config;
  Gpt2Spec spec;
  spec.layers  = static_cast<int>(fields.size("n_layer", fields.find("n_layer", "num_hidden_layers"), 12, most_layers));
  spec.width   = fields.size("n_embd", fields.find("n_embd", "hidden_size"), 768);
  spec.heads   = fields.size("n_head", fields.find("n_head", "num_attention_heads"), 12);
  spec.context = fields.size("n_positions", fields.find("n_positions", "max_position_embeddings"), 1024);
  spec.vocab   = fields.size("vocab_size", 50257);
  spec.inner   = fields.size("n_inner", 0);
  spec.eps     = fields.positive("layer_norm_epsilon", 1e-5);
  spec.tied    = fields.flag("tie_word_embeddings", true);
  spec.activation               = parse_gelu(fields);
  spec.init_deviation           = fields.number("initializer_range", 0.02, 0);
  spec.scale_attention          = fields.flag("scale_attn_weights", true);
  spec.scale_attention_by_layer = fields.flag("scale_attn_by_inverse_layer_idx", false);
  (void)fields.flag("reorder_and_upcast_attn", false);  // only changes order and precision of sums
  if (fields.flag("add_cross_attention", false))
    fields.refuse("add_cross_attention is true (false: cross-attention is not supported)");
  if (spec.width % spec.heads != 0)
    fields.refuse(str("n_embd ", spec.width, " is not a multiple of n_head ", spec.heads));
  for (const char* name : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) fields.note_dropout(name, 0.1, config.notes);
  config.spec = spec;
  return config;
}

// Checks one object of rotary parameters; returns its theta, if it has one.
std::optional<double> parse_rope(const Fields& fields, const char* name, const std::string& subject) {
  const JsonValue* value = fields.find(name);
  if (!value) return std::nullopt;
  if (!value->is_object()) fields.refuse(str(name, " is ", json_line(*value), " (null, or an object)"));
  const Fields rope(*value, str(subject, ": ", name));
  for (const char* kind : {"rope_type", "type"})
    if (const std::string type = rope.text(kind, "default"); type != "default")
      rope.refuse(str(kind, " '", type, "' is not supported (default)"));
  if (rope.number("partial_rotary_factor", 1, 0) != 1)
    rope.refuse(
        str("partial_rotary_factor is ", json_line(*rope.find("partial_rotary_factor")), " (1: the whole head)"));
  if (!rope.find("rope_theta")) return std::nullopt;
  return rope.positive("rope_theta", 0);
}

double parse_theta(const Fields& fields, const std::string& subject) {
  std::optional<double> theta;
  const auto agree = [&](std::optional<double> other) {
    if (theta && other && *theta != *other)
      fields.refuse(str("rope_theta is ", *theta, " in one place and ", *other, " in another (equal values)"));
    if (other) theta = other;
  };
  if (fields.find("rope_theta")) agree(fields.positive("rope_theta", 0));
  for (const char* name : {"rope_parameters", "rope_scaling"}) agree(parse_rope(fields, name, subject));
  return theta.value_or(10000);
}

ModelConfig parse_llama(const Fields& fields, const std::string& subject) {
  ModelConfig config;
  LlamaSpec spec;
  spec.layers   = static_cast<int>(fields.size("num_hidden_layers", fields.find("num_hidden_layers"), 32, most_layers));
  spec.width    = fields.size("hidden_size", 4096);
  spec.heads    = fields.size("num_attention_heads", 32);
  spec.kv_heads = fields.size("num_key_value_heads", spec.heads);
  spec.context  = fields.size("max_position_embeddings", 2048);
  spec.vocab    = fields.size("vocab_size", 32000);
  spec.inner    = fields.size("intermediate_size", 11008);
  spec.eps      = fields.positive("rms_norm_eps", 1e-6);
  spec.rope_theta     = parse_theta(fields, subject);
  spec.init_deviation = fields.number("initializer_range", 0.02, 0);
  spec.tied           = fields.flag("tie_word_embeddings", false);
  spec.attention_bias = fields.flag("attention_bias", false);
  spec.mlp_bias       = fields.flag("mlp_bias", false);
  if (const std::string act = fields.text("hidden_act", "silu"); act != "silu" && act != "swish")
    fields.refuse(str("hidden_act '", act, "' is not known (silu)"));
  if (fields.number("partial_rotary_factor", 1, 0) != 1)
    fields.refuse("partial_rotary_factor is not 1 (1: the whole head)");
  if (spec.heads % spec.kv_heads != 0)
    fields.refuse(str("num_attention_heads ", spec.heads, " is not a multiple of num_key_value_heads ", spec.kv_heads));
  if (!fields.find("head_dim") && spec.width % spec.heads != 0)
    fields.refuse(str("hidden_size ", spec.width, " is not a multiple of num_attention_heads ", spec.heads,
                      ", and there is no head_dim"));
  spec.head_size = fields.size("head_dim", spec.width / spec.heads);
  if (spec.head_size % 2 != 0)
    fields.refuse(str("head size ", spec.head_size, " is odd, but rotary embeddings rotate pairs (an even size)"));
  if (spec.head_size > most_size / spec.heads)
    fields.refuse(str(spec.heads, " heads of size ", spec.head_size, " (a product of at most ", most_size, ")"));
  fields.note_dropout("attention_dropout", 0, config.notes);
  config.spec = spec;
  return config;
}

ModelConfig parse_mlp(const Fields& fields) {
  MlpSpec spec;
  spec.layers =
      static_cast<int>(fields.size("num_hidden_layers", fields.find("num_hidden_layers"), spec.layers, most_layers));
  spec.width          = fields.size("hidden_size", spec.width);
  spec.context        = fields.size("max_position_embeddings", spec.context);
  spec.vocab          = fields.size("vocab_size", spec.vocab);
  spec.inner          = fields.size("intermediate_size", 4 * spec.width);
  spec.init_deviation = fields.number("initializer_range", spec.init_deviation, 0);
  return {.spec = spec};
}

struct Family {
  const char* model_type;
  const char* architecture;
};
constexpr Family families[] = {
    {"gpt2", "GPT2LMHeadModel"}, {"llama", "LlamaForCausalLM"}, {"stepgraph_mlp", "StepgraphMlp"}};

// Fields that only transformers reads: no special tokens.
void add_tokens(JsonValue& config) {
  for (const char* name : {"bos_token_id", "eos_token_id", "pad_token_id"}) config.set(name, nullptr);
  config.set("use_cache", true);
}

}  // namespace

ModelConfig parse_model_config(std::string_view text, std::string_view subject) {
  const std::string where(subject);
  const JsonValue parsed = parse_json(text, where);
  const Fields fields(parsed, where);
  if (!parsed.is_object()) fields.refuse("is not an object ({\"model_type\": ...})");
  const std::string known = join_text(families, ", ", [](const Family& family) { return family.model_type; });
  if (!fields.find("model_type")) fields.refuse(str("model_type is missing (", known, ")"));
  if (fields.find("quantization_config"))
    fields.refuse("quantization_config: quantized weights are not supported (fp32, bf16, fp16)");
  const std::string type = fields.text("model_type", "");
  if (type == "gpt2") return parse_gpt2(fields);
  if (type == "llama") return parse_llama(fields, where);
  if (type == families[2].model_type) return parse_mlp(fields);
  fields.refuse(str("model_type '", type, "' is not known (", known, ")"));
}

std::string model_config(const Gpt2Spec& spec) {
  JsonValue config = {{"activation_function", spec.activation == Gelu::tanh ? "gelu_new" : "gelu"},
                      {"add_cross_attention", false},
                      {"architectures", JsonValue::list({families[0].architecture})},
                      {"attn_pdrop", spec.dropout},
                      {"embd_pdrop", spec.dropout},
                      {"initializer_range", spec.init_deviation},
                      {"layer_norm_epsilon", spec.eps},
                      {"model_type", families[0].model_type},
                      {"n_embd", spec.width},
                      {"n_head", spec.heads},
                      {"n_inner", spec.inner == 0 ? JsonValue() : JsonValue(spec.inner)},
                      {"n_layer", spec.layers},
                      {"n_positions", spec.context},
                      {"reorder_and_upcast_attn", false},
                      {"resid_pdrop", spec.dropout},
                      {"scale_attn_by_inverse_layer_idx", spec.scale_attention_by_layer},
                      {"scale_attn_weights", spec.scale_attention},
                      {"summary_activation", nullptr},
                      {"summary_first_dropout", 0.0},
                      {"summary_proj_to_labels", true},
                      {"summary_type", "cls_index"},
                      {"summary_use_proj", true},
                      {"tie_word_embeddings", spec.tied},
                      {"vocab_size", spec.vocab}};
  add_tokens(config);
  return json_document(config);
}

std::string model_config(const LlamaSpec& spec) {
  const std::int64_t inner = spec.inner == 0 ? (8 * spec.width + 3 * 64 - 1) / (3 * 64) * 64 : spec.inner;
  JsonValue config         = {{"architectures", JsonValue::list({families[1].architecture})},
                              {"attention_bias", spec.attention_bias},
                              {"attention_dropout", spec.dropout},
                              {"head_dim", spec.head_size == 0 ? spec.width / spec.heads : spec.head_size},
                              {"hidden_act", "silu"},
                              {"hidden_size", spec.width},
                              {"initializer_range", spec.init_deviation},
                              {"intermediate_size", inner},
                              {"max_position_embeddings", spec.context},
                              {"mlp_bias", spec.mlp_bias},
                              {"model_type", families[1].model_type},
                              {"num_attention_heads", spec.heads},
                              {"num_hidden_layers", spec.layers},
                              {"num_key_value_heads", spec.kv_heads == 0 ? spec.heads : spec.kv_heads},
                              {"pretraining_tp", 1},
                              {"rms_norm_eps", spec.eps},
                              // Releases 4 and 5 of transformers read different fields.
                              {"rope_parameters", {{"rope_theta", spec.rope_theta}, {"rope_type", "default"}}},
                              {"rope_scaling", nullptr},
                              {"rope_theta", spec.rope_theta},
                              {"tie_word_embeddings", spec.tied},
                              {"vocab_size", spec.vocab}};
  add_tokens(config);
  return json_document(config);
}

std::string model_config(const MlpSpec& spec) {
  JsonValue config = {{"architectures", JsonValue::list({families[2].architecture})},
                      {"hidden_size", spec.width},
                      {"initializer_range", spec.init_deviation},
                      {"intermediate_size", spec.inner == 0 ? 4 * spec.width : spec.inner},
                      {"max_position_embeddings", spec.context},
                      {"model_type", families[2].model_type},
                      {"num_hidden_layers", spec.layers},
                      {"vocab_size", spec.vocab}};
  return json_document(config);
}

std::string config_to_save(std::string_view text) {
  JsonValue config = parse_json(text, "config");
  if (!config.is_object()) throw Error(ErrorKind::config, "config: is not an object ({\"model_type\": ...})");
  for (const char* name : {"dtype", "torch_dtype"}) config.erase(name);
  for (const Family& family : families)
    if (const JsonValue* type = config.find("model_type"); type && *type == family.model_type)
      config.set("architectures", JsonValue::list({family.architecture}));
  return json_document(config);
}

}  // namespace stepgraph
