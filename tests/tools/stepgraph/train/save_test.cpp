// train --save: what is saved when, and that the folder always holds one model.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "engine/base/error.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/command_run.hpp"

namespace sg = stepgraph;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using sg::testing::file_bytes;
using sg::testing::json_lines;
using sg::testing::run_bash;
using sg::testing::SmallRun;

namespace {

using Files = std::map<std::string, std::string>;  // contents by name

Files files_in(const fs::path& folder) {
  Files files;
  if (!fs::exists(folder)) return files;
  for (const auto& entry : fs::directory_iterator(folder))
    files[entry.path().filename().string()] = entry.is_directory() ? "" : file_bytes(entry.path());
  return files;
}

Files model_of(const Files& files) {
  Files model;
  for (const char* name : {"config.json", "model.safetensors"})
    if (files.contains(name)) model[name] = files.at(name);
  return model;
}

// Trains without end in the background and waits for its third step. `then` can use $run, the process.
std::string endless(const SmallRun& small, const std::string& more) {
  return sg::testing::command_path() + " train " + small.config() +
         " --json --set 'data={\"synthetic\": 1}' --steps 1000000 " + more + " > " + small.path("out") +
         " & run=$!\nwhile kill -0 $run && ! grep -q '\"step\":2,' " + small.path("out") + "; do sleep 0.02; done\n";
}

}  // namespace

TEST_CASE("saves that are killed or run at the same time leave one model, with its own config", "[tools][save]") {
  const SmallRun small;
  // Heads do not change a shape, so one model's weights would load under the other's config.
  const auto save = [&](int heads, const std::string& folder) {
    return sg::str(sg::testing::command_path(), " train ", small.config(), " --steps 0 --set seed=", heads,
                   " --set model.heads=", heads, " --save ", small.path(folder));
  };
  std::vector<Files> models;
  for (const int heads : {2, 4}) {
    REQUIRE(run_bash(save(heads, "alone")).exit_code == 0);
    models.push_back(files_in(small.path("alone")));
  }
  REQUIRE(models[0].at("config.json") != models[1].at("config.json"));
  REQUIRE(models[0].at("model.safetensors") != models[1].at("model.safetensors"));
  REQUIRE(run_bash(save(2, "model")).exit_code == 0);
  std::ofstream(small.path("model/tokenizer.json")) << "mine";
  std::mt19937 random(17);
  for (int round = 0; round < sg::testing::cases(24); ++round) {
    const double seconds = std::uniform_real_distribution<double>(0, 0.15)(random);
    CAPTURE(round, seconds);
    const auto both = run_bash(save(2, "model") + " & one=$!\n" + save(4, "model") + " & two=$!\nsleep " +
                               std::to_string(seconds) + "\nkill -KILL $one $two\nwait\ntrue");
    REQUIRE(both.exit_code == 0);
    const Files found = files_in(small.path("model"));
    REQUIRE((model_of(found) == models[0] || model_of(found) == models[1]));
    REQUIRE(found.at("tokenizer.json") == "mine");
  }
  REQUIRE(run_bash(save(4, "model")).exit_code == 0);
  CHECK(model_of(files_in(small.path("model"))) == models[1]);
  for (const auto& entry : fs::directory_iterator(small.path("")))
    CHECK(entry.path().string().find("model.") == std::string::npos);  // nothing is left beside it
  CHECK(small.run("eval", "--set 'model={\"load\": \"" + small.path("model") + "\"}'").exit_code == 0);
}

TEST_CASE("a signal ends a run after its step, with the model saved and an exit code of its own", "[tools][save]") {
  for (const auto& [name, code] : {std::pair("INT", 130), std::pair("TERM", 143), std::pair("HUP", 129)}) {
    CAPTURE(name);
    const SmallRun small;
    const auto outcome =
        run_bash(endless(small, "--save " + small.path("kept")) + "kill -" + name + " $run\nwait $run");
    CHECK(outcome.exit_code == code);
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph train: interrupted after ") &&
                                ContainsSubstring(" of 1000000 steps; model saved in " + small.path("kept")));
    const auto lines = json_lines(file_bytes(small.path("out")));
    CHECK(lines.back().at("type") == "summary");
    CHECK(lines.back().at("interrupted") == true);
    CHECK(lines.back().at("steps") == lines.size() - 3);
    CHECK(fs::exists(small.path("kept/model.safetensors")));
  }
  const SmallRun small;
  const auto eval = run_bash(sg::testing::command_path() + " eval " + small.config() +
                             " --set 'data={\"synthetic\": 1}' --steps 1000000 & sleep 1\nkill -TERM $!\nwait $!");
  CHECK(eval.exit_code == 143);
  const auto generate =
      run_bash(sg::testing::command_path() + " generate " + small.config() + " --prompt 1,2 --tokens 10000000 > " +
               small.path("ids") + " & while kill -0 $! && ! grep -q ',' " + small.path("ids") +
               "; do sleep 0.05; done\nkill -INT $!\nwait $!");
  CHECK(generate.exit_code == 130);
  CHECK_THAT(generate.err, ContainsSubstring("interrupted after ") && ContainsSubstring(" of 10000000 tokens"));
}

TEST_CASE("signals that are sent together end a run once, with the model saved", "[tools][save]") {
  for (const auto& [name, code] : {std::pair("HUP", 129), std::pair("INT", 130)}) {
    CAPTURE(name);
    const SmallRun small;
    const std::string send = sg::str("kill -", name, " $run\n");
    const auto outcome =
        run_bash(endless(small, "--save " + small.path("kept")) + send + "sleep 0.005\n" + send + "wait $run");
    CHECK(outcome.exit_code == code);
    CHECK(fs::exists(small.path("kept/model.safetensors")));
  }
}

TEST_CASE("a folder that holds a mount point is refused before any work", "[tools][save][refuses]") {
  const SmallRun small;
  const std::string folder = small.path("model");
  fs::create_directories(folder + "/data/disk");
  const std::string mount = "mount -t tmpfs none " + folder + "/data/disk";
  if (run_bash("unshare -rm bash -c '" + mount + "'").exit_code != 0) SKIP("needs mount namespaces");
  const auto outcome = run_bash("unshare -rm bash -c '" + mount + " && " + sg::testing::command_path() + " train " +
                                small.config() + " --steps 1 --save " + folder + "'");
  CHECK(outcome.exit_code == 2);
  CHECK(outcome.out.empty());
  CHECK_THAT(outcome.err, ContainsSubstring("/data/disk in it is a mount point, so it cannot be replaced"));
}

TEST_CASE("a model is saved even if the log cannot be written", "[tools][save]") {
  const SmallRun small;
  for (const std::string json : {"", "--json"}) {
    const std::string kept = small.path("kept" + json);
    const auto outcome     = run_bash(sg::testing::command_path() + " train " + small.config() + " " + json +
                                      " --steps 3 --save " + kept + " > /dev/full");
    CHECK(outcome.exit_code == 3);
    CHECK_THAT(outcome.err, ContainsSubstring("stdout cannot be written: No space left on device") &&
                                ContainsSubstring("; model saved in " + kept));
    REQUIRE(small.run("train", "--steps 3 --save " + small.path("whole")).exit_code == 0);
    CHECK(files_in(kept) == files_in(small.path("whole")));
  }
}

TEST_CASE("a model is saved even if its data becomes shorter", "[tools][save]") {
  const SmallRun small;
  const std::string data = small.path("long.txt");
  std::ofstream(data) << std::string(4 * 8 * 1'000'000 + 1, 'x');
  const auto outcome =
      run_bash(endless(small, "--save " + small.path("kept") + " --set 'data={\"text\": \"" + data + "\"}'") +
               "truncate -s 1000 " + data + "\nwait $run");
  CHECK(outcome.exit_code == 1);
  const auto lines = json_lines(file_bytes(small.path("out")));
  CHECK_THAT(outcome.err, ContainsSubstring("long.txt: ends at byte ") &&
                              ContainsSubstring(sg::str("; model saved in ", small.path("kept"), ": the weights after ",
                                                        lines.back().at("steps"), " steps")));
  CHECK(lines.back().at("steps").as_integer() >= 3);
  CHECK(fs::exists(small.path("kept/model.safetensors")));
}

TEST_CASE("after a step whose loss is not finite, the weights before it are saved", "[tools][save]") {
  const SmallRun small;
  const std::string wild = "--json --set optimizer.lr=1e30 --set optimizer.kind=sgd --save " + small.path("model");
  REQUIRE(small.run("train", wild + " --steps 1").exit_code == 0);
  const Files first  = files_in(small.path("model"));
  const auto outcome = small.run("train", wild);
  CHECK(outcome.exit_code == 1);
  CHECK_THAT(outcome.err,
             ContainsSubstring("step 1: loss ") &&
                 ContainsSubstring("; model saved in " + small.path("model") + ": the weights after 1 step"));
  CHECK(files_in(small.path("model")) == first);
}

TEST_CASE("weights that are not finite or not trained do not replace a model", "[tools][save]") {
  const SmallRun small;
  const std::string save = "--save " + small.path("model");
  REQUIRE(small.run("train", save).exit_code == 0);
  const Files good    = files_in(small.path("model"));
  const auto infinite = small.run("train", save + " --steps 1 --set optimizer.lr=1e39 --set optimizer.kind=sgd");
  CHECK(infinite.exit_code == 1);
  CHECK_THAT(infinite.err, ContainsSubstring("not saved: element ") && ContainsSubstring("(finite weights)"));
  const auto at_once = small.run("train", save + " --set model.init_deviation=1e30");
  CHECK(at_once.exit_code == 1);
  CHECK_THAT(at_once.err,
             ContainsSubstring("step 0: loss ") && ContainsSubstring("; not saved: no step was completed"));
  CHECK(files_in(small.path("model")) == good);
}

TEST_CASE("only a model that stepgraph wrote is replaced, unless --force is given", "[tools][save][refuses]") {
  const SmallRun small;
  const std::string folder = small.path("model");
  const auto save          = [&](const std::string& more = "") {
    return small.run("train", "--steps 1 --save " + folder + " " + more);
  };
  const auto refused = [&](const std::string& why) {
    const Files before = files_in(folder);
    const auto outcome = save();
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("--save '" + folder + "': " + why +
                                              " has no mark of stepgraph (a new name, or --force to replace it)"));
    CHECK(files_in(folder) == before);
  };
  for (const char* name : {"config.json", "model.safetensors", "model.safetensors.index.json"}) {
    fs::remove_all(folder);
    fs::create_directory(folder);
    std::ofstream(folder + "/" + name) << "{}";
    refused(sg::str(name, " in it"));
    CHECK(save("--force").exit_code == 0);
    CHECK(save().exit_code == 0);  // now it did
  }
  fs::remove_all(folder);
  fs::create_directory(folder);
  CHECK(save().exit_code == 0);  // an empty folder
  // Other files stay.
  fs::remove_all(folder);
  fs::create_directory(folder);
  std::ofstream(folder + "/tokenizer.json") << "mine";
  fs::create_directory(folder + "/runs");
  std::ofstream(folder + "/runs/log") << "my log";
  for (int i = 0; i < 2; ++i) {
    CHECK(save().exit_code == 0);
    CHECK(file_bytes(folder + "/tokenizer.json") == "mine");
    CHECK(file_bytes(folder + "/runs/log") == "my log");
    CHECK(files_in(folder).size() == 4);
  }
  // The current folder would be replaced under the feet of the shell.
  const auto here = run_bash("cd " + folder + " && " + sg::testing::command_path() + " train " + small.config() +
                             " --steps 1 --save .");
  CHECK(here.exit_code == 2);
  CHECK_THAT(here.err, ContainsSubstring("--save .: is the current folder or holds it"));
}

TEST_CASE("what an interrupted save left is named by the next save and load", "[tools][save]") {
  const SmallRun small;
  const std::string left = small.path("model.old-0123456789abcdef");
  fs::create_directory(left);
  const auto load = small.run("eval", "--set 'model={\"load\": \"" + small.path("model") + "\"}'");
  CHECK(load.exit_code == 2);
  CHECK_THAT(load.err, ContainsSubstring("there is no such file; an interrupted save left " + left));
  const auto save = small.run("train", "--steps 1 --save " + small.path("model"));
  CHECK(save.exit_code == 0);
  CHECK_THAT(save.err, ContainsSubstring(left + ": left by an interrupted save"));
  CHECK(fs::exists(left));
}
