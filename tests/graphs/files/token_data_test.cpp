#include "graphs/files/token_data.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;
using stepgraph::testing::data_file;
using stepgraph::testing::TempFolder;

namespace {

std::vector<std::int32_t> tokens(const sg::TokenData& data, std::int64_t begin, std::size_t count) {
  std::vector<std::int32_t> out(count);
  data.read(begin, out);
  return out;
}

std::string u16(const std::vector<int>& list) {
  std::string bytes;
  for (const int token : list) bytes += {static_cast<char>(token & 255), static_cast<char>(token >> 8)};
  return bytes;
}

}  // namespace

TEST_CASE("tokens are read from a file of 16-bit numbers", "[graphs][token_data]") {
  const TempFolder folder;
  const sg::TokenData data(sg::TokenFile{folder.put("x.u16", u16({1, 258, 0, 65535, 7}))}, 65536);
  CHECK(data.num_tokens() == 5);
  CHECK(tokens(data, 0, 5) == std::vector<std::int32_t>{1, 258, 0, 65535, 7});
  CHECK(tokens(data, 3, 2) == std::vector<std::int32_t>{65535, 7});
  CHECK(tokens(data, 5, 0).empty());
  CHECK(data.num_steps(4) == 1);
  CHECK(data.num_steps(2) == 2);
  CHECK(data.num_steps(1) == 4);
}

TEST_CASE("the golden file has tokens for 20 steps of 8 sequences of 32", "[graphs][token_data]") {
  const sg::TokenData data(sg::TokenFile{data_file("golden/gpt2-tiny/tokens.u16")}, 256);
  CHECK(data.num_tokens() == 20 * 8 * 32 + 1);
  CHECK(data.num_steps(8 * 32) == 20);
  const auto all = tokens(data, 0, 5121);
  CHECK(std::ranges::all_of(all, [](std::int32_t token) { return token >= 0 && token < 256; }));
  CHECK(tokens(data, 256, 257) == std::vector(all.begin() + 256, all.begin() + 513));
}

TEST_CASE("text is read as bytes", "[graphs][token_data]") {
  const TempFolder folder;
  const sg::TokenData data(sg::TextFile{folder.put("x.txt", std::string("aZ\n\xff\0b", 6))}, 256);
  CHECK(data.num_tokens() == 6);
  CHECK(tokens(data, 0, 6) == std::vector<std::int32_t>{97, 90, 10, 255, 0, 98});
}

TEST_CASE("a long file is read and checked in pieces", "[graphs][token_data]") {
  const TempFolder folder;
  std::vector<int> list(200'000);
  for (std::size_t i = 0; i < list.size(); ++i) list[i] = static_cast<int>(i * 7 % 997);
  const auto path = folder.put("x.u16", u16(list));
  const sg::TokenData data(sg::TokenFile{path}, 997);
  const auto all = tokens(data, 0, list.size());
  CHECK(std::equal(all.begin(), all.end(), list.begin()));
  CHECK(tokens(data, 65'000, 70'000) == std::vector(all.begin() + 65'000, all.begin() + 135'000));
  list[131'072] = 997;
  (void)folder.put("x.u16", u16(list));
  const auto says = sg::str(path.string(), ": token 131072 is 997, but the vocabulary has 997 tokens (0 to 996)");
  CHECK_THROWS_MATCHES(sg::TokenData(sg::TokenFile{path}, 997), sg::Error, Message(says));
  // The file has changed since it was opened.
  CHECK_THROWS_MATCHES(tokens(data, 131'000, 100), sg::Error, Message(says));
}

TEST_CASE("invalid data files are refused with the reason", "[graphs][token_data][refuses]") {
  const TempFolder folder;
  const auto open = [](sg::DataSpec spec, std::int64_t vocab) { return sg::TokenData(std::move(spec), vocab); };
  const auto says = [](const auto&... parts) { return Message(sg::str(parts...)); };
  const auto none = folder / "none";
  CHECK_THROWS_MATCHES(open(sg::TokenFile{none}, 256), sg::Error, says(none.string(), ": there is no such file"));
  CHECK_THROWS_MATCHES(open(sg::TextFile{none}, 256), sg::Error, says(none.string(), ": there is no such file"));
  CHECK_THROWS_MATCHES(open(sg::TokenFile{""}, 256), sg::Error, says("file: the name is empty (a file name)"));
  CHECK_THROWS_MATCHES(open(sg::TokenFile{folder.path()}, 256), sg::Error,
                       says(folder.path().string(), ": is a folder (a file is needed)"));
  CHECK_THROWS_MATCHES(open(sg::TextFile{"/dev/null"}, 256), sg::Error, says("/dev/null: is not a regular file"));
  const auto empty = folder.put("empty", "");
  CHECK_THROWS_MATCHES(open(sg::TokenFile{empty}, 256), sg::Error,
                       says(empty.string(), ": is empty (tokens of 2 bytes)"));
  CHECK_THROWS_MATCHES(open(sg::TextFile{empty}, 256), sg::Error, says(empty.string(), ": is empty (text)"));
  const auto odd = folder.put("odd", "abc");
  CHECK_THROWS_MATCHES(open(sg::TokenFile{odd}, 256), sg::Error,
                       says(odd.string(), ": has 3 bytes (an even number: each token is 2 bytes)"));
  CHECK_THROWS_MATCHES(
      open(sg::TextFile{odd}, 255), sg::Error,
      says(odd.string(), ": bytes of text need a vocabulary of at least 256 tokens, but the model has 255"));
  const auto high = folder.put("high", u16({5, 9, 10, 11}));
  CHECK_THROWS_MATCHES(open(sg::TokenFile{high}, 10), sg::Error,
                       says(high.string(), ": token 2 is 10, but the vocabulary has 10 tokens (0 to 9)"));
  CHECK_THROWS_MATCHES(open(sg::SyntheticTokens{1}, 0), sg::Error,
                       says("data: a vocabulary of 0 tokens (1 to 2147483647)"));
  CHECK_THROWS_AS(open(sg::SyntheticTokens{1}, std::int64_t{1} << 31), sg::Error);
}

TEST_CASE("an error about too little data says how much there is", "[graphs][token_data][refuses]") {
  const TempFolder folder;
  const auto path = folder.put("x.txt", "0123456789");
  const sg::TokenData data(sg::TextFile{path}, 256);
  const auto says = [&](const char* what) { return Message(path.string() + what); };
  CHECK(data.num_steps(9) == 1);
  CHECK_THROWS_MATCHES(data.num_steps(10), sg::Error,
                       says(": has 10 tokens, but one step needs 10 and one more as the last target (a longer file, or "
                            "a smaller batch)"));
  CHECK_THROWS_MATCHES(data.num_steps(0), sg::Error, says(": 0 tokens per step (1 or more)"));
  CHECK_THROWS_MATCHES(tokens(data, 8, 3), sg::Error,
                       says(": 3 tokens were requested from token 8 on, but there are 10"));
  CHECK_THROWS_MATCHES(tokens(data, 11, 0), sg::Error,
                       says(": 0 tokens were requested from token 11 on, but there are 10"));
  CHECK_THROWS_MATCHES(tokens(data, -1, 1), sg::Error,
                       says(": 1 tokens were requested from token -1 on, but there are 10"));
  std::filesystem::resize_file(path, 4);
  CHECK_THROWS_MATCHES(tokens(data, 2, 4), sg::Error,
                       says(": ends at byte 4, but 2 more are needed (it had 10 bytes when it was opened)"));
}

TEST_CASE("synthetic tokens depend only on the seed and the position", "[graphs][token_data]") {
  const sg::TokenData data(sg::SyntheticTokens{42}, 1000);
  const auto all = tokens(data, 0, 1000);
  CHECK_FALSE(data.num_tokens().has_value());
  CHECK(data.num_steps(1 << 20) > 1'000'000'000);
  for (const std::int64_t begin : {1, 63, 64, 65, 127, 500}) {
    CAPTURE(begin);
    CHECK(tokens(data, begin, 200) == std::vector(all.begin() + begin, all.begin() + begin + 200));
  }
  CHECK(tokens(sg::TokenData(sg::SyntheticTokens{42}, 1000), 0, 1000) == all);
  CHECK(tokens(sg::TokenData(sg::SyntheticTokens{43}, 1000), 0, 1000) != all);
  // At the largest possible position.
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  CHECK(tokens(data, most - 100, 100).back() == tokens(data, most - 1, 1)[0]);
  CHECK_THROWS_AS(tokens(data, most - 1, 2), sg::Error);
}

TEST_CASE("seven of eight synthetic tokens follow a rule, and all tokens of the vocabulary occur",
          "[graphs][token_data]") {
  const std::uint64_t seed = GENERATE(7u, 8u, 9u, 10u);
  for (const int vocab : {2, 3, 64, 255, 4096}) {
    CAPTURE(vocab, seed);
    const sg::TokenData data(sg::SyntheticTokens{seed}, vocab);
    constexpr std::int64_t blocks = 2000;
    const auto all                = tokens(data, 0, 64 * blocks);
    REQUIRE(std::ranges::all_of(all, [&](std::int32_t token) { return token >= 0 && token < vocab; }));
    // The rule is the most frequent successor of each token. Counts how often it holds.
    std::map<std::int32_t, std::map<std::int32_t, int>> after;
    for (std::size_t i = 1; i < all.size(); ++i)
      if (i % 64 != 0) ++after[all[i - 1]][all[i]];
    double followed = 0;
    std::set<std::int32_t> images;
    for (const auto& [token, next] : after) {
      const auto best = std::ranges::max_element(next, {}, [](const auto& pair) { return pair.second; });
      followed += best->second;
      images.insert(best->first);
    }
    // One token in eight is random. It equals the rule with probability 1 / vocab.
    const double expected = 1 - (1 - 1.0 / vocab) / 8;
    CHECK(std::abs(followed / (63 * blocks) - expected) < 0.01);
    CHECK(static_cast<int>(after.size()) == vocab);
    CHECK(static_cast<int>(images.size()) == vocab);  // no two tokens have the same successor
  }
  CHECK(tokens(sg::TokenData(sg::SyntheticTokens{7}, 1), 0, 3) == std::vector<std::int32_t>{0, 0, 0});
}
