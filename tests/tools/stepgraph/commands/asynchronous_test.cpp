// The commands with update.mode asynchronous.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <string>

#include "tests/support/processes/command_run.hpp"

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using stepgraph::JsonValue;
using stepgraph::testing::json_lines;
using stepgraph::testing::run_stepgraph;
using stepgraph::testing::SmallRun;

namespace {

const std::string asynchronous =
    " --set layout.dp=2 --set batch.micro=1 --set update.mode=asynchronous --set update.max_staleness=1";

std::vector<JsonValue> of_type(const std::vector<JsonValue>& lines, const std::string& type) {
  std::vector<JsonValue> found;
  for (const JsonValue& line : lines) {
    if (line.at("type") == type) found.push_back(line);
  }
  return found;
}

}  // namespace

TEST_CASE("train runs asynchronous windows and prints a line with the staleness of each step",
          "[tools][train][asynchronous]") {
  const SmallRun small;
  const auto outcome = small.run("train", "--json" + asynchronous);
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK_THAT(outcome.err, ContainsSubstring("update.mode asynchronous: gradients are applied in the order in which "
                                            "they arrive, so a second run has other results"));
  const auto lines = json_lines(outcome.out), steps = of_type(lines, "step");
  CHECK(of_type(lines, "plan").front().at("window") == 12);
  REQUIRE(steps.size() == 12);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    CHECK(steps[i].at("step") == i);
    for (const char* field : {"loss", "grad_norm", "tokens_per_s"}) CHECK(steps[i].at(field).as_real() > 0);
    CHECK(steps[i].at("staleness_max").as_real() <= 1);
    CHECK(steps[i].at("staleness_mean").as_real() <= steps[i].at("staleness_max").as_real());
    CHECK(steps[i].at("staleness_mean").as_real() >= 0);
    CHECK(steps[i].at("dropped") == 0);
  }
  CHECK(steps.back().at("loss").as_real() < steps.front().at("loss").as_real());
  const auto text = small.run("train", "--steps 3" + asynchronous);
  CHECK_THAT(text.out, ContainsSubstring("window of 3 steps: "));
  CHECK_THAT(text.out, ContainsSubstring("  staleness "));
}

TEST_CASE("one asynchronous rank prints the losses of a synchronous run, and no note", "[tools][train][asynchronous]") {
  const SmallRun small;
  const auto plain   = small.run("train", "--json"),
             windows = small.run("train", "--json --set update.mode=asynchronous");
  REQUIRE(windows.exit_code == 0);
  CHECK(windows.err.empty());
  const auto expected = of_type(json_lines(plain.out), "step"), found = of_type(json_lines(windows.out), "step");
  REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    CHECK(found[i].at("loss") == expected[i].at("loss"));
    CHECK(found[i].at("grad_norm") == expected[i].at("grad_norm"));
  }
}

TEST_CASE("windows end at evaluations, checkpoints and the last step, and a run goes on from its checkpoint",
          "[tools][train][asynchronous]") {
  const SmallRun small;
  const std::string more = "--json" + asynchronous + " --set checkpoint.folder=" + small.path("saved") +
                           " --set checkpoint.every=4 --set eval.every=3 --set data.validation=0.2";
  const auto first = small.run("train", more + " --steps 5");
  CAPTURE(first.err);
  REQUIRE(first.exit_code == 0);
  std::string order;
  for (const JsonValue& line : json_lines(first.out)) order += line.at("type").as_string().substr(0, 1);
  CHECK_THAT(order, ContainsSubstring("sss") && ContainsSubstring("e"));
  const auto evals = of_type(json_lines(first.out), "eval");
  REQUIRE(evals.size() == 1);
  CHECK(evals.front().at("step") == 3);
  const auto saved = of_type(json_lines(first.out), "checkpoint");
  REQUIRE(saved.size() == 2);
  CHECK(saved[0].at("step") == 4);
  CHECK(saved[1].at("step") == 5);
  const auto second = small.run("train", more + " --steps 8 --resume");
  CAPTURE(second.err);
  REQUIRE(second.exit_code == 0);
  const auto steps = of_type(json_lines(second.out), "step");
  REQUIRE(steps.size() == 3);
  CHECK(steps.front().at("step") == 5);
  // A synchronous run can go on from it.
  const auto third = small.run("train", more +
                                            " --steps 9 --resume --set update.mode=synchronous"
                                            " --set update.max_staleness=0");
  CAPTURE(third.err);
  CHECK(third.exit_code == 0);
  CHECK(of_type(json_lines(third.out), "step").size() == 1);
}

TEST_CASE("graph, verify, simulate, plan-memory and a trace show an asynchronous window", "[tools][asynchronous]") {
  const SmallRun small;
  const auto drawn = small.run("graph", "--detail op --dot -" + asynchronous);
  CHECK(drawn.exit_code == 0);
  CHECK_THAT(drawn.out, ContainsSubstring("take newest version s2") && ContainsSubstring("mark s0 for rank 1"));
  const auto proved = small.run("verify", asynchronous);
  CHECK(proved.exit_code == 0);
  CHECK_THAT(proved.out, ContainsSubstring("window of 3 steps") && ContainsSubstring("valid: "));
  const auto memory = small.run("plan-memory", "--json" + asynchronous);
  CHECK(memory.exit_code == 0);
  const auto traced = small.run("train", "--steps 4 --trace " + small.path("trace.json") + asynchronous);
  CAPTURE(traced.err);
  CHECK(traced.exit_code == 0);
  CHECK_THAT(stepgraph::testing::file_bytes(small.path("trace.json")),
             ContainsSubstring("give gradient, make next version s3"));
  const std::string cluster = small.path("cluster.json");
  stepgraph::testing::write_file(cluster, R"({"preset": "a100", "slow": [{"rank": 1, "factor": 2}]})");
  const auto simulated = small.run("simulate", "--cluster " + cluster + asynchronous);
  CAPTURE(simulated.err);
  CHECK(simulated.exit_code == 0);
  CHECK_THAT(simulated.out, ContainsSubstring(" ms in a window of 16, "));
}

TEST_CASE("the longest window of a run is traced, and a run without steps says that there is no trace",
          "[tools][train][asynchronous]") {
  const SmallRun small;
  const auto traced = [&](const std::string& name, const std::string& more) {
    auto outcome = small.run("train", "--trace " + small.path(name) + asynchronous + " --set checkpoint.folder=" +
                                          small.path("saved") + " --set eval.every=3 --set data.validation=0.2" + more);
    CAPTURE(outcome.err);
    CHECK(outcome.exit_code == 0);
    return outcome;
  };
  const auto holds = [&](const std::string& name, const std::string& text) {
    return stepgraph::testing::file_bytes(small.path(name)).find(text) != std::string::npos;
  };
  traced("first.json", " --steps 5");  // windows of 3 and 2 steps
  CHECK(holds("first.json", "a window of 3 steps, from step 0"));
  CHECK(holds("first.json", "give gradient, make next version s2"));
  traced("resumed.json", " --steps 8 --resume");  // of 1 and 2 steps
  CHECK(holds("resumed.json", "a window of 2 steps, from step 6"));
  CHECK(holds("resumed.json", "give gradient, make next version s1"));
  traced("one.json", " --steps 9 --resume");
  CHECK(holds("one.json", "step 8"));
  const auto none = traced("none.json", " --steps 9 --resume");
  CHECK_THAT(none.err, ContainsSubstring("none.json: no trace is written, because no step has run"));
}

TEST_CASE("commands refuse what asynchronous ranks cannot have", "[tools][asynchronous][refuses]") {
  const SmallRun small;
  const auto refusal = [&](const std::string& more) {
    const auto outcome = small.run("train", "--steps 1" + asynchronous + more);
    CHECK(outcome.exit_code == 2);
    return outcome.err;
  };
  CHECK_THAT(refusal(" --set backend=gloo"), ContainsSubstring("update.mode: asynchronous with backend gloo"));
  CHECK_THAT(refusal(" --set backend=cuda"), ContainsSubstring("update.mode: asynchronous with backend cuda"));
  CHECK_THAT(refusal(" --set layout.tp=2"), ContainsSubstring("layout.tp: 2 with update.mode asynchronous"));
  CHECK_THAT(refusal(" --set layout.pp=2"), ContainsSubstring("layout.pp: 2 with update.mode asynchronous"));
  CHECK_THAT(refusal(" --set shard.strategy=zero1"), ContainsSubstring("shard.strategy: zero1 with update.mode"));
  CHECK_THAT(refusal(" --set offload.optimizer=true"),
             ContainsSubstring("offload.optimizer: true with update.mode asynchronous"));
  CHECK_THAT(refusal(" --set comm.algorithm=ring"),
             ContainsSubstring("comm.algorithm: ring with update.mode asynchronous"));
  CHECK_THAT(refusal(" --set shard.bucket_mb=1"),
             ContainsSubstring("shard.bucket_mb: 1 with update.mode asynchronous"));
  CHECK_THAT(refusal(" --dump-grads " + small.path("g.safetensors")),
             ContainsSubstring("--dump-grads: with update.mode asynchronous"));
}

TEST_CASE("bench train compares kinds of updates where a rank is slow", "[tools][bench][asynchronous]") {
  const auto outcome = run_stepgraph(
      "bench train --models tiny --layouts 2x1x1 --update synchronous,asynchronous:1 --slow-rank 2 --slow-in-turns "
      "--dry-run --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() == 2);
  CHECK(lines[0].at("update") == "synchronous");
  CHECK(lines[1].at("update") == "asynchronous:1");
  for (const JsonValue& line : lines) {
    CHECK(line.at("type") == "update");
    for (const char* field : {"step_s", "tokens_per_s", "ratio_to_first"}) CHECK(line.at(field).as_real() > 0);
    CHECK(line.at("staleness_max").as_real() <= 1);
  }
  for (const auto& [arguments, message] :
       {std::pair{"--update sometimes", "--update 'sometimes': is no mode"},
        std::pair{"--update stale:x", "--update 'stale:x': is no mode"},
        std::pair{"--update synchronous:1", "update.max_staleness: 1 with update.mode synchronous"},
        std::pair{"--slow-rank 2", "--slow-rank: has no effect without --update"},
        std::pair{"--update synchronous --warm-up 5", "--warm-up: has no effect with --update"},
        std::pair{"--update synchronous --slow-in-turns", "--slow-in-turns: has no effect without --slow-rank"}}) {
    const auto refused = run_stepgraph(std::string("bench train --models tiny --layouts 2x1x1 --dry-run ") + arguments);
    CHECK(refused.exit_code == 2);
    CHECK_THAT(refused.err, ContainsSubstring(message));
  }
}
