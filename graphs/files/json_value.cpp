#include "graphs/files/json_value.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

constexpr std::size_t max_depth = 64;

// Builds a JsonValue from the inside out: what is open is on a stack and moves into its parent when it closes.
class Builder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Builder(std::string_view text) : text_(text) {}

  JsonValue take() { return std::move(result_); }

  bool null() override { return add({}); }
  bool boolean(bool truth) override { return add({.kind = JsonValue::Kind::boolean, .truth = truth}); }
  bool number_integer(number_integer_t number) override { return add_integer(number); }
  bool number_unsigned(number_unsigned_t number) override { return add_integer(number); }
  bool number_float(number_float_t number, const string_t& written) override {
    const bool whole = written.find_first_of(".eE") == string_t::npos;  // and too large for 64 bits
    return add({.kind = whole ? JsonValue::Kind::integer : JsonValue::Kind::real, .text = written, .number = number});
  }
  bool string(string_t& letters) override { return add({.kind = JsonValue::Kind::string, .text = std::move(letters)}); }
  bool binary(binary_t&) override { return false; }  // not in text

  bool start_object(std::size_t) override { return open(JsonValue::Kind::object); }
  bool start_array(std::size_t) override { return open(JsonValue::Kind::list); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    JsonValue& object = open_.back();
    object.key.push_back(name);
    if (!keys_.back().insert(name).second) throw Error(ErrorKind::config, path() + ": given twice (once)");
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    std::string_view what = error.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 2: what"; the place is counted here, for all
    // kinds.
    if (const auto end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
    if (what.starts_with("parse error at")) {
      if (const auto end = what.find(": "); end != what.npos) what.remove_prefix(end + 2);
    }
    refuse_at(position, std::string(what));
  }

 private:
  template <class Integer>
  bool add_integer(Integer number) {
    return add({.kind = JsonValue::Kind::integer, .text = str(number), .number = static_cast<double>(number)});
  }
  bool add(JsonValue value) {
    (open_.empty() ? result_ : open_.back().items.emplace_back()) = std::move(value);
    return true;
  }
  bool open(JsonValue::Kind kind) {
    if (open_.size() == max_depth)
      throw Error(ErrorKind::config, str(path(), ": nested too deep (at most ", max_depth, " levels)"));
    open_.push_back({.kind = kind});
    keys_.emplace_back();
    return true;
  }
  bool close() {
    JsonValue value = std::move(open_.back());
    open_.pop_back();
    keys_.pop_back();
    return add(std::move(value));
  }
  // Of the key that was read last in each open object.
  [[nodiscard]] std::string path() const {
    std::string out;
    for (const JsonValue& value : open_) {
      if (!value.key.empty()) out += (out.empty() ? "" : ".") + value.key.back();
    }
    return out.empty() ? "JSON" : out;
  }
  [[noreturn]] void refuse_at(std::size_t position, const std::string& what) const {
    const std::string_view before = text_.substr(0, std::min(std::max<std::size_t>(position, 1) - 1, text_.size()));
    const auto line               = 1 + std::count(before.begin(), before.end(), '\n');
    const std::size_t break_at    = before.rfind('\n');
    const std::size_t column      = before.size() - (break_at == before.npos ? 0 : break_at + 1) + 1;
    throw Error(ErrorKind::config, str("line ", line, ", column ", column, ": ", what));
  }

  std::string_view text_;
  std::vector<JsonValue> open_;
  std::vector<std::unordered_set<std::string>> keys_;  // of each that is open, for quick search
  JsonValue result_;
};

// Letters from a command line need not be UTF-8.
std::string quoted(const std::string& letters) {
  return nlohmann::json(letters).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

std::string to_text(const JsonValue& value) {
  switch (value.kind) {
    case JsonValue::Kind::null:
      return "null";
    case JsonValue::Kind::boolean:
      return value.truth ? "true" : "false";
    case JsonValue::Kind::integer:
    case JsonValue::Kind::real:
      return value.text;
    case JsonValue::Kind::string:
      return quoted(value.text);
    case JsonValue::Kind::list:
    case JsonValue::Kind::object:
      break;
  }
  const bool object = value.kind == JsonValue::Kind::object;
  std::string out;
  for (std::size_t i = 0; i < value.items.size(); ++i)
    out += str(i == 0 ? "" : ", ", object ? quoted(value.key[i]) + ": " : "", to_text(value.items[i]));
  return object ? "{" + out + "}" : "[" + out + "]";
}

}  // namespace

const JsonValue* JsonValue::find(std::string_view name) const noexcept {
  const auto found = std::find(key.begin(), key.end(), name);
  return found == key.end() ? nullptr : &items[static_cast<std::size_t>(found - key.begin())];
}

JsonValue* JsonValue::find(std::string_view name) noexcept {
  return const_cast<JsonValue*>(std::as_const(*this).find(name));
}

JsonValue parse_json(std::string_view text) {
  Builder builder(text);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

std::string excerpt(const JsonValue& value) {
  constexpr std::size_t longest = 60;
  std::string text              = to_text(value);
  if (text.size() > longest) text.replace(longest, text.npos, "...");
  return text;
}

}  // namespace stepgraph
