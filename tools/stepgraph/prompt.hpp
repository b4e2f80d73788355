#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace stepgraph::cli {

// What a text is to be continued from.
struct Prompt {
  bool is_text                     = false;  // tokens are bytes
  std::vector<std::int32_t> tokens = {};
};

// Numbers between commas or blanks are token ids; anything else, or anything with `as_text`, is text, each byte a
// token. Refuses nothing at all and what is not below `vocab`.
[[nodiscard]] Prompt parse_prompt(std::string_view text, bool as_text, std::int64_t vocab);

// Tokens as text, for eyes: letters that would move the cursor are left out. What is no byte is shown as its number.
[[nodiscard]] std::string text_of(const std::vector<std::int32_t>& tokens, bool for_terminal);

}  // namespace stepgraph::cli
