#include "graphs/config/reader.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/nearest.hpp"
#include "engine/base/size.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

using Kind = JsonValue::Kind;

// "ZeRO-3" and "FULL_SHARD" as "zero3" and "fullshard".
std::string plain_text(std::string_view text) {
  std::string plain;
  for (const char letter : text) {
    if (letter == '_' || letter == '-' || letter == ' ') continue;
    plain += letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
  }
  return plain;
}

template <class Integer>
std::string range_words(Integer min, Integer max) {
  if (min == max) return str(min);
  return str("an integer from ", min, " to ", max);
}

}  // namespace

std::string list_names(const ConfigReader::Names& names) {
  return join_text(names, ", ", [](std::string_view name) { return std::string(name); });
}

std::string known_text(std::string_view given, const ConfigReader::Names& known) {
  return str(did_you_mean(given, known), "known: ", list_names(known));
}

ConfigReader::ConfigReader(const JsonValue* object, std::string path, Names known, std::string of)
    : object_(object), path_(std::move(path)), known_(std::move(known)) {
  if (!object_) return;
  if (object_->kind != Kind::object)
    throw Error(ErrorKind::config, str(path_.empty() ? "config" : path_, ": ", excerpt(*object_),
                                       " is not an object (an object with the keys: ", list_names(known_), ")"));
  for (const std::string& key : object_->key) {
    if (std::find(known_.begin(), known_.end(), key) == known_.end())
      refuse(key, str("unknown key", of, " (", known_text(key, known_), ")"));
  }
}

std::string ConfigReader::path(std::string_view key) const { return str(path_, path_.empty() ? "" : ".", key); }

void ConfigReader::refuse(std::string_view key, const std::string& why) const {
  throw Error(ErrorKind::config, str(path(key), ": ", why));
}

ConfigReader ConfigReader::section(std::string_view key, Names known) const {
  return ConfigReader(value(key), path(key), std::move(known));
}

const JsonValue* ConfigReader::required(std::string_view key, std::string_view example) const {
  const JsonValue* found = value(key);
  if (!found) refuse(key, str("missing (", example, ")"));
  return found;
}

const JsonValue* ConfigReader::value(std::string_view key) const { return object_ ? object_->find(key) : nullptr; }

const JsonValue& ConfigReader::expect(std::string_view key, Kind kind, std::string_view what,
                                      const std::string& right) const {
  const JsonValue& found = *value(key);
  if (found.kind != kind) refuse(key, str(excerpt(found), " is not ", what, " (", right, ")"));
  return found;
}

std::int64_t ConfigReader::read_integer(std::string_view key, std::int64_t min, std::int64_t max) const {
  const JsonValue& found = expect(key, Kind::integer, "an integer", range_words(min, max));
  const auto number      = to_number<std::int64_t>(found.text);
  if (!number || *number < min || *number > max)
    refuse(key, str(excerpt(found), " is out of range (", range_words(min, max), ")"));
  return *number;
}

std::uint64_t ConfigReader::read_unsigned(std::string_view key, std::uint64_t min, std::uint64_t max) const {
  const JsonValue& found = expect(key, Kind::integer, "an integer", range_words(min, max));
  const auto number      = to_number<std::uint64_t>(found.text);
  if (!number || *number < min || *number > max)
    refuse(key, str(excerpt(found), " is out of range (", range_words(min, max), ")"));
  return *number;
}

void ConfigReader::integers(std::string_view key, std::vector<int>& field, const Names& words, int min, int max) const {
  const JsonValue* found = value(key);
  if (!found || (found->kind == Kind::string && std::find(words.begin(), words.end(), found->text) != words.end()))
    return;
  std::string right = found->kind == Kind::string ? did_you_mean(found->text, words) : "";
  for (const std::string_view word : words) right += str("\"", word, "\", ");
  right += str("or a list of integers from ", min, " to ", max);
  if (found->kind != Kind::list || found->items.empty())
    refuse(key, str(excerpt(*found), " is not a list (", right, ")"));
  std::vector<int> numbers;
  for (const JsonValue& item : found->items) {
    const auto number = item.kind == Kind::integer ? to_number<std::int64_t>(item.text) : std::nullopt;
    if (!number || *number < min || *number > max) refuse(key, str(excerpt(item), " in the list (", right, ")"));
    numbers.push_back(static_cast<int>(*number));
  }
  field = std::move(numbers);
}

void ConfigReader::size(std::string_view key, std::int64_t& field) const {
  const JsonValue* found = value(key);
  if (!found) return;
  if (found->kind != Kind::string) {
    if (found->kind != Kind::integer)
      refuse(key, str(excerpt(*found), " is not a size (bytes, or a string: \"24GiB\")"));
    if (found->text.starts_with('-')) refuse(key, str(excerpt(*found), " is negative (bytes, or a string: \"24GiB\")"));
    return integer(key, field, 0, std::numeric_limits<std::int64_t>::max());
  }
  try {
    field = static_cast<std::int64_t>(parse_size(found->text));
  } catch (const Error& error) {
    refuse(key, error.what());
  }
}

void ConfigReader::real(std::string_view key, double& field, const RealRange& range) const {
  const JsonValue* found = value(key);
  if (!found) return;
  if (found->kind != Kind::integer) expect(key, Kind::real, "a number", str("a number ", range.words));
  const double number = found->number;
  const bool fits     = (range.min_allowed ? number >= range.min : number > range.min) && number < range.below;
  if (!fits) refuse(key, str(excerpt(*found), " is out of range (a number ", range.words, ")"));
  field = number + 0.0;  // no -0
}

void ConfigReader::quantity(std::string_view key, double& field, const RealRange& range,
                            std::span<const Unit> units) const {
  const JsonValue* found = value(key);
  if (!found || found->kind != Kind::string) return real(key, field, range);
  const std::string_view text = found->text;
  double number               = 0;
  const auto [end, failed]    = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string_view unit       = text.substr(static_cast<std::size_t>(end - text.data()));
  if (unit.starts_with(' ')) unit.remove_prefix(1);
  const auto named = std::find_if(units.begin(), units.end(), [&](const Unit& each) { return each.name == unit; });
  if (failed != std::errc{} || named == units.end())
    refuse(key, str(excerpt(*found), " is not a number with a unit (",
                    join_text(units, ", ", [](const Unit& each) { return std::string(each.name); }), ": \"300",
                    units.front().name, "\")"));
  number          = number * named->times / named->per;
  const bool fits = (range.min_allowed ? number >= range.min : number > range.min) && number < range.below;
  if (!fits) refuse(key, str(excerpt(*found), " is out of range (", range.words, ")"));
  field = number + 0.0;
}

void ConfigReader::boolean(std::string_view key, bool& field) const {
  if (value(key)) field = expect(key, Kind::boolean, "true or false", "true or false, without quotes").truth;
}

void ConfigReader::text(std::string_view key, std::string& field) const {
  if (!value(key)) return;
  const JsonValue& found = expect(key, Kind::string, "a string", "text in quotes");
  if (found.text.empty()) refuse(key, "\"\" is empty (a name)");
  if (found.text.find('\0') != found.text.npos) refuse(key, str(excerpt(found), " has a zero byte (a name)"));
  field = found.text;
}

void ConfigReader::texts(std::string_view key, std::vector<std::string>& field) const {
  const JsonValue* found = value(key);
  if (!found) return;
  if (found->kind != Kind::list) return text(key, field.emplace_back());
  if (found->empty()) refuse(key, "[] is empty (a name, or a list of names)");
  for (const JsonValue& item : found->items) {
    const bool right = item.kind == Kind::string && !item.text.empty() && item.text.find('\0') == item.text.npos;
    if (!right) refuse(key, str(excerpt(item), " in the list is not a name (text in quotes)"));
    field.push_back(item.text);
  }
}

bool ConfigReader::is_empty_text(std::string_view key) const { return is_text(key, ""); }

bool ConfigReader::is_text(std::string_view key) const {
  const JsonValue* found = value(key);
  return found && found->kind == Kind::string;
}

bool ConfigReader::is_text(std::string_view key, std::string_view text) const {
  return is_text(key) && value(key)->text == text;
}

std::size_t ConfigReader::choice(std::string_view key, std::size_t fallback, const Names& names, const Names& later,
                                 std::span<const OtherName> others) const {
  if (!value(key)) return fallback;
  const std::string list = list_names(names);
  const JsonValue& given = expect(key, Kind::string, "a string", "one of: " + list);
  const auto found       = std::find(names.begin(), names.end(), given.text);
  if (found != names.end()) return static_cast<std::size_t>(found - names.begin());
  if (std::find(later.begin(), later.end(), given.text) != later.end()) refuse_unsupported(key, given.text, list);
  const std::string plain = plain_text(given.text);
  for (const OtherName& other : others) {
    if (plain == other.there) refuse(key, str(excerpt(given), " is called ", other.here, " here (known: ", list, ")"));
  }
  refuse(key, str(excerpt(given), " is unknown (", known_text(given.text, names), ")"));
}

void ConfigReader::refuse_unsupported(std::string_view key, std::string_view given, std::string_view supported) const {
  refuse(key, str("'", given, "' is not supported by this version (supported: ", supported, ")"));
}

void ConfigReader::only(std::string_view key, std::string_view supported) const {
  std::string given(supported);
  text(key, given);
  if (given != supported) {
    const std::string shown = excerpt(given);
    refuse_unsupported(key, std::string_view(shown).substr(1, shown.size() - 2), supported);
  }
}

void ConfigReader::only_false(std::string_view key) const {
  bool given = false;
  boolean(key, given);
  if (given) refuse_unsupported(key, "true", "false");
}

}  // namespace stepgraph
