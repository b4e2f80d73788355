#include "graphs/train/checkpoint/checkpoint_folder.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

TEST_CASE("a checkpoint stays in place if the one that should replace it is gone", "[graphs][train][checkpoint]") {
  const sg::testing::TempFolder temp;
  const fs::path path = temp / "step-000000014";
  fs::create_directory(path);
  temp.put("step-000000014/manifest.json", "old");
  const std::string gone = path.string() + ".partial-0123456789abcdef";
  CHECK_THROWS_MATCHES(sg::put_in_place(gone, path.string()), sg::Error,
                       MessageMatches(ContainsSubstring(gone + ": cannot be renamed to " + path.string())));
  CHECK(sg::testing::file_bytes(path / "manifest.json") == "old");
  CHECK(std::distance(fs::directory_iterator(temp.path()), fs::directory_iterator()) == 1);
}
