#include "engine/base/text.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iterator>

namespace stepgraph {
namespace {

std::string scaled(double value, double base, const char* const* units, std::size_t num_units) {
  std::size_t unit = 0;
  while (unit + 1 < num_units && value >= base) value /= base, ++unit;
  char text[48];
  std::snprintf(text, sizeof text, unit > 0 && value < 9.95 ? "%.1f %s" : "%.0f %s", value, units[unit]);
  return text;
}

}  // namespace

std::size_t letter_length(std::string_view text, std::size_t i) {
  const auto byte          = [&](std::size_t k) { return static_cast<unsigned char>(text[k]); };
  const unsigned lead      = byte(i);
  const std::size_t length = lead < 0x80   ? 1
                             : lead < 0xC2 ? 0
                             : lead < 0xE0 ? 2
                             : lead < 0xF0 ? 3
                             : lead < 0xF5 ? 4
                                           : 0;
  if (length == 0 || i + length > text.size()) return 0;
  std::uint32_t code = length == 1 ? lead : lead & (0x7Fu >> length);
  for (std::size_t k = 1; k < length; ++k) {
    if ((byte(i + k) & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte(i + k) & 0x3Fu);
  }
  static constexpr std::uint32_t smallest[] = {0, 0x20, 0x80, 0x800, 0x10000};
  const bool allowed = code >= smallest[length] && code != 0x7F && (code < 0xD800 || code > 0xDFFF) && code != 0xFFFE &&
                       code != 0xFFFF && code <= 0x10FFFF;
  return allowed ? length : 0;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = letter_length(text, i);
    switch (text[i]) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\\':
        out += "&#92;";
        break;
      case '\n':
      case '\t':
      case '\r':
        out += ' ';
        break;
      default:
        out += length == 0 ? std::string_view("?") : text.substr(i, length);
    }
    i += std::max<std::size_t>(1, length);
  }
  return out;
}

std::string bytes_text(double bytes) {
  static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  return scaled(bytes, 1024, units, std::size(units));
}

std::string bytes_and_text(std::int64_t bytes) {
  return std::to_string(bytes) + " (" + bytes_text(static_cast<double>(bytes)) + ")";
}

std::string flops_text(double flops) {
  static constexpr const char* units[] = {"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"};
  return scaled(flops, 1000, units, std::size(units));
}

std::string seconds_text(double seconds) {
  static constexpr const char* units[] = {"ns", "us", "ms", "s"};
  double value                         = seconds * 1e9;
  std::size_t unit                     = 0;
  // Rounded before the unit is chosen, so that no text says "1000 us".
  while (unit + 1 < std::size(units) && std::abs(value) >= 999.5) value /= 1e3, ++unit;
  const double size = std::abs(value);
  char text[48];
  std::snprintf(text, sizeof text,
                unit == 0 || size >= 99.95 ? "%.0f %s"
                : size >= 9.995            ? "%.1f %s"
                                           : "%.2f %s",
                value, units[unit]);
  return text;
}

std::string table_text(const std::vector<std::vector<std::string>>& lines) {
  if (lines.empty()) return {};
  std::vector<std::size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string out;
  for (const auto& line : lines) {
    std::string text = line[0] + std::string(widths[0] - line[0].size(), ' ');
    for (std::size_t i = 1; i < line.size(); ++i) text += "  " + std::string(widths[i] - line[i].size(), ' ') + line[i];
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  }
  return out;
}

}  // namespace stepgraph
