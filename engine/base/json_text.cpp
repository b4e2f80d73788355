#include "engine/base/json_text.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ostream>

#include "engine/base/text.hpp"

namespace stepgraph {

void JsonText::next() {
  if (text_.size() >= 1 << 16) {
    out_ << text_;
    text_.clear();
  }
  text_ += first_ ? "\n" : ",\n";
  first_ = true;
}

void JsonText::key(std::string_view name) {
  text_ += first_ ? "\"" : ",\"";
  text_ += name;
  text_ += "\":";
  first_ = false;
}

void JsonText::value(std::string_view text) {
  text_ += '"';
  for (std::size_t i = 0; i < text.size();) {
    const auto byte          = static_cast<unsigned char>(text[i]);
    const std::size_t length = letter_length(text, i);
    if (byte == '"' || byte == '\\') {
      text_ += '\\';
      text_ += text[i];
    } else if (length > 0) {
      text_ += text.substr(i, length);
    } else if (byte < 0x80) {  // a control character
      static constexpr char digits[] = "0123456789abcdef";
      text_ += "\\u00";
      text_ += digits[byte >> 4];
      text_ += digits[byte & 15];
    } else {  // not UTF-8
      text_ += "\\ufffd";
    }
    i += std::max<std::size_t>(1, length);
  }
  text_ += '"';
}

void JsonText::value(std::int64_t number) {
  char digits[24];
  text_.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

void JsonText::value(double number) {
  if (std::abs(number) < 0x1p53 && number == std::floor(number)) return value(static_cast<std::int64_t>(number));
  char digits[32];
  text_.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

void JsonText::microseconds(std::int64_t ns) {
  char digits[32];
  char* const end = std::to_chars(digits, digits + sizeof digits, ns / 1000).ptr;
  const auto rest = static_cast<int>(ns % 1000);
  end[0]          = '.';
  end[1]          = static_cast<char>('0' + rest / 100);
  end[2]          = static_cast<char>('0' + rest / 10 % 10);
  end[3]          = static_cast<char>('0' + rest % 10);
  text_.append(digits, end + 4);
}

void JsonText::raw(std::string_view json) {
  text_ += json;
  first_ = false;
}

void JsonText::flush() {
  out_ << text_;
  out_.flush();
  text_.clear();
}

}  // namespace stepgraph
