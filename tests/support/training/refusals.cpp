#include "tests/support/training/refusals.hpp"

#include <catch2/catch_test_macros.hpp>

#include "engine/base/error.hpp"
#include "graphs/config/config.hpp"

namespace stepgraph::testing {

std::string refusal(std::string_view text, const std::vector<std::string>& overrides) {
  try {
    static_cast<void>(parse_config(text, overrides));
    return {};
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::config);
    return error.what();
  }
}

void check_refused(const std::vector<Refused>& cases) {
  for (const Refused& one : cases) {
    CAPTURE(one.overrides);
    CHECK(refusal(smallest_config, one.overrides) == one.why);
  }
}

}  // namespace stepgraph::testing
