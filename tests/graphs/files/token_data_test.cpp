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
  const sg::TokenData data(sg::TokenFiles{{folder.put("x.u16", u16({1, 258, 0, 65535, 7}))}}, 65536);
  CHECK(data.num_tokens() == 5);
  CHECK(tokens(data, 0, 5) == std::vector<std::int32_t>{1, 258, 0, 65535, 7});
  CHECK(tokens(data, 3, 2) == std::vector<std::int32_t>{65535, 7});
  CHECK(tokens(data, 5, 0).empty());
}

TEST_CASE("the golden file has tokens for 20 steps of 8 sequences of 32", "[graphs][token_data]") {
  const sg::TokenData data(sg::TokenFiles{{data_file("golden/gpt2-tiny/tokens.u16")}}, 256);
  CHECK(data.num_tokens() == 20 * 8 * 32 + 1);
  const auto all = tokens(data, 0, 5121);
  CHECK(std::ranges::all_of(all, [](std::int32_t token) { return token >= 0 && token < 256; }));
  CHECK(tokens(data, 256, 257) == std::vector(all.begin() + 256, all.begin() + 513));
}

TEST_CASE("32-bit tokens are read from files whose name ends in u32, or whose type says so", "[graphs][token_data]") {
  const TempFolder folder;
  const auto path = folder.put("x.u32", std::string("\x01\0\x01\0\xff\xff\xff\x7f", 8));
  const sg::TokenData data(sg::TokenFiles{{path}}, std::numeric_limits<std::int32_t>::max());
  CHECK(data.num_tokens() == 2);
  CHECK(tokens(data, 0, 1) == std::vector<std::int32_t>{65537});
  CHECK_THROWS_MATCHES(tokens(data, 0, 2), sg::Error,
                       Message(sg::str(path.string(),
                                       ": token 1 is 2147483647, but the vocabulary has 2147483647 "
                                       "tokens (0 to 2147483646)")));
  CHECK(tokens(sg::TokenData(sg::TokenFiles{{path}, sg::TokenType::u16}, 65536), 0, 4) ==
        std::vector<std::int32_t>{1, 1, 65535, 32767});
  const auto other = folder.put("x.bin", std::string("\x05\0\0\0\xff\xff\xff\xff", 8));
  const sg::TokenData wide(sg::TokenFiles{{other}, sg::TokenType::u32}, 100'000);
  CHECK(tokens(wide, 0, 1) == std::vector<std::int32_t>{5});
  CHECK_THROWS_AS(tokens(wide, 1, 1), sg::Error);  // 2^32 - 1
  const auto odd = folder.put("odd.u32", "123456");
  CHECK_THROWS_MATCHES(sg::TokenData(sg::TokenFiles{{odd}}, 10), sg::Error,
                       Message(sg::str(odd.string(), ": has 6 bytes (a multiple of 4: each token is 4 bytes)")));
}

TEST_CASE("several files are one stream in their order, and reads cross their boundaries", "[graphs][token_data]") {
  const TempFolder folder;
  const auto a = folder.put("a.u16", u16({0, 1, 2})), b = folder.put("b.u32", std::string("\x03\0\0\0", 4)),
             c = folder.put("c.u16", u16({4, 5, 6, 99}));
  const sg::TokenData data(sg::TokenFiles{{a, b, c, a}}, 10);
  CHECK(data.num_tokens() == 11);
  for (std::int64_t begin = 0; begin < 7; ++begin) {
    for (std::int64_t end = begin; end <= 7; ++end) {
      std::vector<std::int32_t> expected;
      for (std::int64_t i = begin; i < end; ++i) expected.push_back(static_cast<std::int32_t>(i));
      CHECK(tokens(data, begin, static_cast<std::size_t>(end - begin)) == expected);
    }
  }
  CHECK(tokens(data, 8, 3) == std::vector<std::int32_t>{0, 1, 2});
  CHECK(tokens(data, 11, 0).empty());
  CHECK_THROWS_MATCHES(tokens(data, 5, 4), sg::Error,
                       Message(sg::str(c.string(), ": token 3 is 99, but the vocabulary has 10 tokens (0 to 9)")));
  CHECK_THROWS_MATCHES(tokens(data, 9, 3), sg::Error,
                       Message(sg::str(a.string(),
                                       " and 3 more: 3 tokens were requested from token 9 on, but there "
                                       "are 11")));
  CHECK_THROWS_MATCHES(sg::TokenData(sg::TextFiles{}, 256), sg::Error,
                       Message("data: the list of files is empty (one file or more)"));
}

TEST_CASE("text is read as bytes", "[graphs][token_data]") {
  const TempFolder folder;
  const sg::TokenData data(sg::TextFiles{{folder.put("x.txt", std::string("aZ\n\xff\0b", 6))}}, 256);
  CHECK(data.num_tokens() == 6);
  CHECK(tokens(data, 0, 6) == std::vector<std::int32_t>{97, 90, 10, 255, 0, 98});
}

TEST_CASE("a long file is read and checked in pieces", "[graphs][token_data]") {
  const TempFolder folder;
  std::vector<int> list(200'000);
  for (std::size_t i = 0; i < list.size(); ++i) list[i] = static_cast<int>(i * 7 % 997);
  const auto path = folder.put("x.u16", u16(list));
  const sg::TokenData data(sg::TokenFiles{{path}}, 997);
  const auto all = tokens(data, 0, list.size());
  CHECK(std::equal(all.begin(), all.end(), list.begin()));
  CHECK(tokens(data, 65'000, 70'000) == std::vector(all.begin() + 65'000, all.begin() + 135'000));
  list[131'072] = 997;
  (void)folder.put("x.u16", u16(list));
  const auto says = sg::str(path.string(), ": token 131072 is 997, but the vocabulary has 997 tokens (0 to 996)");
  // The file has changed since it was opened. A file is not scanned: only the tokens that are read are checked.
  CHECK_THROWS_MATCHES(tokens(data, 131'000, 100), sg::Error, Message(says));
  const sg::TokenData again(sg::TokenFiles{{path}}, 997);
  CHECK_NOTHROW(tokens(again, 0, 131'072));
  CHECK_THROWS_MATCHES(tokens(again, 131'072, 1), sg::Error, Message(says));
}

TEST_CASE("invalid data files are refused with the reason", "[graphs][token_data][refuses]") {
  const TempFolder folder;
  const auto open = [](sg::DataSource source, std::int64_t vocab) { return sg::TokenData(std::move(source), vocab); };
  const auto says = [](const auto&... parts) { return Message(sg::str(parts...)); };
  const auto none = folder / "none";
  CHECK_THROWS_MATCHES(open(sg::TokenFiles{{none}}, 256), sg::Error, says(none.string(), ": there is no such file"));
  CHECK_THROWS_MATCHES(open(sg::TextFiles{{none}}, 256), sg::Error, says(none.string(), ": there is no such file"));
  CHECK_THROWS_MATCHES(open(sg::TokenFiles{{""}}, 256), sg::Error, says("file: the name is empty (a file name)"));
  CHECK_THROWS_MATCHES(open(sg::TokenFiles{{folder.path()}}, 256), sg::Error,
                       says(folder.path().string(), ": is a folder (a file is needed)"));
  CHECK_THROWS_MATCHES(open(sg::TextFiles{{"/dev/null"}}, 256), sg::Error, says("/dev/null: is not a regular file"));
  const auto empty = folder.put("empty", "");
  CHECK_THROWS_MATCHES(open(sg::TokenFiles{{empty}}, 256), sg::Error,
                       says(empty.string(), ": is empty (tokens of 2 bytes)"));
  CHECK_THROWS_MATCHES(open(sg::TextFiles{{empty}}, 256), sg::Error, says(empty.string(), ": is empty (text)"));
  const auto odd = folder.put("odd", "abc");
  CHECK_THROWS_MATCHES(open(sg::TokenFiles{{odd}}, 256), sg::Error,
                       says(odd.string(), ": has 3 bytes (an even number: each token is 2 bytes)"));
  CHECK_THROWS_MATCHES(
      open(sg::TextFiles{{odd}}, 255), sg::Error,
      says(odd.string(), ": bytes of text need a vocabulary of at least 256 tokens, but the model has 255"));
  const auto high = folder.put("high", u16({5, 9, 10, 11}));
  CHECK_THROWS_MATCHES(tokens(open(sg::TokenFiles{{high}}, 10), 0, 4), sg::Error,
                       says(high.string(), ": token 2 is 10, but the vocabulary has 10 tokens (0 to 9)"));
  CHECK_THROWS_MATCHES(open(sg::SyntheticTokens{1}, 0), sg::Error,
                       says("data: a vocabulary of 0 tokens (1 to 2147483647)"));
  CHECK_THROWS_AS(open(sg::SyntheticTokens{1}, std::int64_t{1} << 31), sg::Error);
}

TEST_CASE("reads beyond the end of the data are refused, with the number of its tokens",
          "[graphs][token_data][refuses]") {
  const TempFolder folder;
  const auto path = folder.put("x.txt", "0123456789");
  const sg::TokenData data(sg::TextFiles{{path}}, 256);
  const auto says = [&](const char* what) { return Message(path.string() + what); };
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
