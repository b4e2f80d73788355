#include "tools/stepgraph/commands/prompt.hpp"

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph::cli {
namespace {

constexpr std::string_view separators = ", \t\n";

bool looks_like_ids(std::string_view text) {
  return text.find_first_not_of("0123456789, \t\n") == text.npos && text.find_first_of("0123456789") != text.npos;
}

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::config, "--prompt: " + why); }

}  // namespace

Prompt parse_prompt(std::string_view text, bool as_text, std::int64_t vocab) {
  if (text.empty()) refuse("is empty (text, or token ids: 1,2,3)");
  Prompt prompt{.is_text = as_text || !looks_like_ids(text)};
  if (prompt.is_text) {
    for (const char letter : text) {
      const auto byte = static_cast<unsigned char>(letter);
      if (byte >= vocab)
        refuse(str("has a byte ", int{byte}, ", but the model's vocabulary has ", vocab, " tokens (token ids: 1,2,3)"));
      prompt.tokens.push_back(byte);
    }
    return prompt;
  }
  for (std::size_t begin = text.find_first_not_of(separators); begin != text.npos;) {
    const std::size_t end         = std::min(text.find_first_of(separators, begin), text.size());
    const std::string_view digits = text.substr(begin, end - begin);
    const auto id                 = to_number<std::int64_t>(digits);
    if (!id || *id >= vocab)
      refuse(str("token ", digits, " is not in the model's vocabulary (0 to ", vocab - 1, "; or --text)"));
    prompt.tokens.push_back(static_cast<std::int32_t>(*id));
    begin = text.find_first_not_of(separators, end);
  }
  return prompt;
}

std::string text_of(const std::vector<std::int32_t>& tokens, bool for_terminal) {
  std::string text;
  for (const std::int32_t token : tokens) {
    const bool moves = (token < 32 && token != '\n' && token != '\t') || token == 127;
    if (token > 255) {
      text += str("<", token, ">");
    } else if (!for_terminal || !moves) {
      text += static_cast<char>(token);
    }
  }
  return text;
}

}  // namespace stepgraph::cli
