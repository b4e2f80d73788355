// eval, generate, graph and verify: the commands on a config that do not train.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <span>
#include <tuple>
#include <vector>

#include "engine/base/error.hpp"
#include "graphs/files/safetensors.hpp"
#include "tests/support/processes/command_run.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using sg::testing::json_lines;
using sg::testing::SmallRun;

TEST_CASE("eval gives the mean loss over the data, in any layout", "[tools][eval]") {
  const SmallRun small;
  const auto outcome = small.run("eval", "--json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].at("type") == "eval");
  CHECK(lines[0].at("steps") == 12);
  CHECK(lines[0].at("tokens") == 12 * 32);
  CHECK(lines[0].at("tokens_left_out") == 393 - 1 - 12 * 32);
  const double loss = lines[0].at("loss").as_real();
  CHECK(std::abs(loss - std::log(256)) < 0.1);  // fresh weights predict all tokens equally
  CHECK(std::abs(lines[0].at("perplexity").as_real() - std::exp(loss)) < 1e-9);
  CHECK(json_lines(small.run("eval", "--json --set layout.pp=2").out)[0].at("loss") == loss);
  const double other =
      json_lines(small.run("eval", "--json --set layout.tp=2 --set layout.dp=2").out)[0].at("loss").as_real();
  CHECK(std::abs(other - loss) < 1e-6 * loss);

  // Before the first update, the loss of a batch is that of training.
  const double first = json_lines(small.run("eval", "--json --steps 1").out)[0].at("loss").as_real();
  CHECK(json_lines(small.run("train", "--json --steps 1").out)[2].at("loss") == first);
  CHECK_THAT(small.run("eval", "--steps 2").out, StartsWith("loss 5.") && ContainsSubstring("(64 tokens, ") &&
                                                     ContainsSubstring(" tokens/s; the last 328 tokens are left out)"));
  CHECK_THAT(small.run("eval").out,
             ContainsSubstring(" tokens/s; the last 8 tokens, too few for a batch, are left out)"));
  CHECK_THAT(small.run("eval", "--steps 2 --set 'data={\"synthetic\": 1}'").out, !ContainsSubstring("left out"));
}

TEST_CASE("generate writes the logits of the token after the prompt, the same in every layout", "[tools][generate]") {
  const SmallRun small;
  const auto logits_of = [&](const std::string& layout) {
    const std::string path = small.path("logits.safetensors");
    const auto outcome     = small.run("generate", "--prompt 7,8,9 --tokens 1 --json --dump-logits " + path + layout);
    CAPTURE(outcome.err);
    REQUIRE(outcome.exit_code == 0);
    std::vector<double> logits(256);
    sg::Safetensors(path).read("logits", std::span(logits));
    const auto best = std::ranges::max_element(logits) - logits.begin();
    CHECK(json_lines(outcome.out).at(0).at("tokens") == std::vector<std::int64_t>{best});
    return logits;
  };
  CHECK(logits_of(" --set layout.pp=2") == logits_of(""));
  CHECK(logits_of(" --set layout.dp=2") == logits_of(""));

  const auto to_stdout = small.run("generate", "--prompt 7 --dump-logits -");
  CHECK(to_stdout.exit_code == 2);
  CHECK_THAT(to_stdout.err, ContainsSubstring("--dump-logits -: stdout is for the tokens (a file name)"));
  sg::testing::write_file(small.path("notes.txt"), "mine");
  const auto other = small.run("generate", "--prompt 7 --dump-logits " + small.path("notes.txt"));
  CHECK(other.exit_code == 2);
  CHECK_THAT(other.err, ContainsSubstring("--dump-logits") && ContainsSubstring("--force"));
}

TEST_CASE("generate continues ids with ids and text with text, the same in every layout", "[tools][generate]") {
  const SmallRun small;
  const auto outcome = small.run("generate", "--prompt '7, 8 9' --tokens 12 --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  const auto line = json_lines(outcome.out).at(0);
  CHECK(line.at("type") == "generate");
  CHECK(line.at("prompt") == std::vector<int>{7, 8, 9});
  CHECK_FALSE(line.contains("text"));
  const auto tokens = line.at("tokens");
  CHECK(tokens.size() == 12);  // with the prompt, more than the context
  for (const auto& layout : sg::testing::some_of(std::vector<std::string>{
           "--set layout.pp=2 --set layout.tp=2 --set layout.dp=2", "--set layout.dp=2", "--set layout.pp=2",
           "--set layout.tp=2", "--set layout.pp=2 --set pipeline.schedule=zb-h1"})) {
    CAPTURE(layout);
    CHECK(json_lines(small.run("generate", "--prompt 7,8,9 --tokens 12 --json " + layout).out).at(0).at("tokens") ==
          tokens);
  }
  // Generation has one microbatch. A schedule that needs several is not an error.
  const auto deep = [&](const std::string& more) {
    const auto done = small.run("generate", "--prompt 7 --tokens 4 --json --set model.layers=4 " + more);
    CAPTURE(done.err);
    REQUIRE(done.exit_code == 0);
    return json_lines(done.out).at(0).at("tokens");
  };
  CHECK(deep("--set layout.pp=2 --set 'pipeline={\"schedule\": \"interleaved\", \"chunks\": 2}'") == deep(""));
  // Nor is a file, with any placement of stages.
  sg::testing::write_file(small.path("loop.csv"),
                          "0F0,0F1,0F2,0F3,2F0,2F1,2F2,2F3,2B0,2B1,2B2,2B3,0B0,0B1,0B2,0B3\n"
                          "1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n");
  const std::string from_file = "--set layout.pp=2 --set pipeline.schedule=" + small.path("loop.csv");
  for (const char* command : {"train", "eval"})
    CHECK(small.run(command, "--steps 1 --set model.layers=3 " + from_file).exit_code == 0);
  CHECK(deep("--set model.layers=3 " + from_file) == deep("--set model.layers=3"));
  const auto odd = small.run("generate", "--prompt 7 --set model.layers=4 " + from_file);
  CHECK(odd.exit_code == 2);
  CHECK_THAT(odd.err, ContainsSubstring("pipeline: 4 layers do not divide over 3 stages (3 or 6 layers, or a schedule "
                                        "with 2 or 4 stages)"));
  std::string ids;
  for (const auto& token : tokens.items) ids += sg::str(ids.empty() ? "" : ",", token);
  CHECK(small.run("generate", "--prompt 7,8,9 --tokens 12").out == ids + "\n");

  const auto text = json_lines(small.run("generate", "--prompt line --tokens 3 --json").out).at(0);
  CHECK(text.at("prompt") == std::vector<int>{'l', 'i', 'n', 'e'});
  CHECK(text.at("text").is_string());
  CHECK_THAT(small.run("generate", "--prompt line --tokens 3").out, StartsWith("line"));
  CHECK(json_lines(small.run("generate", "--prompt 12 --text --tokens 1 --json").out).at(0).at("prompt") ==
        std::vector<int>{'1', '2'});
}

TEST_CASE("graph prints the size of a step and draws it", "[tools][graph]") {
  const SmallRun small;
  const auto plan = small.run("graph", "--json --set layout.pp=2");
  REQUIRE(plan.exit_code == 0);
  const auto line = json_lines(plan.out).at(0);
  CHECK(line.at("type") == "plan");
  CHECK(line.at("ranks") == 2);
  CHECK(line.at("stages") == 2);
  CHECK(line.at("microbatches") == 4);
  CHECK(line.at("nodes").as_integer() > 200);
  CHECK(json_lines(small.run("graph", "--json --forward --set layout.pp=2").out).at(0).at("nodes").as_integer() <
        line.at("nodes").as_integer() / 2);
  CHECK_THAT(small.run("graph", "--dot -").out, StartsWith("digraph") && ContainsSubstring("gpt2"));
  const auto drawn = small.run("graph", "--detail layer --rank 0 --dot " + small.path("step.dot"));
  CHECK(drawn.exit_code == 0);
  CHECK_THAT(drawn.out, ContainsSubstring("1 rank (pp1-dp1-tp1)") && ContainsSubstring(" nodes, "));
  CHECK_THAT(sg::testing::file_bytes(small.path("step.dot")), StartsWith("digraph"));
}

TEST_CASE("verify proves both steps of a config", "[tools][verify]") {
  const SmallRun small;
  const auto outcome = small.run("verify", "--json --set layout.pp=2 --set layout.tp=2 --set pipeline.schedule=zb-h2");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() == 3);
  CHECK(lines[0].at("type") == "plan");
  CHECK(lines[0].at("step") == "training");
  CHECK(lines[1].at("type") == "plan");
  CHECK(lines[1].at("step") == "forward");
  CHECK(lines[1].at("nodes").as_integer() < lines[0].at("nodes").as_integer());
  CHECK(lines[2].at("type") == "verify");
  CHECK(lines[2].at("valid") == true);
  CHECK(lines[2].at("flaws").empty());
  CHECK_THAT(small.run("verify").out, ContainsSubstring("training step:") && ContainsSubstring("valid: no race"));
}

TEST_CASE("verify checks the streams of devices without a device", "[tools][verify]") {
  const SmallRun small;
  const auto plan_of = [&](const std::string& more, std::size_t step) {
    const auto outcome = small.run("verify", "--json " + more);
    CAPTURE(more, outcome.err);
    REQUIRE(outcome.exit_code == 0);
    return json_lines(outcome.out).at(step);
  };
  const auto alone = plan_of("", 0);
  CHECK(alone.at("streams") == 1);  // a lane that orders everything
  for (const char* field : {"events", "event_waits", "loop_waits"}) CHECK(alone.at(field) == 0);
  const auto two = plan_of("--set layout.pp=2 --set layout.dp=2 --set shard.strategy=full", 0);
  CHECK(two.at("streams").as_integer() >= 4 * 4);  // compute, gather, reduce and messages of each rank
  CHECK(two.at("event_waits").as_integer() >= two.at("streams").as_integer());
  CHECK(two.at("events").as_integer() > 0);
  CHECK(two.at("events").as_integer() <= two.at("event_waits").as_integer() + two.at("loop_waits").as_integer());
  CHECK(two.at("event_waits").as_integer() < two.at("edges").as_integer());  // streams imply the other edges
  CHECK(plan_of("--set layout.dp=2", 1).at("streams").as_integer() >= 2);
  CHECK_THAT(small.run("verify", "--set layout.pp=2").out,
             ContainsSubstring("on devices: ") && ContainsSubstring(" for the step before\n") &&
                 ContainsSubstring("streams wait for their predecessors"));
}

TEST_CASE("commands on a config refuse impossible requests", "[tools][refuses]") {
  const SmallRun small;
  for (const auto& [command, more, why] :
       sg::testing::some_of(std::vector<std::tuple<std::string, std::string, std::string>>{
           {"eval", "--steps 13", "--steps 13: the data has 393 tokens"},
           {"eval", "--steps 0", "--steps"},
           {"eval", "--set recompute=ful", "recompute: \"ful\" is unknown (did you mean full? known: none"},
           {"generate", "", "--prompt"},
           {"generate", "--prompt ''", "--prompt: is empty"},
           {"generate", "--prompt 256", "--prompt: token 256 is not in the model's vocabulary (0 to 255"},
           {"generate", "--prompt 1,99999999999999999999", "--prompt: token 99999999999999999999 is not in"},
           {"generate", "--prompt z --set model.vocab=100",
            "--prompt: has a byte 122, but the model's vocabulary has 100"},
           {"generate", "--prompt 1 --tokens 0", "--tokens"},
           {"graph", "--rank 1 --dot -", "--rank 1: is not in the layout (0 to 0)"},
           {"graph", "--rank -1 --dot -", "--rank"},
           {"graph", "--rank 0", "--rank: has no effect without a drawing (add --dot or --svg)"},
           {"graph", "--detail stage", "--detail: has no effect without a drawing (add --dot or --svg)"},
           {"graph", "--detail atom", "--detail"},
           {"graph", "--svg -", "--svg -: stdout is not supported"},
           {"graph", "--json --dot -", "both write to stdout"},
           {"graph", "--dot x --svg x", "--dot and --svg: both write x (two files)"},
           {"graph", "--dot /nowhere/x.dot", "--dot '/nowhere/x.dot': there is no folder /nowhere"},
           {"verify", "--set layout.pp=3", "layout.pp: pp 3 x chunks 1 = 3 stages, but the model has 2 layers"},
           {"verify", "--set layout.pp=2 --set model.layers=3", "layout.pp: 3 layers do not divide over 2 stages"},
           {"verify",
            "--set layout.tp=16 --set 'model={\"load\": \"" + sg::testing::data_file("golden/gpt2-tiny").string() +
                "\"}'",
            "layout.tp: heads "},
           {"verify", "--threads 1", "--threads"},
       })) {
    CAPTURE(command, more);
    const auto outcome = small.run(command, more);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph " + command) && ContainsSubstring(why));
  }
}
