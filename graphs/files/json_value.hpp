#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// JSON read for people who must be told what is wrong with it: internal to graphs/.
namespace stepgraph {

// A value as it was written. Numbers keep their letters, so that a message can show `2.0` or twenty digits as they are;
// an object keeps the order of its keys.
struct JsonValue {
  enum class Kind : std::uint8_t { null, boolean, integer, real, string, list, object };

  Kind kind                    = Kind::null;
  std::string text             = {};  // a string, or a number as it was written
  double number                = 0;   // integer and real
  bool truth                   = false;
  std::vector<std::string> key = {};                                          // of an object's items
  std::vector<JsonValue> items = {};                                          // of a list or an object
  [[nodiscard]] const JsonValue* find(std::string_view name) const noexcept;  // null when there is none
  [[nodiscard]] JsonValue* find(std::string_view name) noexcept;
};

// Throws Error(config): "line 3, column 7: what is wrong" for what is not JSON (comments are not), "layout.tp: given
// twice" for an object that says something two times, and for what is nested beyond any sense.
[[nodiscard]] JsonValue parse_json(std::string_view text);

// The value in a message: as JSON, cut short when it is long.
[[nodiscard]] std::string excerpt(const JsonValue& value);

}  // namespace stepgraph
