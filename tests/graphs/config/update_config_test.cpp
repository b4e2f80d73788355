#include <catch2/catch_test_macros.hpp>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "graphs/config/config.hpp"

namespace sg = stepgraph;

namespace {

constexpr const char* smallest = R"({"model": {"kind": "gpt2"}, "data": {"synthetic": 1}, "batch": {}})";

std::string refusal(const std::vector<std::string>& overrides) {
  try {
    static_cast<void>(sg::parse_config(smallest, overrides));
    return {};
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::config);
    return error.what();
  }
}

}  // namespace

TEST_CASE("every key of update sets its field and is written back", "[graphs][config][update]") {
  for (const sg::UpdateWhen mode : {sg::UpdateWhen::stale, sg::UpdateWhen::asynchronous}) {
    const sg::Config config = sg::parse_config(smallest, {{sg::str("update.mode=", mode), "update.max_staleness=3"}});
    CHECK(config.plan.update == sg::UpdatePlan{.mode = mode, .max_staleness = 3});
    CHECK(sg::parse_config(sg::to_json(config)) == config);
  }
  CHECK(sg::parse_config(smallest, {{"update.mode=stale"}}).plan.update.max_staleness == 0);
}

TEST_CASE("settings of update that cannot be are refused", "[graphs][config][update][refuses]") {
  CHECK(refusal({"update.max_staleness=2"}) ==
        "update.max_staleness: 2 with update.mode synchronous (0, or mode stale or asynchronous)");
  CHECK(refusal({"update.mode=stale", "update.max_staleness=-1"}) ==
        "update.max_staleness: -1 is out of range (an integer from 0 to 64)");
  CHECK(refusal({"update.mode=async"}).find("\"asynchronous\"") != std::string::npos);
  CHECK(refusal({"update.staleness=1"}).find("max_staleness") != std::string::npos);
}
