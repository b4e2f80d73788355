#include "engine/run/threads/thread_limit.hpp"

#include <sys/resource.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#include "engine/base/error.hpp"
#include "tests/support/sanitizer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

// The threads of this process, as the kernel lists them.
std::set<std::string> threads_now() {
  std::set<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) out.insert(entry.path().filename());
  return out;
}

}  // namespace

TEST_CASE("the threads that are started as a trial are gone when the check returns", "[engine][executor][threads]") {
  // Other libraries start threads of their own at any time, and these stay. A thread of the trial that the check did not
  // wait for is about to end: it is listed now, and no longer a moment later.
  std::set<std::string> left;
  for (int i = 0; i < sg::testing::cases(400); ++i) {
    const auto before = threads_now();
    sg::check_threads(64);
    std::set<std::string> started;
    for (const std::string& thread : threads_now()) {
      if (before.count(thread) == 0) started.insert(thread);
    }
    if (started.empty()) continue;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto later = threads_now();
    for (const std::string& thread : started) {
      if (later.count(thread) == 0) left.insert(thread);
    }
  }
  CHECK(left.empty());
}

TEST_CASE("threads without memory for their stacks are refused with the limit of memory",
          "[engine][executor][threads][refuses]") {
  if (sg::testing::is_sanitized()) SKIP("sanitizers reserve more memory than any limit");
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit limit{};
  REQUIRE(getrlimit(RLIMIT_AS, &limit) == 0);
  rlimit lower   = limit;
  lower.rlim_cur = static_cast<rlim_t>(pages * 4096 + (64 << 20));
  REQUIRE(setrlimit(RLIMIT_AS, &lower) == 0);
  std::string message;
  try {
    sg::check_threads(1000);  // more stacks than fit, of any usual size
  } catch (const sg::Error& error) {
    message = error.what();
  }
  REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
  CHECK_THAT(message, ContainsSubstring("cannot start 1000 threads, only ") &&
                          ContainsSubstring(sg::str("RLIMIT_AS is ", lower.rlim_cur, " bytes")) &&
                          ContainsSubstring("vm.max_map_count is "));
}

TEST_CASE("the lowest limit of a control group and its ancestors holds", "[engine][executor][threads]") {
  const sg::testing::TempFolder folder;
  std::filesystem::create_directories(folder / "outer/inner");
  const auto lowest = [&] { return sg::lowest_pids_max(folder.path(), "/outer/inner"); };
  CHECK(lowest() == "");
  folder.put("outer/inner/pids.max", "max\n");
  CHECK(lowest() == "");
  folder.put("outer/pids.max", "90\n");
  CHECK(lowest() == "90");
  folder.put("outer/inner/pids.max", "512\n");
  CHECK(lowest() == "90");
  folder.put("pids.max", "88\n");
  CHECK(lowest() == "88");
  CHECK(sg::lowest_pids_max(folder.path(), "/elsewhere") == "88");  // a path outside of this container
  CHECK(sg::lowest_pids_max(folder.path(), "/") == "88");
}
