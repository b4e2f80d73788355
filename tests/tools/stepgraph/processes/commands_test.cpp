// Commands over processes print and write what they do on loopback, to the bit.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "backends/process/socket.hpp"
#include "engine/base/error.hpp"
#include "graphs/plan/offload_plan.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/processes/job_run.hpp"
#include "tests/support/processes/launched.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::str;
using sg::testing::JobRun;
using sg::testing::Outcome;
using sg::testing::require_backend;
using sg::testing::run_bash;
using sg::testing::run_over;
using sg::testing::SmallRun;
using sg::testing::without_times;

namespace {

struct Setting {
  int size;
  std::string options;
  bool always = false;  // in sanitized builds too
};

// Bytes of memory: of each rank, planned and used.
std::vector<double> memory_of(const std::string& out) {
  std::vector<double> bytes;
  for (const sg::JsonValue& line : sg::testing::json_lines(out)) {
    if (const auto* const peaks = line.find("peak_bytes"); peaks != nullptr && peaks->is_list())
      for (const sg::JsonValue& peak : peaks->items) bytes.push_back(peak.as_real());
    for (const char* name : {"planned_bytes", "used_bytes"})
      if (const auto* const found = line.find(name)) bytes.push_back(found->as_real());
  }
  return bytes;
}

// Loss and norm of each step.
std::vector<std::pair<std::string, std::string>> results(const std::string& out) {
  std::vector<std::pair<std::string, std::string>> all;
  for (const sg::JsonValue& line : sg::testing::json_lines(out)) {
    if (line.at("type") == "step") all.emplace_back(line.at("loss").text, line.at("grad_norm").text);
  }
  return all;
}

// The nodes of a trace.
struct Trace {
  struct Slice {
    double begin, end;
    std::string op;
  };
  // By rank that sends, rank that receives and message; for other nodes, by rank, -1 and name.
  std::multimap<std::tuple<std::int64_t, std::int64_t, std::string>, Slice> slices;
  std::set<std::int64_t> ranks;
};

Trace read_trace(const std::string& path) {
  Trace trace;
  const sg::JsonValue file = sg::parse_json(sg::testing::file_bytes(path));
  for (const sg::JsonValue& event : file.at("traceEvents").items) {
    if (event.at("ph") != "X") continue;
    const std::int64_t rank = event.at("pid").as_integer();
    const double begin      = event.at("ts").as_real();
    const auto* const op    = event.at("args").find("op");
    const Trace::Slice slice{begin, begin + event.at("dur").as_real(), op != nullptr ? op->as_string() : ""};
    trace.ranks.insert(rank);
    if (slice.op != "send" && slice.op != "recv") {
      trace.slices.emplace(std::tuple(rank, -1, event.at("name").as_string()), slice);
      continue;
    }
    const std::int64_t peer = event.at("args").at("peer").as_integer();
    trace.slices.emplace(std::tuple(slice.op == "send" ? rank : peer, slice.op == "send" ? peer : rank,
                                    event.at("args").at("message").as_string()),
                         slice);
  }
  return trace;
}

// The number of messages. Checks that each receive ends after its send has begun: the clocks of ranks agree.
int num_pairs(const Trace& trace) {
  int number = 0;
  for (const auto& [key, send] : trace.slices) {
    if (send.op != "send") continue;
    const auto [first, last] = trace.slices.equal_range(key);
    for (auto other = first; other != last; ++other) {
      if (other->second.op != "recv") continue;
      ++number;
      CAPTURE(std::get<2>(key));
      CHECK(send.begin <= other->second.end);
    }
  }
  return number;
}

}  // namespace

// One test for each backend, because each has a time-out.
static void check_training(const std::string& backend) {
  const auto [size, options, always] =
      GENERATE(Setting{2, "--set layout.tp=2"}, Setting{2, "--set layout.pp=2 --set pipeline.schedule=zb-h1", true},
               Setting{2, "--set layout.dp=2 --set precision.param=fp16 --set precision.loss_scale=1e12"},
               Setting{4, "--set layout.dp=2 --set layout.pp=2 --set precision.param=fp16"},
               Setting{2, "--set layout.dp=2 --set offload.optimizer=true --set offload.grads=true"},
               Setting{4, "--set layout.dp=4 --set shard.strategy=full", true});
  CAPTURE(backend, size, options);
  require_backend(backend);
  if (!always && sg::testing::is_sanitized()) SKIP("sanitized builds run two layouts");
  const SmallRun run;
  const auto command = [&, &options = options](const std::string& name) {
    return str("train ", run.config(), " --steps 4 --json ", options, " --dump-grads ", run.path(name + ".safetensors"),
               " --save ", run.path(name), " --trace ", run.path(name + ".json"));
  };
  const Outcome loopback  = sg::testing::run_stepgraph(command("loopback"));
  const Outcome processes = run_over(backend, size, command("processes"));
  CAPTURE(loopback.err, processes.err);
  REQUIRE(loopback.exit_code == 0);
  REQUIRE(processes.exit_code == 0);
  // All lines: the plan with the hash of the weights, steps with scale and whether they were skipped, the last step,
  // sharding, summary.
  CHECK(without_times(processes.out) == without_times(loopback.out));
  const std::vector<double> expected = memory_of(loopback.out), found = memory_of(processes.out);
  REQUIRE(found.size() == expected.size());
  REQUIRE(found.size() >= static_cast<std::size_t>(size) + 2);
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(std::abs(found[i] - expected[i]) <= 0.05 * expected[i]);
  CHECK(run_bash("cmp " + run.path("loopback.safetensors") + " " + run.path("processes.safetensors")).exit_code == 0);
  CHECK(run_bash("diff -r " + run.path("loopback") + " " + run.path("processes")).exit_code == 0);
  const Trace here = read_trace(run.path("loopback.json")), there = read_trace(run.path("processes.json"));
  CHECK(there.slices.size() == here.slices.size());
  CHECK(there.ranks == here.ranks);
  CHECK((num_pairs(here) > 0) == (options.find("layout.pp") != std::string::npos));
  CHECK(num_pairs(there) == num_pairs(here));
}

TEST_CASE("training over Gloo prints and writes what loopback does", "[tools][jobs]") { check_training("gloo"); }
TEST_CASE("training over MPI prints and writes what loopback does", "[tools][jobs]") { check_training("mpi"); }

TEST_CASE("eval and generate over processes print what loopback does", "[tools][jobs]") {
  const std::string backend = GENERATE("gloo", "mpi");
  CAPTURE(backend);
  require_backend(backend);
  const SmallRun run;
  const auto check = [&](int size, const std::string& command, bool json) {
    const Outcome here = sg::testing::run_stepgraph(command), there = run_over(backend, size, command);
    CAPTURE(command, here.err, there.err);
    REQUIRE(here.exit_code == 0);
    REQUIRE(there.exit_code == 0);
    CHECK(here.out != "");
    CHECK((json ? without_times(there.out) : there.out) == (json ? without_times(here.out) : here.out));
  };
  check(4, "eval " + run.config() + " --json --set layout.dp=2 --set layout.pp=2", true);
  check(2, "generate " + run.config() + " --set layout.pp=2 --prompt abc --tokens 5", false);
}

TEST_CASE("a layout that does not fit the number of processes is refused", "[tools][jobs]") {
  require_backend("gloo");
  const SmallRun run;
  const Outcome refused = run_over("gloo", 2, "train " + run.config() + " --set layout.dp=4");
  CHECK(refused.exit_code == 2);  // as on loopback: all processes have the error
  CHECK_THAT(refused.err, ContainsSubstring("layout: has 4 ranks, but the job has 2 processes"));
}

TEST_CASE("configs that differ between processes are an error in all of them", "[tools][jobs]") {
  require_backend("gloo");
  const SmallRun run;
  const std::string train =
      sg::testing::command_path() + " train " + run.config() + " --set backend=gloo --set layout.dp=2";
  JobRun job(2, {"/bin/bash", "-c", "cd /tmp; STEPGRAPH_FLIGHT= exec " + train + " --set seed=$RANK"});
  const std::vector<int> codes = job.wait(40s * sg::testing::slowness());
  for (int rank = 0; rank < 2; ++rank) {
    CAPTURE(rank, job.err(rank));
    CHECK(codes[static_cast<std::size_t>(rank)] == 2);
    CHECK_THAT(job.err(rank), ContainsSubstring("config") && ContainsSubstring("seed"));
  }
}

TEST_CASE("processes without any variable get their place from the config", "[tools][processes][jobs]") {
  require_backend("gloo");
  const SmallRun run;
  const int port            = sg::port_of(sg::listen_on({.address = "127.0.0.1"}).get());  // free a moment ago
  const std::string address = " --set world.address=127.0.0.1:" + std::to_string(port);
  const std::string layout  = " --steps 2 --json --set layout.dp=2";
  const auto script_of      = [&](int rank) {
    return "env -i ASAN_OPTIONS=detect_leaks=0 " + sg::testing::command_path() + " train " + run.config() + layout +
           " --set backend=gloo --set world.size=2 --set world.rank=" + std::to_string(rank) + address + " --flight " +
           run.path("flight");
  };
  JobRun second({"/bin/bash", "-c", "cd /tmp; exec " + script_of(1)});
  JobRun first({"/bin/bash", "-c", "cd /tmp; exec " + script_of(0)});
  CHECK(second.wait(40s * sg::testing::slowness()) == std::vector{0});
  CHECK(first.wait(40s * sg::testing::slowness()) == std::vector{0});
  CAPTURE(first.err(0), second.err(0));
  CHECK(results(first.out(0)).size() == 2);
  CHECK(results(first.out(0)) == results(sg::testing::run_stepgraph("train " + run.config() + layout).out));
  CHECK(second.out(0).empty());
}

TEST_CASE("a wrong place in the config is refused by its key", "[tools][processes][jobs]") {
  require_backend("gloo");
  const SmallRun run;
  const auto refused = [&](const std::string& more) {
    const Outcome outcome = run_bash("env -i ASAN_OPTIONS=detect_leaks=0 " + sg::testing::command_path() + " train " +
                                     run.config() + " --set layout.dp=2 --set backend=gloo " + more);
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

TEST_CASE("offload.host_bytes counts for all processes of a machine", "[tools][offload][jobs]") {
  require_backend("gloo");
  const SmallRun small;
  const auto run = [&](std::int64_t host_bytes) {
    return sg::testing::run_stepgraph(str("launch --processes 2 -- train ", small.config(),
                                          " --steps 1 --set backend=gloo --set layout.dp=2 --set "
                                          "offload.optimizer=true --set offload.host_bytes=",
                                          host_bytes));
  };
  const auto refused = run(sg::machine_memory_bytes() / 2 + 1);
  CAPTURE(refused.err);
  CHECK(refused.exit_code == 2);
  CHECK_THAT(refused.err, ContainsSubstring(" for each of 2 ranks is above the memory of this machine"));
  CHECK(run(std::int64_t{1} << 26).exit_code == 0);
}
