#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace stepgraph::cli {

// The tokens that generation continues.
struct Prompt {
  bool is_text                     = false;  // tokens are bytes
  std::vector<std::int32_t> tokens = {};
};

// A text of numbers with commas or blanks between them is token ids. Any other text is text in which each byte is a
// token; with `as_text` every text is. Throws Error(config) for an empty prompt and for tokens that are not below
// `vocab`.
[[nodiscard]] Prompt parse_prompt(std::string_view text, bool as_text, std::int64_t vocab);

// Tokens as text. A token above 255 becomes its number. `for_terminal` leaves out control characters that would move
// the cursor.
[[nodiscard]] std::string text_of(const std::vector<std::int32_t>& tokens, bool for_terminal);

}  // namespace stepgraph::cli
