#pragma once
#include <string_view>

#include "graphs/config/config.hpp"
#include "graphs/files/json_value.hpp"

// Parts of reading a config: internal to graphs/.
namespace stepgraph {

// `model`, with what its own numbers allow: {"kind": "gpt2", ...} or {"load": "DIR"}.
[[nodiscard]] ModelSource read_model_source(const JsonValue& model);

// Do model, batch, layout and schedule fit each other, as far as is known without opening a file?
void check_fit(const Config& config);

// "layout.dp=2": what a config's text becomes.
void apply_override(JsonValue& config, std::string_view assignment);

}  // namespace stepgraph
