#pragma once
#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>

namespace stepgraph {

// Writes JSON text to a stream. The caller gives brackets, keys and values in order; this class adds commas and
// escapes. Buffers a few pages of text.
class JsonText {
 public:
  explicit JsonText(std::ostream& out) : out_(out) {}
  JsonText(const JsonText&)            = delete;
  JsonText& operator=(const JsonText&) = delete;

  void open(char bracket) {
    text_ += bracket;
    first_ = true;
  }
  void close(char bracket) {
    text_ += bracket;
    first_ = false;
  }
  void next();                      // a new element of a list, on a line of its own
  void key(std::string_view name);  // not escaped
  void value(std::string_view text);
  void value(std::int64_t number);
  void value(double number);           // finite
  void microseconds(std::int64_t ns);  // with three decimals
  template <class T>
  void field(std::string_view name, const T& what) {
    key(name);
    value(what);
  }
  void raw(std::string_view json);  // a value that is JSON already
  void flush();                     // writes the buffered text

 private:
  std::ostream& out_;
  std::string text_;
  bool first_ = true;  // no element before it in its bracket
};

}  // namespace stepgraph
