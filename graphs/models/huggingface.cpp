#include "graphs/models/huggingface.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/json_check.hpp"

namespace stepgraph {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::int64_t most_size   = (std::int64_t{1} << 30) - 1;  // two of them make a matrix that can be addressed
constexpr std::int64_t most_layers = 10'000;

std::string text_of(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

// The fields of an object, by the types they must have. A field that is null is not there.
class Fields {
 public:
  Fields(const json& object, std::string subject) : object_(object), subject_(std::move(subject)) {}

  [[noreturn]] void refuse(const std::string& what) const { throw Error(ErrorKind::config, str(subject_, ": ", what)); }

  [[nodiscard]] const json* find(const char* name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  // Under either of two names, of which transformers reads both.
  [[nodiscard]] const json* find(const char* name, const char* other) const {
    const json* value = find(name);
    const json* same  = find(other);
    if (value && same && *value != *same)
      refuse(str(name, " is ", text_of(*value), ", but ", other, ", another name for it, is ", text_of(*same)));
    return value ? value : same;
  }

  [[nodiscard]] std::int64_t size(const char* name, const json* value, std::int64_t otherwise,
                                  std::int64_t most = most_size) const {
    if (!value) return otherwise;
    if (!value->is_number_integer() || *value < 1 || *value > most)
      refuse(str(name, " is ", text_of(*value), " (an integer from 1 to ", most, ")"));
    return value->get<std::int64_t>();
  }
  [[nodiscard]] std::int64_t size(const char* name, std::int64_t otherwise) const {
    return size(name, find(name), otherwise);
  }

  [[nodiscard]] double number(const char* name, double otherwise, double least) const {
    const json* value = find(name);
    if (!value) return otherwise;
    if (!value->is_number() || !(value->get<double>() >= least))
      refuse(str(name, " is ", text_of(*value), " (a number, ", least == 0 ? "0 or more)" : "more than 0)"));
    return value->get<double>();
  }
  [[nodiscard]] double positive(const char* name, double otherwise) const { return number(name, otherwise, 1e-300); }

  [[nodiscard]] bool flag(const char* name, bool otherwise) const {
    const json* value = find(name);
    if (!value) return otherwise;
    if (!value->is_boolean()) refuse(str(name, " is ", text_of(*value), " (true or false)"));
    return value->get<bool>();
  }

  [[nodiscard]] std::string text(const char* name, const char* otherwise) const {
    const json* value = find(name);
    if (!value) return otherwise;
    if (!value->is_string()) refuse(str(name, " is ", text_of(*value), " (a text)"));
    return value->get<std::string>();
  }

  void note_dropout(const char* name, double otherwise, std::vector<std::string>& notes) const {
    const double share = number(name, otherwise, 0);
    if (share > 0) notes.push_back(str(name, " ", share, ": not applied (model.dropout is)"));
  }

 private:
  const json& object_;
  std::string subject_;
};

Gelu parse_gelu(const Fields& fields) {
  const std::string name = fields.text("activation_function", "gelu_new");
  // Names of one function; "gelu_fast" has its constant to ten digits.
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
  (void)fields.flag("reorder_and_upcast_attn", false);  // the same sums in another order and width
  if (fields.flag("add_cross_attention", false))
    fields.refuse("add_cross_attention is true (false: models attend to what they are given)");
  if (spec.width % spec.heads != 0)
    fields.refuse(str("n_embd ", spec.width, " is not a multiple of n_head ", spec.heads));
  for (const char* name : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) fields.note_dropout(name, 0.1, config.notes);
  config.spec = spec;
  return config;
}

// One place that may hold rotary parameters; gives its theta where it has one.
std::optional<double> parse_rope(const Fields& fields, const char* name, const std::string& subject) {
  const json* value = fields.find(name);
  if (!value) return std::nullopt;
  if (!value->is_object()) fields.refuse(str(name, " is ", text_of(*value), " (null, or an object)"));
  const Fields rope(*value, str(subject, ": ", name));
  for (const char* kind : {"rope_type", "type"})
    if (const std::string type = rope.text(kind, "default"); type != "default")
      rope.refuse(str(kind, " '", type, "' is not supported (default)"));
  if (rope.number("partial_rotary_factor", 1, 0) != 1)
    rope.refuse(str("partial_rotary_factor is ", text_of(*rope.find("partial_rotary_factor")), " (1: all of a head)"));
  if (!rope.find("rope_theta")) return std::nullopt;
  return rope.positive("rope_theta", 0);
}

double parse_theta(const Fields& fields, const std::string& subject) {
  std::optional<double> theta;
  const auto agree = [&](std::optional<double> other) {
    if (theta && other && *theta != *other)
      fields.refuse(str("rope_theta is there as ", *theta, " and as ", *other, " (once, or twice the same)"));
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
    fields.refuse("partial_rotary_factor is not 1 (1: all of a head)");
  if (spec.heads % spec.kv_heads != 0)
    fields.refuse(str("num_attention_heads ", spec.heads, " is not a multiple of num_key_value_heads ", spec.kv_heads));
  if (!fields.find("head_dim") && spec.width % spec.heads != 0)
    fields.refuse(str("hidden_size ", spec.width, " is not a multiple of num_attention_heads ", spec.heads,
                      ", and there is no head_dim"));
  spec.head_size = fields.size("head_dim", spec.width / spec.heads);
  if (spec.head_size % 2 != 0) fields.refuse(str("heads of ", spec.head_size, " (an even size: rotation is of pairs)"));
  if (spec.head_size > most_size / spec.heads)
    fields.refuse(str(spec.heads, " heads of ", spec.head_size, " (together at most ", most_size, ")"));
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

// What has no meaning here but what transformers wants to know: no special tokens.
void add_tokens(ordered_json& config) {
  for (const char* name : {"bos_token_id", "eos_token_id", "pad_token_id"}) config[name] = nullptr;
  config["use_cache"] = true;
}

}  // namespace

ModelConfig parse_model_config(std::string_view text, std::string_view subject) {
  const std::string where(subject);
  check_json(text, where);
  const json parsed = json::parse(text);
  const Fields fields(parsed, where);
  if (!parsed.is_object()) fields.refuse("is no object ({\"model_type\": ...})");
  const std::string known = join_text(families, ", ", [](const Family& family) { return family.model_type; });
  if (!fields.find("model_type")) fields.refuse(str("there is no model_type (", known, ")"));
  if (fields.find("quantization_config")) fields.refuse("weights that are quantized are not read (fp32, bf16, fp16)");
  const std::string type = fields.text("model_type", "");
  if (type == "gpt2") return parse_gpt2(fields);
  if (type == "llama") return parse_llama(fields, where);
  if (type == families[2].model_type) return parse_mlp(fields);
  fields.refuse(str("model_type '", type, "' is not known (", known, ")"));
}

std::string model_config(const Gpt2Spec& spec) {
  ordered_json config               = {{"activation_function", spec.activation == Gelu::tanh ? "gelu_new" : "gelu"},
                                       {"add_cross_attention", false}};
  config["architectures"]           = {families[0].architecture};
  config["attn_pdrop"]              = spec.dropout;
  config["embd_pdrop"]              = spec.dropout;
  config["initializer_range"]       = spec.init_deviation;
  config["layer_norm_epsilon"]      = spec.eps;
  config["model_type"]              = families[0].model_type;
  config["n_embd"]                  = spec.width;
  config["n_head"]                  = spec.heads;
  config["n_inner"]                 = spec.inner == 0 ? ordered_json() : ordered_json(spec.inner);
  config["n_layer"]                 = spec.layers;
  config["n_positions"]             = spec.context;
  config["reorder_and_upcast_attn"] = false;
  config["resid_pdrop"]             = spec.dropout;
  config["scale_attn_by_inverse_layer_idx"] = spec.scale_attention_by_layer;
  config["scale_attn_weights"]              = spec.scale_attention;
  config["summary_activation"]              = nullptr;
  config["summary_first_dropout"]           = 0.0;
  config["summary_proj_to_labels"]          = true;
  config["summary_type"]                    = "cls_index";
  config["summary_use_proj"]                = true;
  config["tie_word_embeddings"]             = spec.tied;
  config["vocab_size"]                      = spec.vocab;
  add_tokens(config);
  return config.dump(2) + "\n";
}

std::string model_config(const LlamaSpec& spec) {
  const std::int64_t inner = spec.inner == 0 ? (8 * spec.width + 3 * 64 - 1) / (3 * 64) * 64 : spec.inner;
  ordered_json config;
  config["architectures"]           = {families[1].architecture};
  config["attention_bias"]          = spec.attention_bias;
  config["attention_dropout"]       = spec.dropout;
  config["head_dim"]                = spec.head_size == 0 ? spec.width / spec.heads : spec.head_size;
  config["hidden_act"]              = "silu";
  config["hidden_size"]             = spec.width;
  config["initializer_range"]       = spec.init_deviation;
  config["intermediate_size"]       = inner;
  config["max_position_embeddings"] = spec.context;
  config["mlp_bias"]                = spec.mlp_bias;
  config["model_type"]              = families[1].model_type;
  config["num_attention_heads"]     = spec.heads;
  config["num_hidden_layers"]       = spec.layers;
  config["num_key_value_heads"]     = spec.kv_heads == 0 ? spec.heads : spec.kv_heads;
  config["pretraining_tp"]          = 1;
  config["rms_norm_eps"]            = spec.eps;
  // Releases 4 and 5 of transformers look in different places.
  config["rope_parameters"]     = {{"rope_theta", spec.rope_theta}, {"rope_type", "default"}};
  config["rope_scaling"]        = nullptr;
  config["rope_theta"]          = spec.rope_theta;
  config["tie_word_embeddings"] = spec.tied;
  config["vocab_size"]          = spec.vocab;
  add_tokens(config);
  return config.dump(2) + "\n";
}

std::string model_config(const MlpSpec& spec) {
  ordered_json config               = {{"architectures", {families[2].architecture}}};
  config["hidden_size"]             = spec.width;
  config["initializer_range"]       = spec.init_deviation;
  config["intermediate_size"]       = spec.inner == 0 ? 4 * spec.width : spec.inner;
  config["max_position_embeddings"] = spec.context;
  config["model_type"]              = families[2].model_type;
  config["num_hidden_layers"]       = spec.layers;
  config["vocab_size"]              = spec.vocab;
  return config.dump(2) + "\n";
}

std::string config_to_save(std::string_view text) {
  check_json(text, "config");
  auto config = ordered_json::parse(text);
  if (!config.is_object()) throw Error(ErrorKind::config, "config: is no object ({\"model_type\": ...})");
  for (const char* name : {"dtype", "torch_dtype"}) config.erase(name);
  for (const Family& family : families)
    if (config.value("model_type", ordered_json()) == family.model_type)
      config["architectures"] = {family.architecture};
  return config.dump(2) + "\n";
}

}  // namespace stepgraph
