// launch --restarts, with processes that die.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>

#include "backends/init_world.hpp"
#include "engine/base/error.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/processes/job_run.hpp"
#include "tests/support/processes/killed_child.hpp"
#include "tools/stepgraph/processes/launch.hpp"

namespace sg  = stepgraph;
namespace cli = stepgraph::cli;
using Catch::Matchers::ContainsSubstring;
using sg::testing::file_bytes;

namespace {

const std::chrono::seconds a_wait = std::chrono::seconds(30) * sg::testing::slowness();

struct Launched {
  int code = -1;
  std::string err, starts;  // starts: "RANK/SIZE" of each process, in any order within a start
};

// Launches a shell script in a process of its own. Each process of it first adds its rank and the size to a file, whose
// path is $1 of the script; $2 is the number of starts before.
Launched launch_script(const std::string& script, cli::LaunchOptions options, const std::string& again = {}) {
  const sg::testing::TempFolder folder;
  const std::string starts = (folder / "starts").string(), err = (folder / "err").string();
  const std::string begin = "echo \"$RANK/$WORLD_SIZE\" >> $1; ";
  if (!again.empty()) options.restart_arguments = {"-c", begin + again, "sh", starts};
  const int child = sg::testing::start_child([&] {
    const int file = ::open(err.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
    ::dup2(file, 2);
    const int code = cli::launch("/bin/sh", {"-c", begin + script, "sh", starts}, options);
    sg::testing::write_file(folder / "code", sg::str(code));
  });
  const bool done = sg::testing::wait_for(child) == sg::testing::Ended::done;
  return {done ? std::stoi(file_bytes(folder / "code")) : -1, file_bytes(err), file_bytes(starts)};
}

long num_starts(const Launched& launched) { return std::count(launched.starts.begin(), launched.starts.end(), '\n'); }

}  // namespace

TEST_CASE("a job whose process was killed is started again", "[tools][launch][jobs]") {
  const auto again = launch_script("kill -9 $$", {.num_processes = 1, .restarts = 3}, "exit 0");
  CHECK(again.code == 0);
  CHECK(num_starts(again) == 2);
  CHECK_THAT(again.err, ContainsSubstring("rank 0 was ended by signal 9") &&
                            ContainsSubstring("starts again with 1 process (restart 1 of 3)"));
}

TEST_CASE("a job is started again at most as often as asked, and not at all by default", "[tools][launch][jobs]") {
  const auto twice = launch_script("kill -9 $$", {.num_processes = 1, .restarts = 2});
  CHECK(twice.code == 128 + 9);
  CHECK(num_starts(twice) == 3);
  CHECK_THAT(twice.err, ContainsSubstring("restart 2 of 2") && ContainsSubstring("gives up after 2 restarts"));
  const auto none = launch_script("kill -9 $$", {.num_processes = 1});
  CHECK(none.code == 128 + 9);
  CHECK(num_starts(none) == 1);
  CHECK_THAT(none.err, !ContainsSubstring("again") && !ContainsSubstring("gives up"));
}

TEST_CASE("exit code 3 starts a job again, and others do not", "[tools][launch][jobs]") {
  CHECK(num_starts(launch_script("exit 3", {.num_processes = 1, .restarts = 1})) == 2);
  for (const int code : {1, 2, 130, 143, 138}) {
    CAPTURE(code);
    const auto ended = launch_script(sg::str("exit ", code), {.num_processes = 1, .restarts = 1});
    CHECK(ended.code == code);
    CHECK(num_starts(ended) == 1);
  }
  // Code 3 beside the cause.
  const auto beside =
      launch_script("if [ $RANK = 0 ]; then exit 3; else exit 2; fi", {.num_processes = 2, .restarts = 1});
  CHECK(beside.code == 2);
  CHECK(num_starts(beside) == 2);
}

TEST_CASE("a job can be started again with fewer processes", "[tools][launch][jobs]") {
  const auto fewer = launch_script("if [ $RANK = 2 ]; then kill -9 $$; else exit 3; fi",
                                   {.num_processes = 3, .restarts = 2, .restart_processes = 2}, "exit 0");
  CHECK(fewer.code == 0);
  CHECK(num_starts(fewer) == 5);
  CHECK_THAT(fewer.starts, ContainsSubstring("2/3\n") && ContainsSubstring("0/2\n") && ContainsSubstring("1/2\n"));
  CHECK_THAT(fewer.err, ContainsSubstring("rank 2 was ended by signal 9") && ContainsSubstring("with 2 processes"));
}

TEST_CASE("a signal that the launcher was sent starts nothing again", "[tools][launch][jobs]") {
  // $PPID is the launcher. It passes the signal on, which ends the process.
  const auto told = launch_script("kill -USR2 $PPID; sleep 20", {.num_processes = 1, .restarts = 3});
  CHECK(told.code == 128 + SIGUSR2);
  CHECK(num_starts(told) == 1);
}

TEST_CASE("a run whose rank is killed goes on from its last checkpoint, with the same bits", "[tools][launch][jobs]") {
  if (!sg::has_process_backend("gloo")) SKIP("this build has no Gloo");
  const sg::testing::SmallRun small;
  const auto losses = [](const std::string& out) {
    std::map<std::int64_t, std::string> found;  // by step; those that were run twice have one value
    for (const auto& line : sg::testing::json_lines(out)) {
      if (line.at("type") != "step") continue;
      const std::string value = sg::str(line.at("loss"), " ", line.at("grad_norm"));
      const auto [at, is_new] = found.emplace(line.at("step").as_integer(), value);
      if (!is_new) CHECK(at->second == value);
    }
    return found;
  };
  const std::string run = small.config() + " --json --set 'data={\"synthetic\": 1}' --set layout.dp=2 --steps 60";
  const auto whole      = sg::testing::run_stepgraph("train " + run);
  CAPTURE(whole.err);
  REQUIRE(losses(whole.out).size() == 60);
  sg::testing::JobRun job({"/bin/bash", "-c",
                           "exec " + sg::testing::command_path() +
                               " launch -n 2 --restarts 3 --restart-ranks 1 --restart-set backend=loopback -- train " +
                               run +
                               " --set backend=gloo --flight '' --set checkpoint.every=1 --set checkpoint.folder=" +
                               small.path("checkpoints")});
  REQUIRE(job.wait_for_text(0, "\"type\":\"checkpoint\"", a_wait));
  const auto ranks = sg::testing::children_of(job.pid(0));
  REQUIRE(ranks.size() == 2);
  ::kill(ranks[1], SIGKILL);
  CHECK(job.wait(a_wait) == std::vector<int>{0});
  CHECK_THAT(job.err(0), ContainsSubstring("starts again with 1 process (restart 1 of 3)"));
  CHECK(job.out(0).find("{\"type\":\"resume\"") != std::string::npos);
  CHECK(losses(job.out(0)) == losses(whole.out));
}

TEST_CASE("a run without a folder for checkpoints cannot be started again", "[tools][launch][jobs][refuses]") {
  const sg::testing::SmallRun small;
  const auto run = sg::testing::run_stepgraph("launch -n 1 --restarts 1 -- train " + small.config() + " --steps 1");
  CHECK(run.exit_code == 2);
  CHECK_THAT(run.err, ContainsSubstring("checkpoint.folder: is not set, so a restart would begin at step 0"));
}

TEST_CASE("launch refuses restarts that make no sense", "[tools][launch][jobs][refuses]") {
  const auto refused = [](const std::string& arguments) {
    const auto outcome = sg::testing::run_stepgraph("launch -n 2 " + arguments + " -- train run.json");
    CHECK(outcome.exit_code == 2);
    return outcome.err;
  };
  CHECK_THAT(refused("--restart-ranks 1"), ContainsSubstring("--restart-ranks has no effect without --restarts"));
  CHECK_THAT(refused("--restart-set layout.dp=1"), ContainsSubstring("--restart-set has no effect without --restarts"));
  CHECK_THAT(refused("--restarts 1 --restart-set dp"), ContainsSubstring("--restart-set 'dp': has no value"));
}
