#include "graphs/models/huggingface.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <random>

#include "engine/base/error.hpp"
#include "graphs/files/json_value.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;
using Catch::Matchers::MessageMatches;
using sg::JsonValue;
using stepgraph::testing::data_file;
using stepgraph::testing::file_bytes;

namespace {

std::string golden(const char* model) { return file_bytes(data_file("golden") / model / "config.json"); }

sg::ModelConfig parse(const JsonValue& config) { return sg::parse_model_config(sg::json_line(config), "config.json"); }

sg::Gpt2Spec gpt2(JsonValue fields) {
  fields.set("model_type", "gpt2");
  return std::get<sg::Gpt2Spec>(parse(fields).spec);
}
sg::LlamaSpec llama(JsonValue fields) {
  fields.set("model_type", "llama");
  return std::get<sg::LlamaSpec>(parse(fields).spec);
}

const sg::Gpt2Spec golden_gpt2{.layers         = 4,
                               .width          = 64,
                               .heads          = 4,
                               .context        = 64,
                               .vocab          = 256,
                               .inner          = 0,
                               .activation     = sg::Gelu::tanh,
                               .eps            = 1e-5,
                               .init_deviation = 0.1};
const sg::LlamaSpec golden_llama{.layers         = 4,
                                 .width          = 64,
                                 .heads          = 4,
                                 .kv_heads       = 2,
                                 .head_size      = 16,
                                 .context        = 64,
                                 .vocab          = 256,
                                 .inner          = 192,
                                 .eps            = 1e-6,
                                 .rope_theta     = 10000,
                                 .init_deviation = 0.1};

}  // namespace

TEST_CASE("a head size that no model has is refused before tables of that size are made",
          "[graphs][models][refuses]") {
  const auto config = sg::parse_model_config(
      R"({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 50331648})", "config.json");
  CHECK_THROWS_WITH(sg::make_model(config.spec), "llama: head_size 50331648 (at most 65536)");
}

TEST_CASE("configs written by transformers are read", "[graphs][huggingface]") {
  const auto gpt2_config = sg::parse_model_config(golden("gpt2-tiny"), "config.json");
  CHECK(std::get<sg::Gpt2Spec>(gpt2_config.spec) == golden_gpt2);
  CHECK(gpt2_config.notes.empty());
  const auto llama_config = sg::parse_model_config(golden("llama-tiny"), "config.json");
  CHECK(std::get<sg::LlamaSpec>(llama_config.spec) == golden_llama);
  CHECK(llama_config.notes.empty());
}

TEST_CASE("fields that a config omits have the defaults of transformers", "[graphs][huggingface]") {
  CHECK(gpt2(JsonValue::object()) ==
        sg::Gpt2Spec{.layers = 12, .width = 768, .heads = 12, .context = 1024, .vocab = 50257, .inner = 0});
  CHECK(llama(JsonValue::object()) == sg::LlamaSpec{.layers    = 32,
                                                    .width     = 4096,
                                                    .heads     = 32,
                                                    .kv_heads  = 32,
                                                    .head_size = 128,
                                                    .context   = 2048,
                                                    .vocab     = 32000,
                                                    .inner     = 11008,
                                                    .eps       = 1e-6});
  CHECK(parse({{"model_type", "gpt2"}}).notes ==
        std::vector<std::string>{"resid_pdrop 0.1: ignored (set model.dropout)",
                                 "embd_pdrop 0.1: ignored (set model.dropout)",
                                 "attn_pdrop 0.1: ignored (set model.dropout)"});
  CHECK(parse({{"model_type", "llama"}, {"attention_dropout", 0.25}}).notes ==
        std::vector<std::string>{"attention_dropout 0.25: ignored (set model.dropout)"});
}

TEST_CASE("each field of a GPT-2 config sets a field of the model", "[graphs][huggingface]") {
  CHECK(gpt2({{"n_inner", 100}}).inner == 100);
  CHECK(gpt2({{"layer_norm_epsilon", 1e-6}}).eps == 1e-6);
  CHECK(gpt2({{"initializer_range", 0.5}}).init_deviation == 0.5);
  CHECK_FALSE(gpt2({{"tie_word_embeddings", false}}).tied);
  CHECK_FALSE(gpt2({{"scale_attn_weights", false}}).scale_attention);
  CHECK(gpt2({{"scale_attn_by_inverse_layer_idx", true}}).scale_attention_by_layer);
  CHECK(gpt2({{"reorder_and_upcast_attn", true}}) == gpt2(JsonValue::object()));
  CHECK(gpt2({{"hidden_size", 96}, {"num_attention_heads", 6}, {"num_hidden_layers", 3}}) ==
        gpt2({{"n_embd", 96}, {"n_head", 6}, {"n_layer", 3}}));
  for (const char* name : {"gelu_new", "gelu_pytorch_tanh", "gelu_fast"})
    CHECK(gpt2({{"activation_function", name}}).activation == sg::Gelu::tanh);
  CHECK(gpt2({{"activation_function", "gelu"}}).activation == sg::Gelu::exact);
}

TEST_CASE("rotary parameters are read in both formats", "[graphs][huggingface]") {
  CHECK(llama({{"rope_theta", 500000}}).rope_theta == 500000);
  CHECK(llama({{"rope_theta", 500000.0}, {"rope_scaling", nullptr}}).rope_theta == 500000);
  CHECK(llama({{"rope_parameters", {{"rope_theta", 2e4}, {"rope_type", "default"}}}}).rope_theta == 2e4);
  CHECK(llama({{"rope_parameters", {{"rope_type", "default"}}}, {"rope_theta", 3e4}}).rope_theta == 3e4);
  CHECK(llama({{"rope_parameters", {{"rope_theta", 3e4}}}, {"rope_theta", 30000}}).rope_theta == 3e4);
  CHECK(llama({{"rope_scaling", {{"type", "default"}}}}).rope_theta == 10000);
}

TEST_CASE("each field of a Llama config sets a field of the model", "[graphs][huggingface]") {
  CHECK(llama({{"attention_bias", true}}).attention_bias);
  CHECK(llama({{"mlp_bias", true}}).mlp_bias);
  CHECK(llama({{"tie_word_embeddings", true}}).tied);
  CHECK(llama({{"head_dim", 64}, {"hidden_size", 100}, {"num_attention_heads", 3}}).head_size == 64);
  CHECK(llama({{"head_dim", nullptr}, {"num_key_value_heads", nullptr}}) == llama(JsonValue::object()));
  CHECK(llama({{"num_key_value_heads", 8}}).kv_heads == 8);
  CHECK(llama({{"initializer_range", 0.5}}).init_deviation == 0.5);
}

TEST_CASE("a written config is read back unchanged", "[graphs][huggingface]") {
  const auto back = [](const auto& spec) { return sg::parse_model_config(sg::model_config(spec), "config.json"); };
  sg::Gpt2Spec gpt2_spec{.layers                   = 3,
                         .width                    = 96,
                         .heads                    = 6,
                         .context                  = 50,
                         .vocab                    = 300,
                         .inner                    = 200,
                         .activation               = sg::Gelu::exact,
                         .eps                      = 3e-6,
                         .init_deviation           = 0.03,
                         .tied                     = false,
                         .scale_attention          = false,
                         .scale_attention_by_layer = true};
  CHECK(std::get<sg::Gpt2Spec>(back(gpt2_spec).spec) == gpt2_spec);
  CHECK(back(gpt2_spec).notes.empty());
  CHECK(std::get<sg::Gpt2Spec>(back(golden_gpt2).spec) == golden_gpt2);
  sg::LlamaSpec llama_spec{.layers         = 3,
                           .width          = 96,
                           .heads          = 6,
                           .kv_heads       = 3,
                           .head_size      = 32,
                           .context        = 50,
                           .vocab          = 300,
                           .inner          = 200,
                           .eps            = 3e-6,
                           .rope_theta     = 12345.5,
                           .init_deviation = 0.03,
                           .tied           = true,
                           .attention_bias = true,
                           .mlp_bias       = true};
  CHECK(std::get<sg::LlamaSpec>(back(llama_spec).spec) == llama_spec);
  // A field with value 0 is written as the number that it stands for.
  const auto open = std::get<sg::LlamaSpec>(back(sg::LlamaSpec{.width = 256, .heads = 8}).spec);
  CHECK(open.kv_heads == 8);
  CHECK(open.head_size == 32);
  CHECK(open.inner == 704);  // 682.7, rounded up to a multiple of 64
  CHECK(std::get<sg::LlamaSpec>(back(sg::LlamaSpec{.width = 192, .heads = 8}).spec).inner == 512);  // exactly 8/3 * 192
}

TEST_CASE("a written config has every field that transformers writes, with the same value", "[graphs][huggingface]") {
  const auto check = [](const JsonValue& theirs, const JsonValue& ours, const char* architecture) {
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      const std::string& name = theirs.key[i];
      if (name == "transformers_version" || name.ends_with("token_id") || name == "summary_first_dropout") continue;
      CAPTURE(name);
      CHECK(ours.at(name) == theirs[i]);
    }
    CHECK(ours.at("architectures") == JsonValue::list({architecture}));
  };
  check(sg::parse_json(golden("gpt2-tiny")), sg::parse_json(sg::model_config(golden_gpt2)), "GPT2LMHeadModel");
  check(sg::parse_json(golden("llama-tiny")), sg::parse_json(sg::model_config(golden_llama)), "LlamaForCausalLM");
}

TEST_CASE("a config that was read is saved with all of its fields except the element type", "[graphs][huggingface]") {
  const JsonValue theirs = {{"model_type", "llama"},
                            {"torch_dtype", "bfloat16"},
                            {"dtype", "float16"},
                            {"architectures", JsonValue::list({"LlamaModel"})},
                            {"eos_token_id", std::vector{1, 2}},
                            {"custom", {{"a", 1.5}}}};
  CHECK(sg::parse_json(sg::config_to_save(sg::json_line(theirs))) ==
        JsonValue{{"model_type", "llama"},
                  {"architectures", JsonValue::list({"LlamaForCausalLM"})},
                  {"eos_token_id", std::vector{1, 2}},
                  {"custom", {{"a", 1.5}}}});
  CHECK_THROWS_AS(sg::config_to_save("[]"), sg::Error);
}

TEST_CASE("unsupported configs are refused with the field that differs", "[graphs][huggingface][refuses]") {
  struct Wrong {
    JsonValue fields;
    const char* says;
  };
  const Wrong of_gpt2[] = {
      {{{"n_embd", 0}}, "n_embd is 0 (an integer from 1 to 1073741823)"},
      {{{"n_embd", 64.0}}, "n_embd is 64.0 (an integer from 1 to 1073741823)"},
      {{{"n_embd", "64"}}, "n_embd is \"64\" (an integer from 1 to 1073741823)"},
      {{{"vocab_size", 18446744073709551615u}}, "vocab_size is 18446744073709551615 (an integer from 1 to 1073741823)"},
      {{{"n_layer", 1000000}}, "n_layer is 1000000 (an integer from 1 to 10000)"},
      {{{"n_head", 7}}, "n_embd 768 is not a multiple of n_head 7"},
      {{{"n_head", 4}, {"num_attention_heads", 8}}, "n_head is 4, but num_attention_heads, another name for it, is 8"},
      {{{"layer_norm_epsilon", 0}}, "layer_norm_epsilon is 0 (a number, more than 0)"},
      {{{"initializer_range", -1}}, "initializer_range is -1 (a number, 0 or more)"},
      {{{"tie_word_embeddings", 1}}, "tie_word_embeddings is 1 (true or false)"},
      {{{"activation_function", "relu"}},
       "activation_function 'relu' is not known (gelu_new, gelu_pytorch_tanh, gelu_fast, gelu)"},
      {{{"activation_function", 3}}, "activation_function is 3 (a string)"},
      {{{"add_cross_attention", true}}, "add_cross_attention is true (false: cross-attention is not supported)"},
      {{{"quantization_config", {{"bits", 4}}}},
       "quantization_config: quantized weights are not supported (fp32, bf16, fp16)"}};
  for (const Wrong& wrong : of_gpt2)
    CHECK_THROWS_MATCHES(gpt2(wrong.fields), sg::Error, Message(sg::str("config.json: ", wrong.says)));
  const auto rope        = [](const char* type) { return JsonValue{{"rope_type", type}, {"factor", 8.0}}; };
  const Wrong of_llama[] = {
      {{{"hidden_act", "gelu"}}, "hidden_act 'gelu' is not known (silu)"},
      {{{"num_key_value_heads", 5}}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"},
      {{{"num_attention_heads", 24}, {"num_key_value_heads", 8}},
       "hidden_size 4096 is not a multiple of num_attention_heads 24, and there is no head_dim"},
      {{{"head_dim", 5}}, "head size 5 is odd, but rotary embeddings rotate pairs (an even size)"},
      {{{"head_dim", 1000000000}}, "32 heads of size 1000000000 (a product of at most 1073741823)"},
      {{{"rope_scaling", rope("linear")}}, "rope_scaling: rope_type 'linear' is not supported (default)"},
      {{{"rope_scaling", rope("llama3")}}, "rope_scaling: rope_type 'llama3' is not supported (default)"},
      {{{"rope_scaling", {{"type", "dynamic"}}}}, "rope_scaling: type 'dynamic' is not supported (default)"},
      {{{"rope_parameters", rope("yarn")}}, "rope_parameters: rope_type 'yarn' is not supported (default)"},
      {{{"rope_parameters", 5}}, "rope_parameters is 5 (null, or an object)"},
      {{{"rope_parameters", {{"rope_theta", -1}}}}, "rope_parameters: rope_theta is -1 (a number, more than 0)"},
      {{{"rope_parameters", {{"partial_rotary_factor", 0.5}}}},
       "rope_parameters: partial_rotary_factor is 0.5 (1: the whole head)"},
      {{{"rope_parameters", {{"rope_theta", 20000}}}, {"rope_theta", 10000}},
       "rope_theta is 10000 in one place and 20000 in another (equal values)"}};
  for (const Wrong& wrong : of_llama)
    CHECK_THROWS_MATCHES(llama(wrong.fields), sg::Error, Message(sg::str("config.json: ", wrong.says)));
}

TEST_CASE("text that is not a model config is refused", "[graphs][huggingface][refuses]") {
  const auto read = [](const char* text) { return sg::parse_model_config(text, "x/config.json"); };
  CHECK_THROWS_MATCHES(read("{}"), sg::Error,
                       Message("x/config.json: model_type is missing (gpt2, llama, stepgraph_mlp)"));
  CHECK_THROWS_MATCHES(read(R"({"model_type":"mistral"})"), sg::Error,
                       Message("x/config.json: model_type 'mistral' is not known (gpt2, llama, stepgraph_mlp)"));
  CHECK_THROWS_MATCHES(read(R"({"model_type":7})"), sg::Error, Message("x/config.json: model_type is 7 (a string)"));
  CHECK_THROWS_MATCHES(read("[]"), sg::Error, Message("x/config.json: is not an object ({\"model_type\": ...})"));
  CHECK_THROWS_MATCHES(read(R"({"model_type":"gpt2","n_head":2,"n_head":4})"), sg::Error,
                       Message("x/config.json: n_head: given twice (once)"));
  CHECK_THROWS_MATCHES(read(""), sg::Error,
                       MessageMatches(Catch::Matchers::StartsWith("x/config.json: line 1, column 1: ")));
}

TEST_CASE("a randomly damaged config is read or refused, and never crashes the reader", "[graphs][huggingface][fuzz]") {
  std::mt19937 random(5);
  const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  const std::string_view favourites = "0123456789-[]{}\",:.eE\\\xff nul";
  int read = 0, refused = 0;
  for (int trial = 0; trial < sg::testing::cases(2000); ++trial) {
    std::string text = golden(trial % 2 == 0 ? "gpt2-tiny" : "llama-tiny");
    for (std::size_t change = below(3); change-- > 0;) {
      const std::size_t at = below(text.size());
      if (below(3) == 0) {
        text.erase(at, 1 + below(3));
      } else {
        text[at] = favourites[below(favourites.size())];
      }
    }
    try {
      (void)sg::config_to_save(text);
      (void)sg::parse_model_config(text, "x/config.json");
      ++read;
    } catch (const sg::Error&) {
      ++refused;
    }
  }
  CHECK(read > sg::testing::at_least(500));
  CHECK(refused > sg::testing::at_least(500));
}
