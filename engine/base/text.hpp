#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// Numbers and names as text for people, as drawings and tables show them.
namespace stepgraph {

// The length in bytes of the UTF-8 letter at `i` if XML allows it, else 0.
[[nodiscard]] std::size_t letter_length(std::string_view text, std::size_t i);
// Text for XML, for Graphviz's quoted strings and for its HTML-like labels, on one line. Letters that XML does not
// allow become '?'.
[[nodiscard]] std::string escaped(std::string_view text);

[[nodiscard]] std::string bytes_text(double bytes);            // "1.5 MiB"
[[nodiscard]] std::string bytes_and_text(std::int64_t bytes);  // "1536 (1.5 KiB)"
[[nodiscard]] std::string flops_text(double flops);            // "12 GFLOP"
[[nodiscard]] std::string seconds_text(double seconds);        // "1.25 ms"

// Lines of cells, as wide as the widest cell of their column: the first column to the left, the others to the right.
// All lines have as many cells as the first.
[[nodiscard]] std::string table_text(const std::vector<std::vector<std::string>>& lines);

}  // namespace stepgraph
