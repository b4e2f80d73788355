#pragma once
#include <concepts>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "graphs/files/json_value.hpp"

// Reading sections of a config: internal to graphs/.
namespace stepgraph {

// The numbers that a key accepts, and their description for messages.
struct RealRange {
  double min             = 0;
  bool min_allowed       = true;
  double below           = std::numeric_limits<double>::infinity();
  std::string_view words = "0 or more";
};
inline constexpr RealRange not_negative{};
inline constexpr RealRange positive{.min_allowed = false, .words = "above 0"};
inline constexpr RealRange share{.below = 1, .words = "from 0 to less than 1"};

// A unit of a quantity, and the number that it stands for, as a fraction: "us" is 1 / 1e6, so that 5us is 5e-6 to the
// bit.
struct Unit {
  std::string_view name;
  double times = 1, per = 1;
};

// One object of a config. The constructor throws Error(config) for unknown keys. Each function reads one key into a
// field: it leaves the field unchanged if the key is missing, and throws Error(config) with the key's path if the value
// is wrong.
class ConfigReader {
 public:
  using Names = std::vector<std::string_view>;

  // A null `object` is an object without keys. `of` is the owner of the keys in messages: " of gpt2".
  ConfigReader(const JsonValue* object, std::string path, Names known, std::string of = {});

  [[nodiscard]] bool has(std::string_view key) const { return value(key) != nullptr; }
  [[nodiscard]] std::string path(std::string_view key) const;
  [[noreturn]] void refuse(std::string_view key, const std::string& why) const;
  [[nodiscard]] ConfigReader section(std::string_view key, Names known) const;
  // Throws Error(config) if the key is missing.
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
  // A list of integers, or a word that stands for no list.
  void integers(std::string_view key, std::vector<int>& field, const Names& words, int min, int max) const;
  // Bytes: an integer, or a string such as "24GiB".
  void size(std::string_view key, std::int64_t& field) const;
  void real(std::string_view key, double& field, const RealRange& range) const;
  // A number in the basic unit, or a string with a number and a unit: "300GB/s". The first unit is the example of
  // messages.
  void quantity(std::string_view key, double& field, const RealRange& range, std::span<const Unit> units) const;
  void boolean(std::string_view key, bool& field) const;
  void text(std::string_view key, std::string& field) const;                // not empty
  void texts(std::string_view key, std::vector<std::string>& field) const;  // one, or a list of them; none empty
  [[nodiscard]] bool is_empty_text(std::string_view key) const;             // ""
  [[nodiscard]] bool is_text(std::string_view key) const;                   // any
  [[nodiscard]] bool is_text(std::string_view key, std::string_view text) const;
  // The index of the given value in `names`, or `fallback` if the key is missing. Values in `later` are refused as not
  // supported yet.
  // Names in `others` are those of other libraries: the message says what they are called here.
  struct OtherName {
    std::string_view there, here;
  };
  [[nodiscard]] std::size_t choice(std::string_view key, std::size_t fallback, const Names& names,
                                   const Names& later = {}, std::span<const OtherName> others = {}) const;
  // A key that supports only one value in this version.
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

// An enumeration whose values are 0 to `last`, by the names that to_string gives them.
template <class Enum>
[[nodiscard]] Enum read_enum(const ConfigReader& section, std::string_view key, Enum otherwise, Enum last,
                             std::span<const ConfigReader::OtherName> others = {}) {
  ConfigReader::Names names;
  for (int i = 0; i <= static_cast<int>(last); ++i) names.push_back(to_string(static_cast<Enum>(i)));
  return static_cast<Enum>(section.choice(key, static_cast<std::size_t>(otherwise), names, {}, others));
}

[[nodiscard]] std::string list_names(const ConfigReader::Names& names);  // "dp, tp, pp"

// "did you mean tp? known: dp, tp, pp", without the question if no name is similar.
[[nodiscard]] std::string known_text(std::string_view given, const ConfigReader::Names& known);

}  // namespace stepgraph
