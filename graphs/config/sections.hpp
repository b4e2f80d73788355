#pragma once
#include <string_view>

#include "graphs/config/config.hpp"
#include "graphs/config/reader.hpp"
#include "graphs/files/json_value.hpp"

// Parts of reading a config: internal to graphs/.
namespace stepgraph {

// Reads and checks `model`: {"kind": "gpt2", ...} or {"load": "DIR"}.
[[nodiscard]] ModelSource read_model_source(const JsonValue& model);

// Read `data`, `eval` and `checkpoint` of the root object.
[[nodiscard]] DataSpec read_data(const ConfigReader& root);
[[nodiscard]] EvalPlan read_eval(const ConfigReader& root, const DataSpec& data);
[[nodiscard]] CheckpointPlan read_checkpoint(const ConfigReader& root);

// Reads `optimizer` of the root object; `value` is this section, or null.
void read_optimizer(const ConfigReader& root, const JsonValue* value, OptimizerPlan& optimizer);

// Reads `shard` of the root object. The fields of `shard` have the values of the preset.
void read_shard(const ConfigReader& root, ShardPlan& shard);

// Reads and checks `offload` of the root object; `value` is this section, or null.
void read_offload(const ConfigReader& root, const JsonValue* value, OffloadPlan& offload);

// Checks that model, batch, layout and schedule fit each other, as far as possible without opening a file.
void check_fit(const Config& config);

// Applies an override such as "layout.dp=2".
void apply_override(JsonValue& config, std::string_view assignment);

}  // namespace stepgraph
