#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace stepgraph {

// A number of bytes as people write it: "4096", "24GiB", "1.5 MiB", "500MB". B, KiB, MiB, GiB, TiB and PiB are powers
// of 1024; kB (or KB), MB, GB, TB and PB are powers of 1000. The result is a number of bytes below 2^63, rounded down:
// "21.6GiB" is 23192823398, of the first 18 digits after the point. Throws Error(config), without a subject, for any
// other text: units such as "G" are not guessed, and there is no half of a byte.
[[nodiscard]] std::uint64_t parse_size(std::string_view text);

// A limit as people would write it: rounded down to a tenth of its unit, so that the text as a size is not above the
// limit. "23.5 GiB" of 25234698240.
[[nodiscard]] std::string limit_text(std::int64_t bytes);
[[nodiscard]] std::string limit_and_text(std::int64_t bytes);  // "20000 (19.5 KiB)"

}  // namespace stepgraph
