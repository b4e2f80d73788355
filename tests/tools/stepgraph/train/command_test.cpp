#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "graphs/files/safetensors.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::json_lines;
using sg::testing::SmallRun;

namespace {

std::vector<sg::JsonValue> steps_of(const std::string& out) {
  std::vector<sg::JsonValue> steps;
  for (const auto& line : json_lines(out)) {
    if (line.at("type") == "step") steps.push_back(line);
  }
  return steps;
}

// The text of a number in a line of JSON.
std::string number_text(const std::string& line, const std::string& key) {
  const std::size_t begin = line.find("\"" + key + "\":") + key.size() + 3;
  return line.substr(begin, line.find_first_of(",}", begin) - begin);
}

}  // namespace

TEST_CASE("train prints its config, its plan, its steps and a summary, and nothing else", "[tools][train]") {
  const SmallRun small;
  const auto outcome = small.run("train", "--json --set layout.pp=2 --set seed=5");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() == 2 + 12 + 1);
  CHECK(lines[0].at("type") == "config");
  CHECK(lines[0].at("layout").at("pp") == 2);
  CHECK(lines[0].at("seed") == 5);
  CHECK(lines[0].at("optimizer").at("beta2") == 0.95);
  CHECK(lines[1].at("type") == "plan");
  CHECK(lines[1].at("ranks") == 2);
  CHECK(lines[1].at("peak_bytes").size() == 2);
  for (std::size_t i = 0; i < 12; ++i) {
    const auto& step = lines[2 + i];
    CHECK(step.at("type") == "step");
    CHECK(step.at("step") == i);
    for (const char* field : {"loss", "grad_norm", "tokens_per_s", "seconds"}) CHECK(step.at(field).as_real() > 0);
    CHECK(step.at("tokens") == (i + 1) * 4 * 8);
    CHECK(step.at("seconds").as_real() <= lines[14].at("seconds").as_real());
  }
  CHECK(lines[2].at("loss").as_real() > lines[13].at("loss").as_real());
  CHECK(lines[14].at("type") == "summary");
  CHECK(lines[14].at("steps") == 12);
  CHECK(lines[14].at("tokens") == 12 * 4 * 8);
  CHECK(lines[14].at("loss") == lines[13].at("loss"));
  CHECK(lines[14].at("interrupted") == false);
}

TEST_CASE("train compares the weights of data-parallel ranks before the first step, and prints their hash",
          "[tools][train]") {
  const SmallRun small;
  const auto hash = [&](const std::string& more) {
    const auto outcome = small.run("train", "--json --steps 1 " + more);
    CAPTURE(more, outcome.err);
    REQUIRE(outcome.exit_code == 0);
    const auto plan = json_lines(outcome.out).at(1);
    CHECK(plan.at("type") == "plan");
    return plan.contains("weights_hash") ? plan.at("weights_hash").as_string() : "";
  };
  const std::string two = hash("--set layout.dp=2");
  CHECK(two.size() == 16);
  CHECK(two.find_first_not_of("0123456789abcdef") == std::string::npos);
  CHECK(hash("--set layout.dp=4") == two);  // the same weights
  CHECK(hash("--set layout.dp=2 --set seed=5") != two);
  CHECK(hash("").empty());  // one rank has nothing to compare
  CHECK_THAT(small.run("train", "--steps 1 --set layout.dp=2").out,
             ContainsSubstring("weights: " + two + ", equal on all data-parallel ranks that hold them\n"));
}

TEST_CASE("train prints loss and norm with enough digits to read back the same double", "[tools][train]") {
  const SmallRun small;
  const auto json = small.run("train", "--json --steps 3"), text = small.run("train", "--steps 3");
  REQUIRE(json.exit_code == 0);
  REQUIRE(text.exit_code == 0);
  std::istringstream in(json.out);
  int seen = 0;
  for (std::string line; std::getline(in, line);) {
    if (line.find("\"step\",") == line.npos) continue;
    ++seen;
    for (const char* key : {"loss", "grad_norm"}) {
      const std::string written = number_text(line, key);
      char again[64];
      std::snprintf(again, sizeof again, "%.17g", std::strtod(written.c_str(), nullptr));
      CHECK(written == again);
      CHECK_THAT(text.out, ContainsSubstring(written));
    }
  }
  CHECK(seen == 3);
  CHECK_THAT(text.out, ContainsSubstring("2 layers, width 16") && ContainsSubstring("step 2  loss ") &&
                           ContainsSubstring("3 steps, 96 tokens in "));
  CHECK(text.err.empty());
}

TEST_CASE("the seed of a config is that of dropout, in every layout", "[tools][train]") {
  const SmallRun small;
  const std::string folder = small.path("model");
  REQUIRE(small.run("train", "--steps 1 --save " + folder).exit_code == 0);
  // Weights are loaded, so the seed is dropout's alone.
  const auto losses = [&](const std::string& more) {
    const auto outcome =
        small.run("train", "--json --steps 3 --set 'model={\"load\": \"" + folder + "\", \"dropout\": 0.5}' " + more);
    CAPTURE(more, outcome.err);
    REQUIRE(outcome.exit_code == 0);
    std::vector<double> found;
    for (const auto& step : steps_of(outcome.out)) found.push_back(step.at("loss").as_real());
    return found;
  };
  const auto zero = losses(""), one = losses("--set seed=1");
  CHECK(losses("--set seed=0") == zero);
  CHECK(one[0] != zero[0]);
  CHECK(losses("--set seed=1 --set layout.pp=2") == one);
  for (const char* layout : {"--set layout.dp=2", "--set layout.tp=2", "--set layout.dp=2 --set layout.tp=2"}) {
    const auto other = losses(std::string("--set seed=1 ") + layout);
    for (std::size_t i = 0; i < one.size(); ++i) CHECK(std::abs(other[i] - one[i]) < 1e-5 * one[i]);
  }
}

TEST_CASE("with loss scaling, train prints the scale of each step and whether it was skipped", "[tools][train]") {
  const SmallRun small;
  const auto plain = small.run("train", "--json --steps 2");
  for (const auto& step : steps_of(plain.out)) CHECK_FALSE(step.contains("loss_scale"));
  const auto half = small.run("train", "--json --steps 2 --set precision.param=fp16");
  REQUIRE(half.exit_code == 0);
  CHECK(json_lines(half.out)[0].at("precision").at("loss_scale") == "dynamic");
  REQUIRE(steps_of(half.out).size() == 2);
  CHECK(steps_of(half.out)[0].at("loss_scale") == 65536);
  CHECK(steps_of(half.out)[0].at("skipped").is_boolean());
  // A scale larger than the largest fp16 number.
  const std::string huge = "--steps 2 --set precision.param=fp16 --set precision.loss_scale=1e12";
  const auto skipped = small.run("train", huge + " --json"), text = small.run("train", huge);
  CAPTURE(skipped.err);
  REQUIRE(skipped.exit_code == 0);
  for (const auto& step : steps_of(skipped.out)) {
    CHECK(step.at("skipped") == true);
    CHECK(step.at("grad_norm").is_null());
    CHECK(step.at("loss").as_real() > 0);
  }
  CHECK_THAT(text.out, ContainsSubstring("skipped: gradients overflow at loss scale 1e+12"));
}

TEST_CASE("a model saved by transformers trains as it does there", "[tools][train]") {
  const std::string model = sg::testing::data_file("golden/gpt2-tiny").string();
  sg::testing::TempFolder folder;
  const auto expected = sg::parse_json(sg::testing::file_bytes(model + "/expected.json"));
  const sg::JsonValue config{{"model", {{"load", model}}},
                             {"data", {{"tokens", model + "/tokens.u16"}}},
                             {"batch", {{"global", expected.at("batch")}, {"micro", 2}, {"seq", expected.at("seq")}}},
                             {"layout", {{"tp", 2}, {"pp", 2}}},
                             {"optimizer", {{"clip", expected.at("optimizer").at("clip_grad_norm")}}}};
  const bool few     = sg::testing::sanitized();  // steps; else all that the data is enough for
  const auto outcome = sg::testing::run_stepgraph("train " + folder.put("c.json", sg::json_line(config)).string() +
                                                  " --json --threads 1" + (few ? " --steps 2" : ""));
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const auto steps = steps_of(outcome.out);
  REQUIRE(steps.size() == (few ? 2 : expected.at("loss").size()));
  for (std::size_t i = 0; i < steps.size(); ++i) {
    CAPTURE(i);
    const double loss = expected.at("loss")[i].as_real(), norm = expected.at("grad_norm")[i].as_real();
    CHECK(std::abs(steps[i].at("loss").as_real() - loss) <= 2e-6 * loss);
    CHECK(std::abs(steps[i].at("grad_norm").as_real() - norm) <= 5e-5 * norm);
  }
}

TEST_CASE("train writes a model, gradients and a trace to the given files", "[tools][train]") {
  const SmallRun small;
  const auto outcome =
      small.run("train", "--json --steps 4 --set layout.tp=2 --save " + small.path("made/model") + " --dump-grads " +
                             small.path("g.safetensors") + " --trace " + small.path("t.json"));
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const sg::Safetensors gradients(small.path("g.safetensors")), weights(small.path("made/model/model.safetensors"));
  CHECK(gradients.contains("transformer.h.1.mlp.c_fc.weight"));
  auto names = gradients.names(), weight_names = weights.names();
  std::sort(names.begin(), names.end());
  std::sort(weight_names.begin(), weight_names.end());
  CHECK(names == weight_names);
  const auto trace = sg::parse_json(sg::testing::file_bytes(small.path("t.json")));
  CHECK(trace.at("traceEvents").size() > 100);

  // The gradients are those of the first step before clipping, so their norm is the printed one.
  double sum = 0;
  for (const std::string& name : names) {
    std::vector<double> values(static_cast<std::size_t>(sg::num_elements(gradients.info(name).shape)));
    gradients.read(name, std::span<double>(values));
    for (const double value : values) sum += value * value;
  }
  const double norm = steps_of(outcome.out)[0].at("grad_norm").as_real();
  CHECK(std::abs(std::sqrt(sum) - norm) < 1e-5 * norm);

  // The saved model has the loss on the next batch that uninterrupted training has.
  const auto whole = steps_of(small.run("train", "--json --steps 5").out);
  const std::string rest =
      sg::testing::file_bytes(small.path("text.txt")).substr(4 * 4 * 8, 4 * 8 + 1);  // the fifth step's tokens
  std::ofstream(small.path("rest.txt"), std::ios::binary) << rest;
  const auto next = small.run("eval", "--json --set 'model={\"load\": \"" + small.path("made/model") +
                                          "\"}' --set data.text=" + small.path("rest.txt"));
  REQUIRE(next.exit_code == 0);
  const double loss = whole.at(4).at("loss").as_real();
  CHECK(std::abs(json_lines(next.out)[0].at("loss").as_real() - loss) < 1e-5 * loss);
}

TEST_CASE("train refuses impossible requests before it begins", "[tools][train][refuses]") {
  const SmallRun small;
  for (const auto& [more, why] : sg::testing::some_of(std::vector<std::pair<std::string, std::string>>{
           {"--steps 13",
            "--steps 13: the data has 393 tokens, enough for 12 steps of 32 and one more token (at most 12; or "
            "data.epochs)"},
           {"--set 'data={\"synthetic\": 1}'", "--steps: missing (synthetic data has no end)"},
           {"--steps -1", "--steps"},
           {"--steps many", "--steps"},
           {"--threads 2000", "--threads"},
           {"--set layout.tp=3", "layout.tp: heads 2 is not divisible by tp 3"},
           {"--set layout.tpp=3", "layout.tpp: unknown key (did you mean tp?"},
           {"--set layout.tp", "override 'layout.tp': no '='"},
           {"--set batch.seq=9", "batch.seq: 9 tokens are more than the model's context of 8"},
           {"--set data.text=/nowhere.txt", "/nowhere.txt"},
           {"--set 'model={\"load\": \"/nowhere\"}'", "model.load: /nowhere/config.json: there is no such file"},
           {"--set model.vocab=64", "text.txt"},
           {"--set pipeline.schedule=/nowhere.csv", "/nowhere.csv"},
           {"--trace /nowhere/t.json", "--trace '/nowhere/t.json': there is no folder /nowhere (an existing folder)"},
           {"--trace ''", "--trace '': is empty"},
           {"--log-every 0", "--log-every"},
           {"--dump-grads " + small.path(""), "is a folder"},
           {"--trace x --dump-grads x", "--dump-grads and --trace: both write x (two files)"},
           {"--steps 0 --trace x", "--steps 0: --dump-grads and --trace need a step"},
           {"--save " + small.path("text.txt"),
            "--save " + small.path("text.txt") + ": is not a folder (a folder, or a new name)"},
           {"surplus", "surplus"},
       })) {
    CAPTURE(more);
    const auto outcome = small.run("train", more);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph train: ") && ContainsSubstring(why));
  }
  CHECK(sg::testing::run_stepgraph("train").exit_code == 2);
  CHECK_THAT(sg::testing::run_stepgraph("train /nowhere.json").err,
             ContainsSubstring("stepgraph train: /nowhere.json: cannot be read: No such file or directory"));
}

TEST_CASE("a run whose loss is not finite fails", "[tools][train]") {
  const SmallRun small;
  const auto outcome = small.run("train", "--json --set optimizer.lr=1e30 --set optimizer.kind=sgd");
  CHECK(outcome.exit_code == 1);
  CHECK_THAT(outcome.err, ContainsSubstring("stepgraph train: step ") &&
                              ContainsSubstring("(a smaller optimizer.lr, or optimizer.clip)"));
  CHECK_THAT(outcome.out, ContainsSubstring("null"));
  for (const auto& line : json_lines(outcome.out)) CHECK(line.contains("type"));  // every line is JSON
  // Before the first update the learning rate cannot be the cause.
  const auto at_once = small.run("train", "--json --set model.init_deviation=1e30");
  CHECK(at_once.exit_code == 1);
  CHECK_THAT(at_once.err, ContainsSubstring("stepgraph train: step 0: ") &&
                              ContainsSubstring("the weights are not finite or too large") &&
                              !ContainsSubstring("optimizer.lr"));
}

TEST_CASE("a run without output files ends quietly when the reader of stdout has gone", "[tools][train]") {
  const SmallRun small;
  const std::string train =
      sg::testing::command_path() + " train " + small.config() + " --json --set 'data={\"synthetic\": 1}' --steps ";
  const auto bash = [](const std::string& script) {
    return sg::testing::run_command("bash -c \"$(cat <<'END'\n" + script + "\nEND\n)\"");
  };
  const auto quiet = bash(train + "1000000 | head -n 3 | wc -l; exit ${PIPESTATUS[0]}");
  CHECK(quiet.exit_code == 0);
  CHECK(quiet.err.empty());
  CHECK_THAT(quiet.out, ContainsSubstring("3"));
  const auto saving = bash(train + "50 --save " + small.path("kept") + " | head -n 1; exit ${PIPESTATUS[0]}");
  CHECK(saving.exit_code == 0);
  CHECK(saving.err.empty());
  CHECK(std::filesystem::exists(small.path("kept/model.safetensors")));
  const auto full = bash(train + "3 > /dev/full");
  CHECK(full.exit_code == 3);
  CHECK_THAT(full.err, ContainsSubstring("stdout cannot be written"));
}
