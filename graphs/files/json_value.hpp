#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// JSON that is read and written: internal to this project.
namespace stepgraph {

struct JsonField;

// One JSON value. A number keeps the text that was read or will be written, so messages can show `2.0` or twenty digits
// unchanged. An object keeps the order of its keys.
//
//   JsonValue line = {{"type", "step"}, {"step", 3}, {"loss", 2.5}};
//   line.set("peaks", std::vector<int>{1, 2});
//   print_line(json_line(line));                        // {"type":"step","step":3,"loss":2.5,"peaks":[1,2]}
struct JsonValue {
  enum class Kind : std::uint8_t { null, boolean, integer, real, string, list, object };

  JsonValue() = default;  // null
  JsonValue(std::nullptr_t) {}
  JsonValue(const char* letters) : JsonValue(std::string_view(letters)) {}
  JsonValue(std::string_view letters);
  JsonValue(std::string letters);
  JsonValue(double real);  // shortest text that reads back as the same number; null if it is not finite
  JsonValue(std::initializer_list<JsonField> fields);  // an object
  template <std::same_as<bool> Bool>
  JsonValue(Bool value) : kind(Kind::boolean), truth(value) {}
  template <std::integral Integer>
  requires(!std::same_as<Integer, bool>) JsonValue(Integer value) {
    if constexpr (std::signed_integral<Integer>) {
      set_integer(std::int64_t{value});
    } else {
      set_integer(std::uint64_t{value});
    }
  }
  template <class Item>
  JsonValue(const std::vector<Item>& list) : kind(Kind::list), items(list.begin(), list.end()) {}
  template <class Item>
  JsonValue(const std::optional<Item>& value) : JsonValue(value ? JsonValue(*value) : JsonValue()) {}

  [[nodiscard]] static JsonValue object();  // without fields
  [[nodiscard]] static JsonValue list(std::initializer_list<JsonValue> items = {});

  [[nodiscard]] bool is_null() const noexcept { return kind == Kind::null; }
  [[nodiscard]] bool is_boolean() const noexcept { return kind == Kind::boolean; }
  [[nodiscard]] bool is_number() const noexcept { return kind == Kind::integer || kind == Kind::real; }
  [[nodiscard]] bool is_string() const noexcept { return kind == Kind::string; }
  [[nodiscard]] bool is_list() const noexcept { return kind == Kind::list; }
  [[nodiscard]] bool is_object() const noexcept { return kind == Kind::object; }

  // The value as that type. Throws Error(config) for a value of another kind.
  [[nodiscard]] double as_real() const;  // of any number
  [[nodiscard]] std::int64_t as_integer() const;
  [[nodiscard]] const std::string& as_string() const;

  // Of a list or an object.
  [[nodiscard]] std::size_t size() const noexcept { return items.size(); }
  [[nodiscard]] bool empty() const noexcept { return items.empty(); }
  [[nodiscard]] const JsonValue& operator[](std::size_t i) const { return items[i]; }

  // Of an object.
  [[nodiscard]] const JsonValue* find(std::string_view name) const noexcept;  // null if the name is missing
  [[nodiscard]] JsonValue* find(std::string_view name) noexcept;
  [[nodiscard]] bool contains(std::string_view name) const noexcept { return find(name) != nullptr; }
  [[nodiscard]] const JsonValue& at(std::string_view name) const;  // throws Error(config) if the name is missing
  JsonValue& set(std::string_view name, JsonValue value);          // replaces a field, or appends one
  void add(std::initializer_list<JsonField> fields);               // appends; the names must be new
  void erase(std::string_view name);

  // Numbers are equal by value: 1 == 1.0. The order of an object's keys does not matter.
  friend bool operator==(const JsonValue& a, const JsonValue& b);
  friend std::ostream& operator<<(std::ostream& out, const JsonValue& value);  // json_line(value)

  Kind kind                    = Kind::null;
  bool truth                   = false;  // boolean
  double number                = 0;      // integer and real; -0.0 for an integer written as -0
  std::string text             = {};     // the letters of a string, or the text of a number
  std::vector<std::string> key = {};     // of an object's items
  std::vector<JsonValue> items = {};     // of a list or an object

 private:
  void set_integer(std::int64_t value);
  void set_integer(std::uint64_t value);
};

struct JsonField {
  std::string_view name;
  JsonValue value;
};

// Reads a text. Throws Error(config): "line 3, column 7: what is wrong" for text that is not JSON (comments are not
// allowed), "layout.tp: given twice (once)" for a repeated key, and for more than 64 levels of nesting. With a
// `subject` the message begins with it.
[[nodiscard]] JsonValue parse_json(std::string_view text, std::string_view subject = {});

// Reads a text that is one object and passes its fields to `use` one at a time, so that a large object is never in
// memory as a whole. A list has at most 65536 items. `use` may be called before a later error is found.
void parse_json_fields(std::string_view text, std::string_view subject,
                       const std::function<void(const std::string& name, const JsonValue& value)>& use);

// One line without blanks. Bytes that are not UTF-8 become U+FFFD.
[[nodiscard]] std::string json_line(const JsonValue& value);
// A field or item to a line, indented by two blanks, and a newline at the end.
[[nodiscard]] std::string json_document(const JsonValue& value);
// The value in a message: ASCII, cut after 60 letters.
[[nodiscard]] std::string excerpt(const JsonValue& value);

[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

}  // namespace stepgraph
