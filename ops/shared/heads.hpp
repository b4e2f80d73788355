#pragma once
#include <string_view>

#include "ops/layers/attention.hpp"

// Shared by ops on packed heads. Internal to ops/.
namespace stepgraph {

// Throws Error(config) if kv_heads does not divide heads, or qkv does not have the matching width.
void check_heads(const Tape& tape, std::string_view op, const Tensor& qkv, const Heads& heads);

}  // namespace stepgraph
