#include "graphs/files/json_check.hpp"

#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>
#include <vector>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

using nlohmann::json;

// Keeps nothing but the names of the objects that are open.
class Checker : public nlohmann::json_sax<json> {
 public:
  explicit Checker(std::string_view subject) : subject_(subject) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (!names_.back().insert(name).second)
      throw Error(ErrorKind::config, str(subject_, ": '", name, "' is there twice in one object (a name once)"));
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception& error) override {
    std::string_view what = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    for (const std::string_view before : {"] ", "column ", ": "})
      if (const std::size_t at = what.find(before); at != what.npos) what.remove_prefix(at + before.size());
    throw Error(ErrorKind::config, str(subject_, ": not valid JSON at byte ", position, ": ", what));
  }

 private:
  bool open() {
    constexpr std::size_t most = 64;
    if (names_.size() == most)
      throw Error(ErrorKind::config, str(subject_, ": nested more than ", most, " deep (fewer brackets)"));
    names_.emplace_back();
    return true;
  }
  bool close() {
    names_.pop_back();
    return true;
  }

  std::string_view subject_;
  std::vector<std::unordered_set<std::string>> names_;
};

}  // namespace

void check_json(std::string_view text, std::string_view subject) {
  Checker checker(subject);
  (void)json::sax_parse(text, &checker);
}

}  // namespace stepgraph
