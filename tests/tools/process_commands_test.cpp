// Commands over processes print and write what they do on loopback, to the bit.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "backends/init_world.hpp"
#include "backends/process/socket.hpp"
#include "tests/support/command_run.hpp"
#include "tests/support/job_run.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::testing::JobRun;
using sg::testing::json_lines;
using sg::testing::Outcome;
using sg::testing::run_bash;
using sg::testing::SmallRun;

namespace {

struct Setting {
  int size;
  std::string options;
};

bool is_here(const std::string& backend) {
  if (!sg::has_process_backend(backend)) return false;
  return backend != "mpi" || run_bash("command -v mpirun").exit_code == 0;
}

// `stepgraph COMMAND` once for each rank.
Outcome run_over(const std::string& backend, int size, const std::string& command) {
  const std::string program = sg::testing::command_path(), number = std::to_string(size);
  const std::string launcher =
      backend == "mpi" ? "env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n " +
                             number + " " + program + " "
                       : program + " launch -n " + number + " -- ";
  return run_bash("cd /tmp && STEPGRAPH_FLIGHT= timeout 50 " + launcher + command + " --set backend=" + backend);
}

// Loss and norm of each step.
std::vector<std::pair<std::string, std::string>> results(const std::string& out) {
  std::vector<std::pair<std::string, std::string>> all;
  for (const sg::JsonValue& line : json_lines(out)) {
    if (line.at("type") == sg::JsonValue("step")) all.emplace_back(line.at("loss").text, line.at("grad_norm").text);
  }
  return all;
}

}  // namespace

// Two tests, because each has a time-out.
static void check_training(const std::string& backend) {
  const auto [size, options] =
      GENERATE(Setting{2, "--set layout.dp=2"}, Setting{2, "--set layout.tp=2"}, Setting{2, "--set layout.pp=2"},
               Setting{2, "--set layout.pp=2 --set pipeline.schedule=zb-h1"},
               Setting{2, "--set layout.dp=2 --set shard.strategy=full"},
               Setting{4, "--set layout.dp=4 --set shard.strategy=full"},
               Setting{8, "--set layout.dp=2 --set layout.tp=2 --set layout.pp=2"});
  CAPTURE(backend, size, options);
  if (!is_here(backend)) SKIP("this machine has no " + backend);
  if (backend == "mpi" && sg::testing::is_sanitized()) SKIP("sanitizers do not know MPI");
  const SmallRun run;
  const std::string command = "train " + run.config() + " --steps 4 --json --dump-grads ";
  const Outcome loopback    = sg::testing::run_stepgraph(command + run.path("loopback.safetensors") + " " + options);
  const Outcome processes   = run_over(backend, size, command + run.path("processes.safetensors") + " " + options);
  CAPTURE(processes.err);
  REQUIRE(loopback.exit_code == 0);
  REQUIRE(processes.exit_code == 0);
  CHECK(results(loopback.out).size() == 4);
  CHECK(results(processes.out) == results(loopback.out));
  CHECK(run_bash("cmp " + run.path("loopback.safetensors") + " " + run.path("processes.safetensors")).exit_code == 0);
}

TEST_CASE("training over Gloo has the bits of loopback", "[tools][processes]") { check_training("gloo"); }
TEST_CASE("training over MPI has the bits of loopback", "[tools][processes]") { check_training("mpi"); }

TEST_CASE("eval, generate and saving work over processes", "[tools][processes]") {
  const std::string backend = GENERATE("gloo", "mpi");
  CAPTURE(backend);
  if (!is_here(backend)) SKIP("this machine has no " + backend);
  if (backend == "mpi" && sg::testing::is_sanitized()) SKIP("sanitizers do not know MPI");
  const SmallRun run;
  const std::string layout = " --set layout.dp=2 --set layout.pp=2";
  const std::string eval   = "eval " + run.config() + " --json" + layout;
  const auto loss_of       = [](const Outcome& outcome) {
    CAPTURE(outcome.err);
    CHECK(outcome.exit_code == 0);
    const std::vector<sg::JsonValue> lines = json_lines(outcome.out);
    return lines.empty() ? "" : lines.back().at("loss").text;
  };
  CHECK(loss_of(run_over(backend, 4, eval)) == loss_of(sg::testing::run_stepgraph(eval)));
  const std::string generate = "generate " + run.config() + " --set layout.pp=2 --prompt abc --tokens 5";
  CHECK(run_over(backend, 2, generate).out == sg::testing::run_stepgraph(generate).out);
  const std::string train = "train " + run.config() + layout + " --steps 2 --save ";
  REQUIRE(sg::testing::run_stepgraph(train + run.path("a")).exit_code == 0);
  CHECK(run_over(backend, 4, train + run.path("b")).exit_code == 0);
  CHECK(run_bash("diff -r " + run.path("a") + " " + run.path("b")).exit_code == 0);
}

TEST_CASE("a layout that does not fit the number of processes is refused", "[tools][processes]") {
  if (!is_here("gloo")) SKIP("this build has no Gloo");
  const SmallRun run;
  const Outcome refused = run_over("gloo", 2, "train " + run.config() + " --set layout.dp=4");
  CHECK(refused.exit_code == 2);  // as on loopback: all processes have the error
  CHECK_THAT(refused.err, ContainsSubstring("layout: has 4 ranks, but the job has 2 processes"));
}

TEST_CASE("configs that differ between processes are an error in all of them", "[tools][processes]") {
  if (!is_here("gloo")) SKIP("this build has no Gloo");
  const SmallRun run;
  const std::string train =
      sg::testing::command_path() + " train " + run.config() + " --set backend=gloo --set layout.dp=2";
  JobRun job(2, {"/bin/bash", "-c", "cd /tmp; STEPGRAPH_FLIGHT= exec " + train + " --set seed=$RANK"});
  const std::vector<int> codes = job.wait(40s);
  for (int rank = 0; rank < 2; ++rank) {
    CAPTURE(rank, job.err(rank));
    CHECK(codes[static_cast<std::size_t>(rank)] == 2);
  }
  // Printed once, by process 0.
  CHECK_THAT(job.err(0), ContainsSubstring("config") && ContainsSubstring("seed"));
  CHECK(job.err(1).empty());
}

TEST_CASE("processes without any variable get their place from the config", "[tools][processes]") {
  if (!is_here("gloo")) SKIP("this build has no Gloo");
  const SmallRun run;
  const int port            = sg::port_of(sg::listen_on({.address = "127.0.0.1"}).get());  // free a moment ago
  const std::string address = " --set world.address=127.0.0.1:" + std::to_string(port);
  const std::string layout  = " --steps 2 --json --set layout.dp=2";
  const auto script_of      = [&](int rank) {
    return "env -i " + sg::testing::command_path() + " train " + run.config() + layout +
           " --set backend=gloo --set world.size=2 --set world.rank=" + std::to_string(rank) + address;
  };
  JobRun second({"/bin/bash", "-c", "cd /tmp; exec " + script_of(1)});
  JobRun first({"/bin/bash", "-c", "cd /tmp; exec " + script_of(0)});
  CHECK(second.wait(40s) == std::vector{0});
  CHECK(first.wait(40s) == std::vector{0});
  CAPTURE(first.err(0), second.err(0));
  CHECK(results(first.out(0)).size() == 2);
  CHECK(results(first.out(0)) == results(sg::testing::run_stepgraph("train " + run.config() + layout).out));
  CHECK(second.out(0).empty());
}

TEST_CASE("a wrong place in the config is refused by its key", "[tools][processes]") {
  if (!is_here("gloo")) SKIP("this build has no Gloo");
  const SmallRun run;
  const auto refused = [&](const std::string& more) {
    const Outcome outcome = run_bash("env -i " + sg::testing::command_path() + " train " + run.config() +
                                     " --set layout.dp=2 --set backend=gloo " + more);
    CHECK(outcome.exit_code == 2);
    return outcome.err;
  };
  CHECK_THAT(refused(""), ContainsSubstring("RANK and WORLD_SIZE: are not set") && ContainsSubstring("world.rank"));
  CHECK_THAT(refused("--set world.rank=1 --set world.size=2"), ContainsSubstring("or give world.address)"));
  CHECK_THAT(refused("--set world.rank=1 --set world.size=2 --set world.address=a:b"),
             ContainsSubstring("world.address: is 'a:b'"));
  CHECK_THAT(refused("--set world.rank=1 --set world.size=2 --set world.address=127.0.0.1"),
             ContainsSubstring("MASTER_PORT: is not set") && ContainsSubstring("world.address=127.0.0.1:PORT"));
}
