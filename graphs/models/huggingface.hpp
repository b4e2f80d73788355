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

// What the config.json of a Hugging Face folder describes.
struct ModelConfig {
  std::variant<Gpt2Spec, LlamaSpec, MlpSpec> spec = {};
  std::vector<std::string> notes = {};  // what it asks for that is not done, as dropout: for people to read
};

// Reads a config.json; `subject` is its path, for messages. What it leaves out is what transformers would take. Rotary
// parameters may be at the top ("rope_theta") or in an object of their own ("rope_parameters"). Throws Error(config)
// for what would make another model than this library computes: other kinds, activations, rotary scaling, quantization.
[[nodiscard]] ModelConfig parse_model_config(std::string_view text, std::string_view subject);

// A model with the config.json that describes it.
[[nodiscard]] Model make_model(const std::variant<Gpt2Spec, LlamaSpec, MlpSpec>& spec);

// The model it describes, ready to be loaded or trained afresh; its `config` is config_to_save(text).
// `dropout` is while training; what the config says of it is noted, not done.
[[nodiscard]] Model model_from_config(std::string_view text, std::string_view subject, double dropout = 0);

// The model of a Hugging Face folder, by its config.json; `Checkpoint` has the weights.
[[nodiscard]] Model load_model(const std::filesystem::path& folder, double dropout = 0);

// A whole config.json, which transformers loads and parse_model_config reads back.
[[nodiscard]] std::string model_config(const Gpt2Spec& spec);
[[nodiscard]] std::string model_config(const LlamaSpec& spec);
[[nodiscard]] std::string model_config(const MlpSpec& spec);  // transformers has no such model

// A config.json that was read, as it goes with weights that are written: all it says, but that it is a language model
// with a head, and without the element type of the weights it came with (transformers would round ours to it).
[[nodiscard]] std::string config_to_save(std::string_view text);

}  // namespace stepgraph
