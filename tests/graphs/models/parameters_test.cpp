#include "graphs/models/parameters.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>

#include "engine/base/error.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;

TEST_CASE("an inventory adds up its parameters", "[graphs][parameters]") {
  sg::ParameterInventory inventory({{.name = "wte", .shape = {10, 4}, .type = sg::DType::bf16},
                                    {.name = "bias", .shape = {4}},
                                    {.name = "scale", .shape = {}, .type = sg::DType::f64}});
  CHECK(inventory.size() == 3);
  CHECK(inventory.num_elements() == 45);
  CHECK(inventory.num_bytes() == 80 + 16 + 8);
  CHECK(inventory.mean_elements() == 15);
  CHECK(inventory.median_elements() == 4);
  CHECK(inventory.smallest().name == "scale");
  CHECK(inventory.largest().name == "wte");
  inventory.add({.name = "tied", .shape = {5, 8}});
  CHECK(inventory.median_elements() == 22);
  CHECK(inventory.largest().name == "wte");  // the first of several equally large ones
  CHECK(inventory.find("tied").num_bytes() == 160);
  CHECK(inventory.contains("bias"));
  CHECK_FALSE(inventory.contains("gain"));
  CHECK(inventory.names() == std::vector<std::string>{"wte", "bias", "scale", "tied"});
}

TEST_CASE("an inventory prints as a table", "[graphs][parameters]") {
  const sg::ParameterInventory inventory(
      {{.name = "h.0.weight", .shape = {10, 4}, .type = sg::DType::bf16}, {.name = "bias", .shape = {3}}});
  CHECK(sg::to_string(inventory) ==
        "name        shape  type  elements  bytes\n"
        "h.0.weight  10x4   bf16        40     80\n"
        "bias        3      f32          3     12\n"
        "total                          43     92\n"
        "2 parameters, elements each: mean 21.5, median 21.5, smallest 3 (bias), largest 40 (h.0.weight)\n");
}

TEST_CASE("invalid parameters are refused by name", "[graphs][parameters][refuses]") {
  const auto says = [](const char* what) { return Message(what); };
  const auto make = [](std::vector<sg::Parameter> list) { return sg::ParameterInventory(std::move(list)); };
  CHECK_THROWS_MATCHES(make({{.name = "w", .shape = {2}}, {.name = "w", .shape = {3}}}), sg::Error,
                       says("parameters: 'w' is given twice (unique names)"));
  CHECK_THROWS_MATCHES(make({{.name = "", .shape = {2}}}), sg::Error, says("parameters: parameter 0 has no name"));
  CHECK_THROWS_MATCHES(make({{.name = "w", .shape = {2, -3}}}), sg::Error,
                       says("parameters: 'w': shape 2x-3 has a dim of -3 (0 or more)"));
  CHECK_THROWS_MATCHES(make({{.name = "w", .shape = {2, 0}}}), sg::Error,
                       says("parameters: 'w' of shape 2x0 has no elements (dims of at least 1)"));
  CHECK_THROWS_MATCHES(make({}).mean_elements(), sg::Error, says("parameters: an empty inventory has no mean"));
  CHECK_THROWS_MATCHES(make({}).largest(), sg::Error, says("parameters: an empty inventory has no largest"));
  CHECK_THROWS_MATCHES(make({{.name = "w", .shape = {2}}}).find("v"), sg::Error,
                       says("parameters: there is no parameter 'v' among 1"));
  // A refused parameter leaves the inventory unchanged.
  sg::ParameterInventory inventory = make({{.name = "w", .shape = {2}}});
  CHECK_THROWS_AS(inventory.add({.name = "w", .shape = {3}}), sg::Error);
  CHECK(inventory == make({{.name = "w", .shape = {2}}}));
}
