#include "graphs/files/json_value.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ostream>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

using Kind = JsonValue::Kind;

// A code point of UTF-8 text, or the longest piece of a broken one (Unicode 15, table 3-7).
struct Letter {
  std::size_t length = 1;  // bytes
  std::uint32_t code = 0;
  bool valid         = true;
};

Letter letter_at(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto lead = byte(at);
  if (lead < 0x80) return {.code = lead};
  if (lead < 0xc2 || lead > 0xf4) return {.valid = false};
  const std::size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  std::uint32_t code       = lead & (0x7fu >> length);
  for (std::size_t i = 1; i < length; ++i) {
    unsigned least = 0x80, most = 0xbf;
    if (i == 1 && lead == 0xe0) least = 0xa0;  // no overlong forms
    if (i == 1 && lead == 0xf0) least = 0x90;
    if (i == 1 && lead == 0xed) most = 0x9f;  // no surrogates
    if (i == 1 && lead == 0xf4) most = 0x8f;  // at most U+10FFFF
    if (at + i >= text.size() || byte(at + i) < least || byte(at + i) > most) return {.length = i, .valid = false};
    code = (code << 6) | (byte(at + i) & 0x3fu);
  }
  return {.length = length, .code = code};
}

void append_hex(std::string& out, std::uint32_t unit) {
  constexpr char digits[] = "0123456789abcdef";
  out += "\\u";
  for (const int shift : {12, 8, 4, 0}) out += digits[(unit >> shift) & 15];
}

// How a value is written.
struct Style {
  std::string_view colon = ":", comma = ",";
  bool ascii = false;
  int indent = 0;  // blanks; 0: all on one line
};

class Writer {
 public:
  explicit Writer(const Style& style) : style_(style) {}

  void write(const JsonValue& value) {
    switch (value.kind) {
      case Kind::null:
        out_ += "null";
        break;
      case Kind::boolean:
        out_ += value.truth ? "true" : "false";
        break;
      case Kind::integer:
      case Kind::real:
        out_ += value.text;
        break;
      case Kind::string:
        write_string(value.text);
        break;
      case Kind::list:
      case Kind::object:
        write_items(value);
        break;
    }
  }
  [[nodiscard]] std::string take() { return std::move(out_); }

 private:
  void write_items(const JsonValue& value) {
    const bool object = value.is_object();
    out_ += object ? '{' : '[';
    depth_ += style_.indent;
    for (std::size_t i = 0; i < value.size(); ++i) {
      if (i > 0) out_ += style_.comma;
      new_line();
      if (object) {
        write_string(value.key[i]);
        out_ += style_.colon;
      }
      write(value[i]);
    }
    depth_ -= style_.indent;
    if (!value.empty()) new_line();
    out_ += object ? '}' : ']';
  }

  void new_line() {
    if (style_.indent == 0) return;
    out_ += '\n';
    out_.append(static_cast<std::size_t>(depth_), ' ');
  }

  void write_string(std::string_view text) {
    constexpr std::string_view escaped = "\"\\\b\f\n\r\t", names = "\"\\bfnrt";
    out_ += '"';
    for (std::size_t i = 0; i < text.size();) {
      const Letter letter = letter_at(text, i);
      if (!letter.valid) {
        out_ += style_.ascii ? "\\ufffd" : "\xef\xbf\xbd";
      } else if (const std::size_t known = escaped.find(text[i]); known != escaped.npos) {
        out_ += '\\';
        out_ += names[known];
      } else if (letter.code < 0x20 || (style_.ascii && letter.code >= 0x7f)) {
        write_code(letter.code);
      } else {
        out_ += text.substr(i, letter.length);
      }
      i += letter.length;
    }
    out_ += '"';
  }

  void write_code(std::uint32_t code) {
    if (code < 0x10000) return append_hex(out_, code);
    append_hex(out_, 0xd800 + ((code - 0x10000) >> 10));
    append_hex(out_, 0xdc00 + ((code - 0x10000) & 0x3ff));
  }

  Style style_;
  std::string out_;
  int depth_ = 0;  // blanks
};

std::string written(const JsonValue& value, const Style& style) {
  Writer writer(style);
  writer.write(value);
  return writer.take();
}

// "0.02", "1.0", "1e-05", "1.5e+16": plain from 1e-4 to below 1e15, and always recognisable as a real.
std::string real_text(double real) {
  char buffer[40];
  const char* const end = std::to_chars(buffer, buffer + sizeof buffer, real, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<std::size_t>(end - buffer));
  std::string out;
  if (text.front() == '-') {
    out = "-";
    text.remove_prefix(1);
  }
  const std::size_t e = text.find('e');
  std::string digits(1, text.front());
  if (e > 1) digits += text.substr(2, e - 2);
  const std::string_view exponent = text.substr(e);                                     // "e-05"
  const int point  = 1 + *to_number<int>(exponent.substr(exponent[1] == '+' ? 2 : 1));  // digits before it
  const int length = static_cast<int>(digits.size());
  if (point > 15 || point <= -4) return str(out, digits[0], length > 1 ? "." : "", digits.substr(1), exponent);
  if (point <= 0) return str(out, "0.", std::string(static_cast<std::size_t>(-point), '0'), digits);
  if (point >= length) return str(out, digits, std::string(static_cast<std::size_t>(point - length), '0'), ".0");
  return str(out, digits.substr(0, static_cast<std::size_t>(point)), ".",
             digits.substr(static_cast<std::size_t>(point)));
}

[[noreturn]] void refuse_kind(const JsonValue& value, std::string_view right) {
  throw Error(ErrorKind::config, str("JSON: ", excerpt(value), " is not ", right));
}

}  // namespace

JsonValue::JsonValue(std::string_view letters) : JsonValue(std::string(letters)) {}
JsonValue::JsonValue(std::string letters) : kind(Kind::string), text(std::move(letters)) {}

JsonValue::JsonValue(double real) {
  if (!std::isfinite(real)) return;
  kind   = Kind::real;
  number = real;
  text   = real_text(real);
}

JsonValue::JsonValue(std::initializer_list<JsonField> fields) : kind(Kind::object) { add(fields); }

JsonValue JsonValue::object() {
  JsonValue made;
  made.kind = Kind::object;
  return made;
}

JsonValue JsonValue::list(std::initializer_list<JsonValue> items) {
  JsonValue made;
  made.kind  = Kind::list;
  made.items = items;
  return made;
}

void JsonValue::set_integer(std::int64_t value) {
  kind   = Kind::integer;
  number = static_cast<double>(value);
  text   = str(value);
}

void JsonValue::set_integer(std::uint64_t value) {
  kind   = Kind::integer;
  number = static_cast<double>(value);
  text   = str(value);
}

double JsonValue::as_real() const {
  if (!is_number()) refuse_kind(*this, "a number");
  return number;
}

std::int64_t JsonValue::as_integer() const {
  const auto value = kind == Kind::integer ? to_number<std::int64_t>(text) : std::nullopt;
  if (!value) refuse_kind(*this, "a 64-bit integer");
  return *value;
}

const std::string& JsonValue::as_string() const {
  if (!is_string()) refuse_kind(*this, "a string");
  return text;
}

const JsonValue* JsonValue::find(std::string_view name) const noexcept {
  const auto found = std::find(key.begin(), key.end(), name);
  return found == key.end() ? nullptr : &items[static_cast<std::size_t>(found - key.begin())];
}

JsonValue* JsonValue::find(std::string_view name) noexcept {
  return const_cast<JsonValue*>(std::as_const(*this).find(name));
}

const JsonValue& JsonValue::at(std::string_view name) const {
  const JsonValue* const found = find(name);
  if (!found) throw Error(ErrorKind::config, str("JSON: ", excerpt(*this), " has no key \"", name, "\""));
  return *found;
}

JsonValue& JsonValue::set(std::string_view name, JsonValue value) {
  if (JsonValue* const found = find(name)) return *found = std::move(value);
  key.emplace_back(name);
  return items.emplace_back(std::move(value));
}

void JsonValue::add(std::initializer_list<JsonField> fields) {
  key.reserve(key.size() + fields.size());
  items.reserve(items.size() + fields.size());
  for (const JsonField& field : fields) {
    key.emplace_back(field.name);
    items.push_back(field.value);
  }
}

void JsonValue::erase(std::string_view name) {
  const auto found = std::find(key.begin(), key.end(), name);
  if (found == key.end()) return;
  items.erase(items.begin() + (found - key.begin()));
  key.erase(found);
}

bool operator==(const JsonValue& a, const JsonValue& b) {
  if (a.is_number() && b.is_number()) {
    const bool integers = a.kind == Kind::integer && b.kind == Kind::integer;
    return a.number == b.number && (!integers || a.text == b.text);
  }
  if (a.kind != b.kind || a.truth != b.truth || a.text != b.text || a.size() != b.size()) return false;
  if (!a.is_object()) return a.items == b.items;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const JsonValue* const other = b.find(a.key[i]);
    if (!other || *other != a[i]) return false;
  }
  return true;
}

std::ostream& operator<<(std::ostream& out, const JsonValue& value) { return out << json_line(value); }

std::string json_line(const JsonValue& value) { return written(value, {}); }

std::string json_document(const JsonValue& value) { return written(value, {.colon = ": ", .indent = 2}) + "\n"; }

std::string excerpt(const JsonValue& value) {
  constexpr std::size_t longest = 60;
  std::string text              = written(value, {.colon = ": ", .comma = ", ", .ascii = true});
  if (text.size() > longest) text.replace(longest, text.npos, "...");
  return text;
}

bool is_utf8(std::string_view text) noexcept {
  for (std::size_t i = 0; i < text.size();) {
    const Letter letter = letter_at(text, i);
    if (!letter.valid) return false;
    i += letter.length;
  }
  return true;
}

}  // namespace stepgraph
