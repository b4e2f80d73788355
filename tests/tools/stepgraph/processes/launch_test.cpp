#include <signal.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <thread>

#include "backends/init_world.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/processes/job_run.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::testing::children_of;
using sg::testing::command_path;
using sg::testing::JobRun;
using sg::testing::processes_with;
using sg::testing::run_stepgraph;
using sg::testing::SmallRun;

namespace {

const std::chrono::seconds a_wait = 30s * sg::testing::slowness();  // tests that pass do not wait for it

// A launch of training that goes on for a long time.
struct LongRun {
  LongRun()
      : job({command_path(), "launch", "-n", "2", "--", "train", run.config(), "--set", "data={\"synthetic\": 1}",
             "--steps", "1000000", "--json", "--set", "backend=gloo", "--set", "layout.dp=2", "--flight", ""}) {
    started = job.wait_for_text(0, "\"type\":\"step\"", a_wait);
  }
  SmallRun run;
  JobRun job;
  bool started = false;
};

}  // namespace

TEST_CASE("launch passes rank 0's output through, and marks the rest with its rank", "[tools][launch][jobs]") {
  const std::string command = "schedule --kind 1f1b --stages 2 --microbatches 3";
  const auto alone = run_stepgraph(command), launched = run_stepgraph("launch -n 3 -- " + command);
  CHECK(launched.exit_code == 0);
  CHECK(launched.out == alone.out);
  CHECK_THAT(launched.err, ContainsSubstring("[rank 1] makespan"));
  CHECK_THAT(launched.err, ContainsSubstring("[rank 2] makespan"));
  CHECK_THAT(launched.err, !ContainsSubstring("[rank 0]"));
}

TEST_CASE("launch ends with the exit code of the first failure", "[tools][launch][jobs]") {
  const auto failed = run_stepgraph("launch -n 2 -- train no-such-file.json");
  CHECK(failed.exit_code == 2);
  CHECK(failed.out == "");
  CHECK_THAT(failed.err, ContainsSubstring("[rank 0] stepgraph train: no-such-file.json"));
  CHECK_THAT(failed.err, ContainsSubstring("[rank 1] stepgraph train: no-such-file.json"));
  CHECK_THAT(failed.err, ContainsSubstring("failed with exit code 2"));
}

TEST_CASE("launch refuses wrong usage", "[tools][launch][jobs]") {
  const auto refused = [](const std::string& arguments) {
    const auto outcome = run_stepgraph("launch " + arguments);
    CHECK(outcome.exit_code == 2);
    return outcome.err;
  };
  CHECK_THAT(refused("-- train run.json"),
             ContainsSubstring("launch: -n is missing (the number of processes, as in launch -n 4 -- train run.json)"));
  CHECK_THAT(refused("-n 2"), ContainsSubstring("launch: the command is missing"));
  CHECK_THAT(refused("-n 2 train run.json --set seed=1"), ContainsSubstring("launch -n 2 -- train run.json --set"));
  refused("-n 0 -- train run.json");
  refused("-n 2 -- launch -n 2 -- train run.json");
  CHECK_THAT(refused("-n 2 -- bash"), ContainsSubstring("launch runs subcommands of stepgraph (known: train, eval") &&
                                          !ContainsSubstring("[rank"));
}

TEST_CASE("commands in one of several processes refuse a backend with all ranks in one", "[tools][launch][jobs]") {
  const SmallRun run;
  const auto launched = run_stepgraph("launch -n 2 -- train " + run.config() + " --steps 1");
  CHECK(launched.exit_code == 2);
  for (const char* rank : {"0", "1"})
    CHECK_THAT(launched.err, ContainsSubstring(std::string("backend: is loopback, but this is process ") + rank +
                                               " of 2 (gloo, mpi or nccl; or start one process)"));
  const auto with = [&](const std::string& variables, const std::string& command) {
    return sg::testing::run_bash("env " + variables + " " + command_path() + " " + command + " " + run.config())
        .exit_code;
  };
  CHECK(with("RANK=3 WORLD_SIZE=8", "eval --steps 1") == 2);
  CHECK(with("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", "generate --prompt a --tokens 1") == 2);
  CHECK(with("RANK=0 WORLD_SIZE=1", "train --steps 1") == 0);
  CHECK(with("WORLD_SIZE=8", "train --steps 1") == 0);
  CHECK(with("RANK=3 WORLD_SIZE=8", "verify") == 0);
}

TEST_CASE("launch hands arguments over as they are", "[tools][launch][jobs]") {
  const auto named = run_stepgraph("launch -n 1 -- train '[a,b] {c}'");
  CHECK_THAT(named.err, ContainsSubstring("[a,b] {c}: cannot be read"));
}

TEST_CASE("launch passes signals on, and leaves no process", "[tools][launch][jobs]") {
  if (!sg::has_process_backend("gloo")) SKIP("this build has no Gloo");
  LongRun run;
  REQUIRE(run.started);
  run.job.signal(0, SIGTERM);
  CHECK(run.job.wait(a_wait) == std::vector<int>{128 + SIGTERM});
  CHECK_THAT(run.job.err(0), ContainsSubstring("stepgraph launch: interrupted\n") && !ContainsSubstring("failed"));
  CHECK(processes_with(run.run.config()).empty());
}

TEST_CASE("launch ends all when one is killed", "[tools][launch][jobs]") {
  if (!sg::has_process_backend("gloo")) SKIP("this build has no Gloo");
  LongRun run;
  REQUIRE(run.started);
  const std::vector<pid_t> ranks = children_of(run.job.pid(0));
  REQUIRE(ranks.size() == 2);
  ::kill(ranks[1], SIGKILL);
  CHECK(run.job.wait(a_wait) == std::vector<int>{128 + SIGKILL});
  CHECK_THAT(run.job.err(0), ContainsSubstring("stepgraph launch: rank 1 was ended by signal 9"));
  CHECK(processes_with(run.run.config()).empty());
}

TEST_CASE("processes of a launch that is killed end", "[tools][launch][jobs]") {
  if (!sg::has_process_backend("gloo")) SKIP("this build has no Gloo");
  LongRun run;
  REQUIRE(run.started);
  run.job.signal(0, SIGKILL);
  CHECK(run.job.wait(a_wait) == std::vector<int>{128 + SIGKILL});
  CHECK(processes_with(run.run.config()).empty());
}

TEST_CASE("a launch that is stopped by its terminal stops its ranks, and goes on with them", "[tools][launch][jobs]") {
  if (!sg::has_process_backend("gloo")) SKIP("this build has no Gloo");
  if (sg::testing::slowness() > 1) SKIP("the time-out would have to be longer than half a minute");
  const SmallRun run;
  JobRun job({command_path(),
              "launch",
              "-n",
              "2",
              "--",
              "train",
              run.config(),
              "--set",
              "data={\"synthetic\": 1}",
              "--steps",
              "1000000",
              "--json",
              "--set",
              "backend=gloo",
              "--set",
              "layout.dp=2",
              "--set",
              "comm.timeout_ms=3000",
              "--flight",
              run.path("flight")});
  REQUIRE(job.wait_for_text(0, "\"type\":\"step\"", a_wait));
  const std::vector<pid_t> ranks = children_of(job.pid(0));
  REQUIRE(ranks.size() == 2);
  const auto is_stopped = [](pid_t pid) {
    return sg::testing::run_command("grep -q '^State:.*stopped' /proc/" + std::to_string(pid) + "/status").exit_code ==
           0;
  };
  job.signal(0, SIGTSTP);
  for (int i = 0; i < 1000 && !(is_stopped(job.pid(0)) && is_stopped(ranks[0]) && is_stopped(ranks[1])); ++i)
    std::this_thread::sleep_for(10ms);
  CHECK(is_stopped(job.pid(0)));
  CHECK(is_stopped(ranks[0]));
  CHECK(is_stopped(ranks[1]));
  std::this_thread::sleep_for(4000ms);  // longer than the time-out: no rank is blamed for it
  const std::size_t before = job.out(0).size();
  job.signal(0, SIGCONT);
  for (int i = 0; i < 1000 && job.out(0).size() < before + 4096; ++i) std::this_thread::sleep_for(10ms);
  CHECK(job.out(0).size() >= before + 4096);
  job.signal(0, SIGTERM);
  CHECK(job.wait(a_wait) == std::vector<int>{128 + SIGTERM});
  CHECK_THAT(job.err(0), !ContainsSubstring("silent"));
}
