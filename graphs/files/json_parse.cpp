// The one file that includes nlohmann-json: the header takes seconds to compile.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "engine/base/error.hpp"
#include "graphs/files/json_value.hpp"

namespace stepgraph {
namespace {

using Kind     = JsonValue::Kind;
using UseField = std::function<void(const std::string&, const JsonValue&)>;

constexpr std::size_t max_depth      = 64;
constexpr std::size_t max_list_items = 1 << 16;  // in a text that is read field by field

// Builds a JsonValue from the inside out. Open lists and objects are on a stack; each moves into its parent when it
// closes. With `use`, the fields of the outermost object go there instead.
class Builder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  Builder(std::string_view text, std::string_view subject, const UseField* use)
      : text_(text), subject_(subject), use_(use) {}

  JsonValue take() { return std::move(result_); }

  bool null() override { return add({}); }
  bool boolean(bool truth) override { return add(truth); }
  bool number_integer(number_integer_t number) override {  // written with a minus
    JsonValue value(number);
    if (number == 0) value.number = -0.0;
    return add(std::move(value));
  }
  bool number_unsigned(number_unsigned_t number) override { return add(number); }
  bool number_float(number_float_t number, const string_t& written) override {
    JsonValue value;
    value.kind   = written.find_first_of(".eE") == string_t::npos ? Kind::integer  // too large for 64 bits
                                                                  : Kind::real;
    value.number = number;
    value.text   = written;
    return add(std::move(value));
  }
  bool string(string_t& letters) override { return add(std::move(letters)); }
  bool binary(binary_t&) override { return false; }  // does not occur in text

  bool start_object(std::size_t) override { return open(Kind::object); }
  bool start_array(std::size_t) override { return open(Kind::list); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (use_ && open_.size() == 1) open_.back().key.clear();
    open_.back().key.push_back(name);
    if (!keys_.back().insert(name).second) refuse(path() + ": given twice (once)");
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    std::string_view what = error.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 2: what". Not all kinds of errors have the
    // position, so refuse_at() counts it.
    if (const auto end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
    if (what.starts_with("parse error at")) {
      if (const auto end = what.find(": "); end != what.npos) what.remove_prefix(end + 2);
    }
    refuse_at(position, std::string(what));
  }

 private:
  bool add(JsonValue value) {
    if (open_.empty()) {
      if (use_ && !value.is_object()) refuse("not an object ({...})");
      result_ = std::move(value);
    } else if (use_ && open_.size() == 1 && open_.back().is_object()) {
      (*use_)(open_.back().key.back(), value);
    } else {
      JsonValue& parent = open_.back();
      if (use_ && parent.is_list() && parent.size() == max_list_items)
        refuse(str(path(), ": a list of more than ", max_list_items, " items (at most ", max_list_items, ")"));
      parent.items.push_back(std::move(value));
    }
    return true;
  }
  bool open(Kind kind) {
    if (open_.size() == max_depth) refuse(str(path(), ": nested too deep (at most ", max_depth, " levels)"));
    open_.emplace_back().kind = kind;
    keys_.emplace_back();
    return true;
  }
  bool close() {
    JsonValue value = std::move(open_.back());
    open_.pop_back();
    keys_.pop_back();
    return add(std::move(value));
  }
  // "layout.tp": the last key of each open object.
  [[nodiscard]] std::string path() const {
    std::string out;
    for (const JsonValue& value : open_) {
      if (!value.key.empty()) out += (out.empty() ? "" : ".") + value.key.back();
    }
    return out.empty() ? "JSON" : out;
  }
  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(ErrorKind::config, str(subject_, subject_.empty() ? "" : ": ", why));
  }
  [[noreturn]] void refuse_at(std::size_t position, const std::string& what) const {
    const std::string_view before = text_.substr(0, std::min(std::max<std::size_t>(position, 1) - 1, text_.size()));
    const auto line               = 1 + std::count(before.begin(), before.end(), '\n');
    const std::size_t break_at    = before.rfind('\n');
    const std::size_t column      = before.size() - (break_at == before.npos ? 0 : break_at + 1) + 1;
    refuse(str("line ", line, ", column ", column, ": ", what));
  }

  std::string_view text_, subject_;
  const UseField* use_;
  std::vector<JsonValue> open_;
  std::vector<std::unordered_set<std::string>> keys_;  // of each open object, to find repeated keys quickly
  JsonValue result_;
};

JsonValue parse(std::string_view text, std::string_view subject, const UseField* use) {
  Builder builder(text, subject, use);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

}  // namespace

JsonValue parse_json(std::string_view text, std::string_view subject) { return parse(text, subject, nullptr); }

void parse_json_fields(std::string_view text, std::string_view subject, const UseField& use) {
  (void)parse(text, subject, &use);
}

}  // namespace stepgraph
