#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "graphs/files/token_data.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/models/mlp.hpp"
#include "graphs/plan/memory_preset.hpp"
#include "graphs/plan/plan.hpp"

namespace stepgraph {

// A Hugging Face folder: config.json and model.safetensors.
struct LoadFrom {
  std::string folder = {};
  double dropout     = 0;  // what its config.json says of it is not done: that is for the training it came from
  friend bool operator==(const LoadFrom&, const LoadFrom&) = default;
};

// A fresh model, or one that was saved.
using ModelSource = std::variant<Gpt2Spec, LlamaSpec, MlpSpec, LoadFrom>;

// A run as one JSON file says it: what is trained on what, in which layout. Only `model`, `data` and `batch` are
// required; what is left out has the values of these structs.
//
// A config that was read is right as far as it can be known without opening another file: every key is known, every
// number is in range, and model, batch and layout fit each other. What a loaded model, a token file or a schedule file
// says is checked where it is read. File names are relative to the current folder.
struct Config {
  ModelSource model   = Gpt2Spec{};
  DataSpec data       = SyntheticTokens{};
  BatchSpec batch     = {.global = 8, .micro = 2, .seq = 128};
  Plan plan           = {};
  MemoryPreset preset = MemoryPreset::basic;  // what chose those parts of the plan that no key says
  int timeout_ms      = 30'000;               // of communication; on loopback nothing waits, so it never expires
  std::uint64_t seed  = 0;                    // of fresh weights
  int threads         = 0;                    // 0: all cores
  std::string backend = "loopback";

  friend bool operator==(const Config&, const Config&) = default;
};

// Reads a config after `path=value` overrides, in order: "layout.dp=2", "optimizer.kind=sgd", or a whole section,
// "data={\"synthetic\": 1}". A value is JSON if it can be read so, else a string; objects on the way that are missing
// are made. Throws Error(config): "layout.tp: what is wrong (what would be right)", a likely key for a mistyped one;
// "line 3, column 7: ..." for what is not JSON.
[[nodiscard]] Config parse_config(std::string_view text, std::span<const std::string> overrides = {});
[[nodiscard]] Config read_config(const std::string& path, std::span<const std::string> overrides = {});

// The rest of what read_config checks, for a model that was loaded from a folder: does it fit batch and layout? Throws
// Error(config) that names the config's key.
void check_fit(const Config& config, const Model& model);

// Every value, on one line: a config that parses back to an equal one.
[[nodiscard]] std::string to_json(const Config& config);

}  // namespace stepgraph
