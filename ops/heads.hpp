#pragma once
#include <string_view>

#include "ops/attention.hpp"

// What ops on packed heads have in common: internal to ops/.
namespace stepgraph {

// Refuses heads that do not divide into groups, and a qkv that does not hold them.
void check_heads(const Tape& tape, std::string_view op, const Tensor& qkv, const Heads& heads);

}  // namespace stepgraph
