#include "graphs/files/json_value.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <cmath>
#include <limits>
#include <random>

#include "engine/base/error.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;
using sg::JsonValue;

TEST_CASE("values are written on one line, in the order of their keys", "[graphs][json]") {
  JsonValue line = {{"type", "step"}, {"step", 3}, {"loss", 2.5}, {"layout", {{"dp", 2}, {"on", true}}}};
  line.set("peaks", std::vector<int>{1, 2});
  line.set("step", std::uint64_t{18446744073709551615u});
  line.add({{"none", nullptr}, {"maybe", std::optional<double>()}, {"some", std::optional<int>(7)}});
  line.erase("loss");
  CHECK(sg::json_line(line) == R"({"type":"step","step":18446744073709551615,"layout":{"dp":2,"on":true},)"
                               R"("peaks":[1,2],"none":null,"maybe":null,"some":7})");
  CHECK(sg::json_line(JsonValue::list({1, "a", JsonValue::object(), JsonValue::list()})) == R"([1,"a",{},[]])");
  CHECK(sg::json_document({{"a", JsonValue::list({1, 2})}, {"b", JsonValue::object()}}) ==
        "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": {}\n}\n");
}

TEST_CASE("reals are written with the fewest digits that read back the same, always with a point or an exponent",
          "[graphs][json]") {
  const std::pair<double, const char*> known[] = {
      {0.0, "0.0"},       {-0.0, "-0.0"},         {1, "1.0"},
      {-1.5, "-1.5"},     {0.02, "0.02"},         {1e-4, "0.0001"},
      {1e-5, "1e-05"},    {123456, "123456.0"},   {1e14, "100000000000000.0"},
      {1e15, "1e+15"},    {1.5e16, "1.5e+16"},    {0.1 + 0.2, "0.30000000000000004"},
      {5e-324, "5e-324"}, {1.25e100, "1.25e+100"}};
  for (const auto& [number, text] : known) CHECK(sg::json_line(number) == text);
  for (const double number : {std::nan(""), std::numeric_limits<double>::infinity()})
    CHECK(JsonValue(number).is_null());
  std::mt19937_64 random(3);
  for (int i = 0; i < sg::testing::cases(2000); ++i) {
    const double number = std::ldexp(static_cast<double>(random()), static_cast<int>(random() % 600) - 300);
    if (sg::parse_json(sg::json_line(number)).as_real() != number) FAIL(sg::json_line(number));
  }
}

TEST_CASE("strings are escaped, and bytes that are not UTF-8 are replaced", "[graphs][json]") {
  CHECK(sg::json_line("\"\\\b\f\n\r\t\x01 \x7f / \xc3\xa9") == "\"\\\"\\\\\\b\\f\\n\\r\\t\\u0001 \x7f / \xc3\xa9\"");
  CHECK(sg::excerpt("\xc3\xa9 \x7f \xf0\x9f\x98\x80 \xff") == R"("\u00e9 \u007f \ud83d\ude00 \ufffd")");
  const std::string replaced = "\xef\xbf\xbd";
  for (const std::string broken : {"\xff", "\x80", "\xc3", "\xc0\xaf", "\xe2\x82", "\xed\xa0\x80", "\xf5"}) {
    CAPTURE(sg::excerpt(broken));
    CHECK_FALSE(sg::is_utf8("a" + broken));
    const std::string text = sg::json_line("a" + broken + "b");
    CHECK(sg::is_utf8(text));
    CHECK(text.starts_with("\"a" + replaced));
    CHECK(text.ends_with("b\""));
  }
  CHECK(sg::json_line("\xe2\x82x") == "\"" + replaced + "x\"");  // one replacement for the longest invalid sequence
  CHECK(sg::is_utf8("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xef\xbf\xbe"));
}

TEST_CASE("a written value is read back unchanged", "[graphs][json]") {
  const JsonValue value = {{"text", "a\"b\\\n\xe2\x82\xac"},
                           {"list", JsonValue::list({1, -2, 2.5, true, nullptr})},
                           {"object", {{"nested", JsonValue::object()}}}};
  CHECK(sg::parse_json(sg::json_line(value)) == value);
  CHECK(sg::parse_json(sg::json_document(value)) == value);
  CHECK(sg::parse_json(R"({"b":1,"a":2.0})") == JsonValue{{"a", 2}, {"b", 1}});
  CHECK(sg::parse_json("9223372036854775807") != sg::parse_json("9223372036854775806"));
  CHECK(sg::json_line(sg::parse_json("[2.50,1E5,123456789012345678901234567890]")) ==
        "[2.50,1E5,123456789012345678901234567890]");
}

TEST_CASE("reading a value as another kind is refused", "[graphs][json][refuses]") {
  const JsonValue value = sg::parse_json(R"({"a": 1.5, "b": 99999999999999999999})");
  CHECK(value.at("a").as_real() == 1.5);
  CHECK_THROWS_MATCHES(value.at("c"), sg::Error,
                       Message("JSON: {\"a\": 1.5, \"b\": 99999999999999999999} has no key \"c\""));
  CHECK_THROWS_MATCHES(value.at("a").as_integer(), sg::Error, Message("JSON: 1.5 is not a 64-bit integer"));
  CHECK_THROWS_AS(value.at("b").as_integer(), sg::Error);
  CHECK_THROWS_AS(value.at("a").as_string(), sg::Error);
  CHECK_THROWS_AS(value.as_real(), sg::Error);
}

TEST_CASE("the fields of a large object are read one at a time", "[graphs][json]") {
  std::vector<std::string> seen;
  const auto read = [&](std::string_view text) {
    seen.clear();
    sg::parse_json_fields(text, "file", [&](const std::string& name, const JsonValue& value) {
      seen.push_back(name + "=" + sg::json_line(value));
    });
  };
  read(R"({"a":1,"b":{"c":[1,{"d":2}]},"e":[]})");
  CHECK(seen == std::vector<std::string>{"a=1", R"(b={"c":[1,{"d":2}]})", "e=[]"});
  CHECK_THROWS_MATCHES(read(R"({"a":1,"b":2,"a":3})"), sg::Error, Message("file: a: given twice (once)"));
  CHECK_THROWS_MATCHES(read(R"({"a":{"b":1,"b":2}})"), sg::Error, Message("file: a.b: given twice (once)"));
  CHECK_THROWS_AS(read(R"({"a":1)"), sg::Error);
  std::string many = "[0";
  while (many.size() < 2 * 65536) many += ",0";
  read("{\"a\":" + many + "]}");
  CHECK_THROWS_MATCHES(read("{\"a\":{\"b\":" + many + ",0]}}"), sg::Error,
                       Message("file: a.b: a list of more than 65536 items (at most 65536)"));
}
