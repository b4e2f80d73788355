#pragma once
#include <charconv>
#include <concepts>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

// Splitting and joining text.
namespace stepgraph {

// The pieces between separators: at least one, possibly empty.
[[nodiscard]] inline std::vector<std::string_view> split_text(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    pieces.push_back(text.substr(begin, end == std::string_view::npos ? end : end - begin));
    if (end == std::string_view::npos) return pieces;
    begin = end + 1;
  }
}

// The number that the whole text is; none when it is not a number of this type.
template <std::integral T>
[[nodiscard]] std::optional<T> to_number(std::string_view text) {
  T number{};
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (failed != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// The names of all items with separators between them: "1, 2, 3".
template <class Range, class Name>
[[nodiscard]] std::string join_text(const Range& range, std::string_view separator, const Name& name) {
  std::string out;
  bool first = true;
  for (const auto& item : range) {
    if (!first) out += separator;
    out += name(item);
    first = false;
  }
  return out;
}

}  // namespace stepgraph
