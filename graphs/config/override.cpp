#include <string>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/config/sections.hpp"

namespace stepgraph {
namespace {

[[noreturn]] void refuse(std::string_view assignment, const std::string& why) {
  throw Error(ErrorKind::config, str("override '", assignment, "': ", why));
}

// Text that begins with a bracket or quote must be JSON. Other text is a string unless all of it is JSON: `1f1b` and
// `adamw` are strings, `2` and `true` are not.
JsonValue parse_value(std::string_view assignment, std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  const bool is_json      = first != text.npos && std::string_view("{[\"").find(text[first]) != std::string_view::npos;
  try {
    return parse_json(text);
  } catch (const Error& error) {
    if (is_json) refuse(assignment, str("the value is not JSON: ", error.what()));
  }
  return text;
}

}  // namespace

void apply_override(JsonValue& config, std::string_view assignment) {
  const std::size_t equals = assignment.find('=');
  if (equals == assignment.npos) refuse(assignment, "no '=' (path=value, as in layout.dp=2)");
  const std::string_view path = assignment.substr(0, equals);
  JsonValue* place            = &config;
  std::string reached;
  for (const std::string_view key : split_text(path, '.')) {
    if (key.empty()) refuse(assignment, "a key is empty (path=value, as in layout.dp=2)");
    if (place->kind != JsonValue::Kind::object)
      refuse(assignment, str(reached.empty() ? "the config" : reached, " is ", excerpt(*place), ", which has no keys"));
    JsonValue* next = place->find(key);
    if (!next) next = &place->set(key, JsonValue::object());
    reached += str(reached.empty() ? "" : ".", key);
    place = next;
  }
  *place = parse_value(assignment, assignment.substr(equals + 1));
}

}  // namespace stepgraph
