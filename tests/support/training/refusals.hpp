#pragma once
#include <string>
#include <string_view>
#include <vector>

// Configs that are refused.
namespace stepgraph::testing {

inline constexpr const char* smallest_config = R"({"model": {"kind": "gpt2"}, "data": {"synthetic": 1}, "batch": {}})";

// The error message for a config; empty if it is accepted. CHECKs that the error is of kind config.
[[nodiscard]] std::string refusal(std::string_view text, const std::vector<std::string>& overrides = {});

struct Refused {
  std::vector<std::string> overrides;  // of smallest_config
  std::string why;                     // the whole message
};
// CHECKs each of them.
void check_refused(const std::vector<Refused>& cases);

}  // namespace stepgraph::testing
