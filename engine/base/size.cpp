#include "engine/base/size.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

[[noreturn]] void refuse(std::string_view text, std::string_view why) {
  constexpr std::size_t most_shown = 40;
  throw Error(ErrorKind::config, str("'", text.substr(0, most_shown), text.size() > most_shown ? "..." : "", "' ", why,
                                     " (bytes, or a number with B, KiB, MiB, GiB, TiB, PiB, kB, MB, GB, TB or PB: "
                                     "24GiB)"));
}

std::optional<std::uint64_t> unit_bytes(std::string_view unit) {
  if (unit.empty() || unit == "B") return 1;
  constexpr std::string_view prefixes = "kMGTP";
  const std::size_t power             = unit.front() == 'K' ? 0 : prefixes.find(unit.front());
  if (power == prefixes.npos) return std::nullopt;
  const std::string_view rest = unit.substr(1);
  if (rest == "iB" && unit.front() != 'k') return std::uint64_t{1} << (10 * (power + 1));
  if (rest != "B") return std::nullopt;
  constexpr std::array<std::uint64_t, 5> thousands{1'000, 1'000'000, 1'000'000'000, 1'000'000'000'000,
                                                   1'000'000'000'000'000};
  return thousands[power];
}

}  // namespace

std::uint64_t parse_size(std::string_view text) {
  const std::size_t number_end = std::min(text.find_first_not_of("0123456789."), text.size());
  std::string_view unit        = text.substr(number_end);
  if (unit.starts_with(' ')) unit.remove_prefix(1);
  const auto bytes = unit_bytes(unit);
  const auto parts = split_text(text.substr(0, number_end), '.');
  if (!bytes || parts.size() > 2 || parts.front().empty() || parts.back().empty() ||
      (unit.empty() && number_end != text.size()))
    refuse(text, "is not a size");
  const auto whole = to_number<std::uint64_t>(parts.front());
  if (!whole || *whole > most / *bytes) refuse(text, "is 2^63 bytes or more");
  std::uint64_t size = *whole * *bytes;
  if (parts.size() == 1) return size;
  // In whole numbers: 0.1 has no exact double. Digits beyond 18 are less than a byte of any unit.
  constexpr std::size_t most_digits = 18;
  const std::string_view digits     = parts.back().substr(0, parts.back().find_last_not_of('0') + 1);
  if (digits.empty()) return size;
  if (*bytes == 1) refuse(text, "is not a whole number of bytes");
  const std::string_view fraction = digits.substr(0, most_digits);
  std::uint64_t scale             = 1;
  for (std::size_t i = 0; i < fraction.size(); ++i) scale *= 10;
  __extension__ using Wide = unsigned __int128;
  size += static_cast<std::uint64_t>(Wide{*to_number<std::uint64_t>(fraction)} * *bytes / scale);
  if (size > most) refuse(text, "is 2^63 bytes or more");
  return size;
}

std::string limit_text(std::int64_t bytes) {
  constexpr std::array<std::string_view, 6> units{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  while (unit + 1 < units.size() && bytes >= std::int64_t{1024} << (10 * unit)) ++unit;
  if (unit == 0) return str(bytes, " B");
  const std::int64_t one = std::int64_t{1} << (10 * unit), whole = bytes / one;
  const std::int64_t tenths = bytes % one * 10 / one;
  return whole < 10 || tenths > 0 ? str(whole, ".", tenths, " ", units[unit]) : str(whole, " ", units[unit]);
}

std::string limit_and_text(std::int64_t bytes) { return str(bytes, " (", limit_text(bytes), ")"); }

}  // namespace stepgraph
