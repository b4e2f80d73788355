#include "engine/base/size.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <string>
#include <utility>

#include "engine/base/error.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

TEST_CASE("a limit as text is not above the limit", "[engine][base]") {
  const std::pair<std::int64_t, const char*> cases[] = {{0, "0 B"},
                                                        {1023, "1023 B"},
                                                        {1024, "1.0 KiB"},
                                                        {20'000, "19.5 KiB"},
                                                        {65'536, "64 KiB"},
                                                        {25'234'698'240, "23.5 GiB"},
                                                        {(std::int64_t{1} << 30) - 1, "1023.9 MiB"},
                                                        {0x7fff'ffff'ffff'ffff, "8191.9 PiB"}};
  for (const auto& [bytes, text] : cases) {
    CHECK(sg::limit_text(bytes) == text);
    CHECK(static_cast<std::int64_t>(sg::parse_size(sg::limit_text(bytes))) <= bytes);
  }
  CHECK(sg::limit_and_text(20'000) == "20000 (19.5 KiB)");
}

TEST_CASE("a size is bytes, or a number with a unit", "[engine][base]") {
  const std::pair<const char*, std::uint64_t> cases[] = {{"0", 0},
                                                         {"4096", 4096},
                                                         {"7B", 7},
                                                         {"1KiB", 1024},
                                                         {"24GiB", std::uint64_t{24} << 30},
                                                         {"1.5 MiB", 3 << 19},
                                                         {"0.1GB", 100'000'000},
                                                         {"500MB", 500'000'000},
                                                         {"2kB", 2000},
                                                         {"2KB", 2000},
                                                         {"1.250TB", 1'250'000'000'000},
                                                         {"3PiB", std::uint64_t{3} << 50},
                                                         {"21.6GiB", 23'192'823'398},
                                                         {"0.3KiB", 307},
                                                         {"1.0005kB", 1000},
                                                         {"0.1234567890123456789PB", 123'456'789'012'345},
                                                         {"8191.999PB", 8'191'999'000'000'000'000},
                                                         {"9223372036854775807", 0x7fff'ffff'ffff'ffff}};
  for (const auto& [text, bytes] : cases) {
    CAPTURE(text);
    CHECK(sg::parse_size(text) == bytes);
  }
}

TEST_CASE("a text that is no whole number of bytes is refused", "[engine][base][refuses]") {
  for (const char* text : {"", "GiB", "24G", "24gib", "24 Gib", "24kiB", "-1", "+1", "1e9", "1.2.3MB", ".5GiB", "5.GiB",
                           "1 ", " 1", "1  GiB", "1GiB ", "0x10", "1,5GiB", "1GiB/s"}) {
    CAPTURE(text);
    CHECK_THROWS_MATCHES(sg::parse_size(text), sg::Error,
                         MessageMatches(ContainsSubstring("is not a size (bytes, or a number with")));
  }
  for (const char* text : {"0.5B", "0.5", "1.25 B"}) {
    CAPTURE(text);
    CHECK_THROWS_MATCHES(sg::parse_size(text), sg::Error,
                         MessageMatches(ContainsSubstring("is not a whole number of bytes")));
  }
  for (const char* text : {"9223372036854775808", "8192PiB", "9223.5PB", "99999999999999999999", "8192.5PiB"}) {
    CAPTURE(text);
    CHECK_THROWS_MATCHES(sg::parse_size(text), sg::Error, MessageMatches(ContainsSubstring("2^63 bytes or more")));
  }
  CHECK_THROWS_MATCHES(sg::parse_size(std::string(100, 'x')), sg::Error, MessageMatches(ContainsSubstring("xxx...'")));
}
