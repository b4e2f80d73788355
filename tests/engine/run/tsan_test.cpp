#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/run/threads/tsan.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/process.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("ThreadSanitizer reports a race between bodies that nothing orders", "[engine][tsan]") {
  if (!sg::tsan::enabled) SKIP("needs the tsan build");
  const auto outcome = sg::testing::run_command(sg::testing::planted_race_path());
  CHECK(outcome.exit_code == 66);
  CHECK_THAT(outcome.err,
             ContainsSubstring("WARNING: ThreadSanitizer: data race") && ContainsSubstring("planted_race_main.cc"));
}

TEST_CASE("ThreadSanitizer reports races in loops that are compiled without it", "[engine][tsan]") {
  if (!sg::tsan::enabled) SKIP("needs the tsan build");
  for (const auto& [mode, function] : {std::pair{"reduce", "stepgraph::reduce"}, std::pair{"product", "watch"}}) {
    CAPTURE(mode);
    const auto outcome = sg::testing::run_command(sg::testing::planted_race_path() + " " + mode);
    CHECK(outcome.exit_code == 66);
    CHECK_THAT(outcome.err,
               ContainsSubstring("WARNING: ThreadSanitizer: data race") && ContainsSubstring(function));
  }
}

TEST_CASE("ThreadSanitizer is silent when an edge orders the same bodies", "[engine][tsan]") {
  const auto outcome = sg::testing::run_command(sg::testing::planted_race_path() + " declared");
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.out == "done\n");
  CHECK(outcome.err.empty());
}
