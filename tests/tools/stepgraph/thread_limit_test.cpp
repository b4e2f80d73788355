#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>

#include "engine/base/error.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/sanitizer.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

// Runs a command whose user may have so many threads in all. The limit does not hold for root, so root's place takes a
// user that has no other process.
sg::testing::Outcome run_limited(int threads, const std::string& arguments) {
  const int user          = 60'000 + static_cast<int>(getpid() % 5'000);
  const std::string limit = sg::str("prlimit --nproc=", threads, " "),
                    as = geteuid() == 0 ? sg::str("setpriv --reuid=", user, " --regid=", user, " --clear-groups ") : "";
  return sg::testing::run_command(limit + as + sg::testing::command_path() + " " + arguments);
}

}  // namespace

TEST_CASE("a process that may not start its threads says so and names the limit", "[tools][threads]") {
  const sg::testing::SmallRun small;
  for (const char* path : {"", "run.json", "text.txt"})
    std::filesystem::permissions(small.path(path),
                                 std::filesystem::perms::others_read | std::filesystem::perms::others_exec,
                                 std::filesystem::perm_options::add);
  const int most     = geteuid() == 0 ? 3 : 1;  // other users may have more processes already
  const auto refused = run_limited(most, "train " + small.config() + " --steps 1 --threads 8");
  if (refused.err.find("Permission denied") != std::string::npos) SKIP("other users may not run this build");
  if (refused.err.find("not found") != std::string::npos) SKIP("needs prlimit and setpriv");
  CAPTURE(refused.out);
  CHECK(refused.exit_code == 3);
  CHECK_THAT(refused.err, ContainsSubstring("cannot start ") && ContainsSubstring(" threads, only ") &&
                              ContainsSubstring(sg::str("RLIMIT_NPROC is ", most)));
  if (geteuid() != 0) return;
  // The main thread, 2 that run nodes, and 1 that helps with kernels. ThreadSanitizer has a thread of its own.
  const bool is_tsan = sg::testing::sanitizer() == sg::testing::Sanitizer::thread;
  const auto enough  = run_limited(is_tsan ? 5 : 4, "train " + small.config() + " --steps 1 --threads 2");
  CAPTURE(enough.err);
  CHECK(enough.exit_code == 0);
}
