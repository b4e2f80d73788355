#pragma once
#include <concepts>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "graphs/files/json_value.hpp"

// Reading sections of a config: internal to graphs/.
namespace stepgraph {

// Which numbers a key takes, with the words for it.
struct RealRange {
  double min             = 0;
  bool min_allowed       = true;
  double below           = std::numeric_limits<double>::infinity();
  std::string_view words = "0 or more";
};
inline constexpr RealRange not_negative{};
inline constexpr RealRange positive{.min_allowed = false, .words = "above 0"};
inline constexpr RealRange share{.below = 1, .words = "from 0 to less than 1"};

// One object of a config. Made, its keys are all known; each function leaves its field as it is where the key is
// missing and throws Error(config) that begins with the key's path where the value does not fit.
class ConfigReader {
 public:
  using Names = std::vector<std::string_view>;

  // `object` may be null: nothing is given then. `of` says whose keys they are, for messages: " of gpt2".
  ConfigReader(const JsonValue* object, std::string path, Names known, std::string of = {});

  [[nodiscard]] bool has(std::string_view key) const { return value(key) != nullptr; }
  [[nodiscard]] std::string path(std::string_view key) const;
  [[noreturn]] void refuse(std::string_view key, const std::string& why) const;
  [[nodiscard]] ConfigReader section(std::string_view key, Names known) const;
  // Throws unless it is there.
  const JsonValue* required(std::string_view key, std::string_view example) const;

  template <std::integral Integer>
  void integer(std::string_view key, Integer& field, std::type_identity_t<Integer> min,
               std::type_identity_t<Integer> max) const {
    if (!value(key)) return;
    if constexpr (std::is_unsigned_v<Integer>) {
      field = static_cast<Integer>(read_unsigned(key, min, max));
    } else {
      field = static_cast<Integer>(read_integer(key, min, max));
    }
  }
  void real(std::string_view key, double& field, const RealRange& range) const;
  void boolean(std::string_view key, bool& field) const;
  void text(std::string_view key, std::string& field) const;  // not empty
  // The place among `names` of the one that is given; `fallback` where none is. Those in `later` are names that this
  // version does not have yet.
  [[nodiscard]] std::size_t choice(std::string_view key, std::size_t fallback, const Names& names,
                                   const Names& later = {}) const;
  // A key that has one value in this version.
  void only(std::string_view key, std::string_view supported) const;
  void only_false(std::string_view key) const;
  [[noreturn]] void refuse_unsupported(std::string_view key, std::string_view given, std::string_view supported) const;

 private:
  [[nodiscard]] const JsonValue* value(std::string_view key) const;
  [[nodiscard]] std::int64_t read_integer(std::string_view key, std::int64_t min, std::int64_t max) const;
  [[nodiscard]] std::uint64_t read_unsigned(std::string_view key, std::uint64_t min, std::uint64_t max) const;
  const JsonValue& expect(std::string_view key, JsonValue::Kind kind, std::string_view what,
                          const std::string& right) const;

  const JsonValue* object_;
  std::string path_;
  Names known_;
};

[[nodiscard]] std::string list_names(const ConfigReader::Names& names);  // "dp, tp, pp"

// "did you mean tp? known: dp, tp, pp", without the question where nothing is close.
[[nodiscard]] std::string known_text(std::string_view given, const ConfigReader::Names& known);

}  // namespace stepgraph
