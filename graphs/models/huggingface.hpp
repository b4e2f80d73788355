#pragma once
#include <filesystem>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/models/mlp.hpp"
#include "graphs/models/model.hpp"

namespace stepgraph {

// The content of a config.json of a Hugging Face folder.
struct ModelConfig {
  std::variant<Gpt2Spec, LlamaSpec, MlpSpec> spec = {};
  std::vector<std::string> notes = {};  // settings that are ignored, such as dropout, for the user to read
};

// Reads a config.json; `subject` is its path, for messages. Missing fields have the defaults of transformers. Rotary
// parameters may be at the top level ("rope_theta") or in their own object ("rope_parameters"). Throws Error(config)
// for a model that this library does not support: another kind, activation or rotary scaling, or quantized weights.
[[nodiscard]] ModelConfig parse_model_config(std::string_view text, std::string_view subject);

// A model, with a config.json that describes it.
[[nodiscard]] Model make_model(const std::variant<Gpt2Spec, LlamaSpec, MlpSpec>& spec);

// The model of a config.json; its `config` is config_to_save(text). `dropout` applies during training. The dropout of
// the config.json is ignored and listed in the model's notes.
[[nodiscard]] Model model_from_config(std::string_view text, std::string_view subject, double dropout = 0);

// The model of a Hugging Face folder, from its config.json. `ModelFolder` reads the weights.
[[nodiscard]] Model load_model(const std::filesystem::path& folder, double dropout = 0);

// A complete config.json that transformers loads and parse_model_config reads back.
[[nodiscard]] std::string model_config(const Gpt2Spec& spec);
[[nodiscard]] std::string model_config(const LlamaSpec& spec);
[[nodiscard]] std::string model_config(const MlpSpec& spec);  // transformers has no such model

// A config.json as it is saved next to new weights: all fields, but with the architecture of a language model with a
// head, and without the element type of the original weights (transformers would round the new weights to it).
[[nodiscard]] std::string config_to_save(std::string_view text);

}  // namespace stepgraph
