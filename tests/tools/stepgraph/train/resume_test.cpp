// train with checkpoints: resuming, signals, logs, validation.
#include <signal.h>

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstring>
#include <filesystem>
#include <set>

#include "backends/init_world.hpp"
#include "engine/base/error.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/processes/job_run.hpp"
#include "tests/support/sanitizer.hpp"
#include "tests/support/training/event_file.hpp"

namespace sg = stepgraph;
namespace fs = std::filesystem;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::testing::file_bytes;
using sg::testing::json_lines;
using sg::testing::run_bash;
using sg::testing::run_stepgraph;
using sg::testing::SmallRun;

namespace {

const std::chrono::seconds a_wait = 30s * sg::testing::slowness();

// "STEP LOSS NORM RATE" of each step.
std::vector<std::string> steps_of(const std::string& out) {
  std::vector<std::string> steps;
  for (const auto& line : json_lines(out))
    if (line.at("type") == "step")
      steps.push_back(sg::str(line.at("step"), " ", line.at("loss"), " ", line.at("grad_norm"), " ", line.at("rate")));
  return steps;
}

std::vector<sg::JsonValue> lines_of(const std::string& out, const std::string& type) {
  std::vector<sg::JsonValue> found;
  for (const auto& line : json_lines(out))
    if (line.at("type") == type) found.push_back(line);
  return found;
}

// The names in a folder, without the lock.
std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename() != ".lock") names.insert(entry.path().filename().string());
  return names;
}

// A small run with a folder of checkpoints.
struct CheckpointedRun : SmallRun {
  [[nodiscard]] std::string folder() const { return path("checkpoints"); }
  [[nodiscard]] std::string options(const std::string& more = {}) const {
    return "--json --set checkpoint.folder=" + folder() + " " + more;
  }
  [[nodiscard]] sg::testing::Outcome train(const std::string& more = {}) const { return run("train", options(more)); }
};

void flip_byte(const fs::path& path, std::size_t from_end) {
  std::string bytes = file_bytes(path);
  bytes[bytes.size() - from_end] ^= 1;
  sg::testing::write_file(path, bytes);
}

std::vector<std::string> joined(std::vector<std::string> first, const std::vector<std::string>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

}  // namespace

TEST_CASE("a run that is resumed has the bits of one that never stopped", "[tools][resume]") {
  const CheckpointedRun small;
  const auto whole = steps_of(small.run("train", "--json").out);
  REQUIRE(whole.size() == 12);
  const auto first = small.train("--steps 5 --set checkpoint.every=2");
  CAPTURE(first.err);
  REQUIRE(first.exit_code == 0);
  const auto written = lines_of(first.out, "checkpoint");
  REQUIRE(written.size() == 3);
  CHECK(written[0].at("step") == 2);
  CHECK(written[2].at("path") == small.folder() + "/step-000000005");
  CHECK(written[2].at("bytes").as_integer() > 1000);
  CHECK(names_in(small.folder()) == std::set<std::string>{"step-000000004", "step-000000005"});  // checkpoint.keep 2
  // In another layout.
  const auto second = small.train("--resume --set layout.pp=2 --set checkpoint.keep=0");
  CAPTURE(second.err);
  REQUIRE(second.exit_code == 0);
  CHECK(joined(steps_of(first.out), steps_of(second.out)) == whole);
  const auto resumed = lines_of(second.out, "resume");
  REQUIRE(resumed.size() == 1);
  CHECK(resumed[0].at("step") == 5);
  CHECK(resumed[0].at("path") == small.folder() + "/step-000000005");
  CHECK(lines_of(second.out, "summary").at(0).at("steps") == 12);
  CHECK(lines_of(second.out, "summary").at(0).at("tokens") == 384);
  CHECK(names_in(small.folder()).contains("step-000000012"));
}

TEST_CASE("an empty folder starts at step 0 and says so", "[tools][resume]") {
  const CheckpointedRun small;
  const auto run = small.train("--resume --steps 2");
  CHECK(run.exit_code == 0);
  CHECK(steps_of(run.out).size() == 2);
  CHECK_THAT(run.err, ContainsSubstring("has no checkpoint; the run begins at step 0"));
}

TEST_CASE("a run whose steps are done has nothing to do, and can save its model", "[tools][resume]") {
  const CheckpointedRun small;
  REQUIRE(small.train("--steps 3 --save " + small.path("first")).exit_code == 0);
  for (const char* steps : {"3", "2"}) {
    const auto again = small.train(sg::str("--resume --steps ", steps, " --save ", small.path("again")));
    CAPTURE(again.err, again.out);
    CHECK(again.exit_code == 0);
    CHECK(steps_of(again.out).empty());
    CHECK_THAT(again.err, ContainsSubstring("nothing is left to do"));
    CHECK_THAT(again.out, !ContainsSubstring("nan"));
    CHECK(lines_of(again.out, "checkpoint").empty());
  }
  CHECK(file_bytes(small.path("again/model.safetensors")) == file_bytes(small.path("first/model.safetensors")));
}

TEST_CASE("a folder that has checkpoints is refused without --resume, or put aside by force",
          "[tools][resume][refuses]") {
  const CheckpointedRun small;
  REQUIRE(small.train("--steps 2").exit_code == 0);
  const auto refused = small.train("--steps 4");
  CHECK(refused.exit_code == 2);
  CHECK(refused.out == "");
  CHECK_THAT(refused.err, ContainsSubstring("has 1 checkpoint, the newest after 2 steps (--resume to continue, another "
                                            "folder, or --force to put them aside)"));
  const auto forced = small.train("--steps 1 --force");
  CAPTURE(forced.err);
  CHECK(forced.exit_code == 0);
  CHECK_THAT(forced.err, ContainsSubstring("put aside as "));
  const auto names = names_in(small.folder());
  CHECK(names.size() == 2);
  CHECK(names.contains("step-000000001"));
  CHECK(names.rbegin()->starts_with("step-000000002.aside-"));
}

TEST_CASE("resume without a folder, and of another seed, is refused", "[tools][resume][refuses]") {
  const CheckpointedRun small;
  const auto none = small.run("train", "--resume");
  CHECK(none.exit_code == 2);
  CHECK_THAT(none.err, ContainsSubstring("--resume: checkpoint.folder is not set"));
  const auto missing = small.run("train", "--resume " + small.path("nowhere"));
  CHECK(missing.exit_code == 2);
  REQUIRE(small.train("--steps 1").exit_code == 0);
  const auto seed = small.train("--resume --set seed=3");
  CHECK(seed.exit_code == 2);
  CHECK_THAT(seed.err, ContainsSubstring("seed"));
}

TEST_CASE("of damaged checkpoints the newest whole one is used, and the refused ones are named", "[tools][resume]") {
  const CheckpointedRun small;
  const auto whole = steps_of(small.run("train", "--json").out);
  REQUIRE(small.train("--steps 6 --set checkpoint.every=2 --set checkpoint.keep=0").exit_code == 0);
  const std::string newest = small.folder() + "/step-000000006", older = small.folder() + "/step-000000004";
  flip_byte(newest + "/rank-00000.safetensors", 5);
  // By name it is an error.
  const auto named = small.train("--resume " + newest);
  CHECK(named.exit_code == 2);
  CHECK_THAT(named.err, ContainsSubstring(newest) && ContainsSubstring("the newest whole one beside it is " + older));
  fs::remove(older + "/rank-00000.safetensors");
  const auto resumed = small.train("--resume");
  CAPTURE(resumed.err);
  CHECK(resumed.exit_code == 0);
  CHECK_THAT(resumed.err, ContainsSubstring("refused: ") && ContainsSubstring(newest) && ContainsSubstring(older) &&
                              ContainsSubstring("continues from " + small.folder() + "/step-000000002"));
  CHECK(steps_of(resumed.out) == std::vector<std::string>(whole.begin() + 2, whole.end()));
}

TEST_CASE("a run goes back to an earlier checkpoint by its path", "[tools][resume]") {
  const CheckpointedRun small;
  const auto whole = steps_of(small.run("train", "--json").out);
  REQUIRE(small.train("--steps 6 --set checkpoint.every=2 --set checkpoint.keep=0").exit_code == 0);
  const auto back = small.train("--resume=" + small.folder() + "/step-000000002 --steps 3");
  CAPTURE(back.err);
  CHECK(back.exit_code == 0);
  CHECK(steps_of(back.out) == std::vector<std::string>{whole[2]});
  // The other history does not come back.
  const auto on = small.train("--resume --steps 4");
  CAPTURE(on.err);
  CHECK(steps_of(on.out) == std::vector<std::string>{whole[3]});
}

TEST_CASE("a job that is started again before its first checkpoint begins where it began", "[tools][resume][jobs]") {
  const CheckpointedRun small;
  const std::string data = " --set 'data={\"synthetic\": 1}' ";
  REQUIRE(small.train("--steps 4 --set checkpoint.every=2" + data).exit_code == 0);
  const std::string from = "--resume=" + small.folder() + "/step-000000002 ";
  {
    sg::testing::JobRun job({"/bin/bash", "-c",
                             "exec " + sg::testing::command_path() + " train " + small.config() + " " +
                                 small.options(from + "--restartable --steps 1000000" + data)});
    REQUIRE(job.wait_for_text(0, "\"type\":\"step\"", a_wait));
    job.signal(0, SIGKILL);
    CHECK(job.wait(a_wait) == std::vector<int>{128 + SIGKILL});
  }
  // Not at step 4, which is of another run; then at its own.
  for (const int step : {2, 3}) {
    const auto again = small.train(sg::str(from, "--restarted --steps ", step + 1, data));
    CAPTURE(again.err);
    REQUIRE(again.exit_code == 0);
    CHECK(lines_of(again.out, "resume").at(0).at("step") == step);
  }
  CHECK_FALSE(fs::exists(small.folder() + "/.start"));
}

TEST_CASE("data that has changed is refused if it is shuffled, and noted if not", "[tools][resume][refuses]") {
  const CheckpointedRun small;
  const bool shuffled       = GENERATE(true, false);
  const std::string shuffle = shuffled ? " --set data.shuffle=true " : " ";
  REQUIRE(small.train("--steps 2" + shuffle).exit_code == 0);
  sg::testing::write_file(small.path("text.txt"), file_bytes(small.path("text.txt")) + std::string(8, 'a'));
  const auto resumed = small.train("--resume --steps 3" + shuffle);
  CAPTURE(resumed.err);
  CHECK(resumed.exit_code == (shuffled ? 2 : 0));
  CHECK_THAT(resumed.err, ContainsSubstring("has 401 tokens (50 sequences for training), but ") &&
                              ContainsSubstring(" is of a run with 393 tokens (49 sequences for training)"));
  if (shuffled) CHECK(small.train("--resume --steps 3 --force" + shuffle).exit_code == 0);
}

TEST_CASE("checkpoints are written by time", "[tools][resume]") {
  const CheckpointedRun small;
  const auto run = small.train("--steps 3 --set checkpoint.every_s=1e-9");
  CAPTURE(run.err);
  REQUIRE(run.exit_code == 0);
  CHECK(lines_of(run.out, "checkpoint").size() == 3);
}

TEST_CASE("a run that cannot begin leaves the checkpoints of another one in place", "[tools][resume][refuses]") {
  const CheckpointedRun small;
  REQUIRE(small.train("--steps 2").exit_code == 0);
  const auto failed = small.train("--force --steps 1000");  // the data has 12 steps
  CHECK(failed.exit_code == 2);
  CHECK(names_in(small.folder()) == std::set<std::string>{"step-000000002"});
}

TEST_CASE("a loaded model gives only its shape to a run that is resumed", "[tools][resume]") {
  const CheckpointedRun small;
  REQUIRE(small.run("train", "--steps 1 --save " + small.path("model")).exit_code == 0);
  const std::string load = "--set 'model={\"load\": \"" + small.path("model") + "\"}'";
  const auto whole       = steps_of(small.run("train", "--json --steps 4 " + load).out);
  REQUIRE(small.train("--steps 2 " + load).exit_code == 0);
  fs::remove(small.path("model/model.safetensors"));
  const auto resumed = small.train("--resume --steps 4 " + load);
  CAPTURE(resumed.err);
  CHECK(resumed.exit_code == 0);
  CHECK(steps_of(resumed.out) == std::vector<std::string>(whole.begin() + 2, whole.end()));
}

TEST_CASE("a signal ends a run with a checkpoint, from which it goes on", "[tools][resume][jobs]") {
  const CheckpointedRun small;
  const std::vector<std::string> command{
      sg::testing::command_path(), "train",  small.config(), "--set",
      "data={\"synthetic\": 1}",   "--json", "--set",        "checkpoint.folder=" + small.folder()};
  for (const int number : {SIGINT, SIGHUP, SIGUSR1, SIGTERM}) {
    auto words = command;
    words.insert(words.end(), {"--steps", "1000000", "--resume"});
    sg::testing::JobRun job(words);
    REQUIRE(job.wait_for_text(0, "\"type\":\"step\"", a_wait));
    job.signal(0, number);
    CHECK(job.wait(a_wait) == std::vector<int>{128 + number});
    const auto written = lines_of(job.out(0), "checkpoint");
    REQUIRE(written.size() == 1);
    CHECK(written[0].at("step") == lines_of(job.out(0), "summary").at(0).at("steps"));
    CHECK_THAT(job.err(0), ContainsSubstring("interrupted after ") &&
                               ContainsSubstring("; checkpoint " + written[0].at("path").as_string()));
  }
}

TEST_CASE("logs of a run that was resumed have each step once", "[tools][resume][log]") {
  const CheckpointedRun small;
  const std::string logs = "--log " + small.path("log.csv") + " --tensorboard " + small.path("events") +
                           " --set data.validation=0.25 --set eval.every=2 ";
  REQUIRE(small.train("--steps 4 --set checkpoint.every=3 " + logs).exit_code == 0);
  fs::remove_all(small.folder() + "/step-000000004");  // as after a kill
  const auto second = small.train("--resume --steps 6 " + logs);
  CAPTURE(second.err);
  REQUIRE(second.exit_code == 0);
  std::vector<std::string> firsts;
  const std::string csv = file_bytes(small.path("log.csv"));
  for (std::size_t at = csv.find('\n') + 1; at < csv.size(); at = csv.find('\n', at) + 1) {
    const std::string line = csv.substr(at, csv.find('\n', at) - at);
    firsts.push_back(line.substr(0, line.find(',')) + (line.ends_with(',') ? "" : " eval"));
  }
  CHECK(firsts == std::vector<std::string>{"0", "1", "2 eval", "2", "3", "4 eval", "4", "5", "6 eval"});
  std::set<fs::path> files;
  for (const auto& entry : fs::directory_iterator(small.path("events"))) files.insert(entry.path());
  REQUIRE(files.size() == 2);
  const auto events = sg::testing::parse_events(file_bytes(*files.rbegin()));
  CHECK(events.at(1).session_status == 1);
  CHECK(events.at(1).step == 3);
  CHECK(events.size() == 2 + 3 + 2);
  // The loss of validation is in the lines too.
  const auto evals = lines_of(second.out, "eval");
  REQUIRE(evals.size() == 2);
  CHECK(evals[0].at("step") == 4);
  CHECK(evals[0].at("loss").as_real() > 0);
}

TEST_CASE("validation during a run has the loss of eval on the saved weights", "[tools][resume][eval]") {
  const SmallRun small;
  const std::string data = "--json --set data.validation=0.25 ";
  const auto trained     = small.run("train", data + "--set eval.every=3 --steps 3 --save " + small.path("model"));
  CAPTURE(trained.err);
  REQUIRE(trained.exit_code == 0);
  const auto during = lines_of(trained.out, "eval");
  REQUIRE(during.size() == 1);
  const auto after = small.run("eval", data + "--set 'model={\"load\": \"" + small.path("model") + "\"}'");
  CAPTURE(after.err);
  const auto lines = lines_of(after.out, "eval");
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].at("loss") == during[0].at("loss"));
  CHECK(lines[0].at("tokens") == 12 * 8);  // of 49 sequences, 12 are for validation
  CHECK(lines[0].at("tokens_left_out") == 0);
}

TEST_CASE("eval uses the data for validation that training uses", "[tools][resume][eval]") {
  const SmallRun small;
  sg::testing::write_file(small.path("other.txt"), std::string(5 * 8 + 4, 'a'));  // five sequences: a batch and a rest
  const std::string data =
      "--json --set 'eval={\"every\": 2, \"data\": {\"text\": \"" + small.path("other.txt") + "\"}}' ";
  const auto trained = small.run("train", data + "--steps 2 --save " + small.path("model"));
  CAPTURE(trained.err);
  REQUIRE(trained.exit_code == 0);
  const auto after = small.run("eval", data + "--set 'model={\"load\": \"" + small.path("model") + "\"}'");
  CAPTURE(after.err);
  const auto line = lines_of(after.out, "eval").at(0);
  CHECK(line.at("loss") == lines_of(trained.out, "eval").at(0).at("loss"));
  CHECK(line.at("steps") == 2);
  CHECK(line.at("tokens") == 5 * 8);
  CHECK(line.at("tokens_left_out") == 3);
}

TEST_CASE("if one process cannot read its data for validation, all save a checkpoint and end",
          "[tools][resume][eval][jobs]") {
  if (!sg::has_process_backend("gloo")) SKIP("this build has no Gloo");
  const CheckpointedRun small;
  // Each process has a file of its own.
  const std::string text(9 * 8 + 1, 'a');
  for (const char* rank : {"0", "1"}) {
    fs::create_directory(small.path(rank));
    sg::testing::write_file(small.path(rank) + "/eval.txt", text);
  }
  sg::testing::JobRun job(
      2, {"/bin/bash", "-c",
          "cd " + small.path("") + "/$RANK && exec " + sg::testing::command_path() + " train " + small.config() + " " +
              small.options("--set 'data={\"synthetic\": 1}' --set backend=gloo --set layout.dp=2 "
                            "--flight '' --steps 1000000 --set 'eval={\"every\": 1, \"data\": "
                            "{\"text\": \"eval.txt\"}}'")});
  REQUIRE(job.wait_for_text(0, "\"type\":\"eval\"", a_wait));
  fs::resize_file(small.path("1") + "/eval.txt", 10);
  CHECK(job.wait(a_wait) == std::vector<int>{1, 1});
  CAPTURE(job.err(0), job.err(1));
  CHECK_THAT(job.err(0), ContainsSubstring("eval after "));
  CHECK(names_in(small.folder()).size() == 1);
}

TEST_CASE("a checkpoint that cannot be written does not end the run, and the last one is an error",
          "[tools][resume][errors]") {
  if (sg::testing::sanitizer() == sg::testing::Sanitizer::thread)
    SKIP("ThreadSanitizer does not start with a limit for files");
  const CheckpointedRun small;
  // Files may have 8 KiB: a checkpoint does not fit, the log does.
  const std::string command = "ulimit -f 8; " + sg::testing::command_path() + " train " + small.config() + " " +
                              small.options("--steps 3 --set checkpoint.every=1 --log " + small.path("log.csv"));
  const auto run = run_bash(command);
  CAPTURE(run.err);
  CHECK(run.exit_code == 1);
  CHECK(steps_of(run.out).size() == 3);
  CHECK_THAT(run.err, ContainsSubstring("checkpoint after 1 step: ") && ContainsSubstring("; the run goes on") &&
                          ContainsSubstring("checkpoint after 3 steps: "));
  CHECK(lines_of(run.out, "checkpoint").at(0).contains("error"));
  CHECK(lines_of(run.out, "summary").at(0).at("steps") == 3);
  CHECK(names_in(small.folder()).empty());
  CHECK_THAT(file_bytes(small.path("log.csv")), ContainsSubstring("\n2,"));
  // A last checkpoint that was under way is tried once more.
  const auto last = run_bash("ulimit -f 8; " + sg::testing::command_path() + " train " + small.config() + " " +
                             small.options("--steps 3 --set checkpoint.every=3"));
  CHECK(last.exit_code == 1);
  CHECK(lines_of(last.out, "checkpoint").size() == 2);
  // With room, the run goes on from the start.
  CHECK(small.train("--resume --steps 1").exit_code == 0);
}

TEST_CASE("a log that cannot be written costs neither the run nor its model", "[tools][resume][errors]") {
  const CheckpointedRun small;
  const auto run = small.train("--steps 3 --log /dev/full --force --save " + small.path("model"));
  CAPTURE(run.err);
  CHECK(run.exit_code == 1);
  CHECK(fs::exists(small.path("model/model.safetensors")));
  CHECK(names_in(small.folder()).contains("step-000000003"));
  CHECK_THAT(run.err, ContainsSubstring("/dev/full: cannot be written"));
}

TEST_CASE("gradients that cannot be written cost neither the run nor its model", "[tools][resume][errors]") {
  const CheckpointedRun small;
  const auto run = small.train("--steps 3 --dump-grads /dev/full --force --save " + small.path("model"));
  CAPTURE(run.err);
  CHECK(run.exit_code == 1);
  CHECK(steps_of(run.out).size() == 3);
  CHECK(fs::exists(small.path("model/model.safetensors")));
  CHECK(names_in(small.folder()).contains("step-000000003"));
  CHECK_THAT(run.err, ContainsSubstring("/dev/full") && ContainsSubstring("the run goes on without the gradients"));
}

TEST_CASE("two runs do not write to one folder of checkpoints", "[tools][resume][jobs]") {
  const CheckpointedRun small;
  sg::testing::JobRun job({sg::testing::command_path(), "train", small.config(), "--set", "data={\"synthetic\": 1}",
                           "--json", "--set", "checkpoint.folder=" + small.folder(), "--steps", "1000000"});
  REQUIRE(job.wait_for_text(0, "\"type\":\"step\"", a_wait));
  const auto second = small.train("--resume --steps 1");
  CHECK(second.exit_code == 2);
  CHECK_THAT(second.err, ContainsSubstring("another run is writing to it"));
  job.signal(0, SIGTERM);
  CHECK(job.wait(a_wait) == std::vector<int>{128 + SIGTERM});
}

TEST_CASE("export writes the weights of a checkpoint as --save does", "[tools][export]") {
  const CheckpointedRun small;
  REQUIRE(
      small.train("--steps 2 --set layout.dp=2 --set shard.strategy=full --save " + small.path("saved")).exit_code ==
      0);
  const auto exported = run_stepgraph("export " + small.folder() + " " + small.path("exported") + " --json");
  CAPTURE(exported.err);
  REQUIRE(exported.exit_code == 0);
  CHECK(json_lines(exported.out).at(0).at("step") == 2);
  const auto loss = [&](const std::string& model) {
    const auto run = small.run("eval", "--json --steps 2 --set 'model={\"load\": \"" + small.path(model) + "\"}'");
    CAPTURE(run.err);
    REQUIRE(run.exit_code == 0);
    return json_lines(run.out).at(0).at("loss");
  };
  CHECK(loss("exported") == loss("saved"));
  REQUIRE(run_stepgraph("export " + small.folder() + "/step-000000002 " + small.path("half") +
                        " --dtype bf16 --shard-size 8KiB")
              .exit_code == 0);
  CHECK(fs::exists(small.path("half/model.safetensors.index.json")));
  CHECK(std::abs(loss("half").as_real() - loss("saved").as_real()) < 0.05);
  CHECK_THAT(file_bytes(small.path("half/config.json")), ContainsSubstring("bfloat16"));
  CHECK(run_stepgraph("export " + small.path("nowhere") + " " + small.path("x")).exit_code == 2);
  // The same again, over files of stepgraph's own.
  CHECK(run_stepgraph("export " + small.folder() + " " + small.path("half") + " --dtype bf16 --shard-size 8KiB")
            .exit_code == 0);
  for (const std::string& target : {small.folder(), small.folder() + "/step-000000002"}) {
    const auto into = run_stepgraph("export " + small.folder() + " " + target);
    CHECK(into.exit_code == 2);
    CHECK_THAT(into.err, ContainsSubstring("holds checkpoints (another folder for the model)"));
  }
  const auto loaded = small.run("eval", "--set 'model={\"load\": \"" + small.folder() + "\"}'");
  CHECK(loaded.exit_code == 2);
  CHECK_THAT(loaded.err, ContainsSubstring("the folder holds checkpoints") && ContainsSubstring("stepgraph export"));
}

TEST_CASE("export of a folder writes the newest checkpoint that is whole", "[tools][export][errors]") {
  const CheckpointedRun small;
  REQUIRE(small.train("--steps 2 --set checkpoint.every=1").exit_code == 0);
  const std::string weights = small.folder() + "/step-000000002/rank-00000.safetensors";
  std::uint64_t header      = 0;
  std::memcpy(&header, file_bytes(weights).data(), sizeof header);
  flip_byte(weights, fs::file_size(weights) - sizeof header - header);  // the first byte of the first weight
  const auto older = run_stepgraph("export " + small.folder() + " " + small.path("older") + " --json");
  CAPTURE(older.err);
  REQUIRE(older.exit_code == 0);
  CHECK(json_lines(older.out).at(0).at("step") == 1);
  CHECK_THAT(older.err, ContainsSubstring("step-000000002") && ContainsSubstring("is damaged"));
  const auto named = run_stepgraph("export " + small.folder() + "/step-000000002 " + small.path("x"));
  CHECK(named.exit_code == 2);
  CHECK_FALSE(fs::exists(small.path("x")));
}

TEST_CASE("export copies the tokenizer of the model that the run began with", "[tools][export]") {
  const CheckpointedRun small;
  REQUIRE(small.run("train", "--steps 1 --save " + small.path("model")).exit_code == 0);
  for (const char* name : {"tokenizer.json", "merges.txt", "notes.txt"})
    sg::testing::write_file(small.path("model") + "/" + name, name);
  REQUIRE(small.train("--steps 1 --set 'model={\"load\": \"" + small.path("model") + "\"}'").exit_code == 0);
  const auto exported = run_stepgraph("export " + small.folder() + " " + small.path("exported"));
  CAPTURE(exported.err);
  REQUIRE(exported.exit_code == 0);
  CHECK(names_in(small.path("exported")) ==
        std::set<std::string>{"config.json", "merges.txt", "model.safetensors", "tokenizer.json"});
  fs::remove_all(small.path("model"));
  CHECK(run_stepgraph("export " + small.folder() + " " + small.path("again")).exit_code == 0);
}

TEST_CASE("inspect lists checkpoints, folders of them, models and files", "[tools][export]") {
  const CheckpointedRun small;
  REQUIRE(small.train("--steps 2 --set checkpoint.every=1 --save " + small.path("saved")).exit_code == 0);
  const std::string one = small.folder() + "/step-000000001";
  flip_byte(one + "/rank-00000.safetensors", 5);
  const auto inspected = [](const std::string& arguments) {
    const auto run = run_stepgraph("inspect " + arguments + " --json");
    CAPTURE(run.err);
    REQUIRE(run.exit_code == 0);
    return json_lines(run.out);
  };
  const auto checked = run_stepgraph("inspect " + small.folder() + " --check --json");
  CHECK(checked.exit_code == 1);
  CHECK_THAT(checked.err, ContainsSubstring("1 checkpoint is not whole"));
  const auto all = json_lines(checked.out);
  REQUIRE(all.size() == 2);
  CHECK(all[0].at("step") == 2);
  CHECK_FALSE(all[0].contains("problem"));
  CHECK(all[1].contains("problem"));
  const auto checkpoint = inspected(small.folder() + "/step-000000002 --check");
  CHECK(checkpoint.at(0).at("type") == "checkpoint");
  CHECK(checkpoint.at(0).at("position") == 2 * checkpoint.at(0).at("config").at("batch").at("global").as_integer());
  CHECK(checkpoint.at(0).at("states").size() == 3);
  CHECK(checkpoint.size() == 1 + static_cast<std::size_t>(checkpoint.at(0).at("tensors").as_integer()));
  CHECK(run_stepgraph("inspect " + one + " --check").exit_code == 2);
  CHECK(run_stepgraph("inspect " + one).exit_code == 0);
  for (const std::string& model : {small.path("saved"), small.path("saved/model.safetensors")}) {
    const auto lines = inspected(model);
    CHECK(lines.at(0).at("type") == "model");
    CHECK(lines.at(1).at("dtype") == "F32");
    CHECK(lines.at(0).at("parameters") == checkpoint.at(0).at("parameters"));
  }
  CHECK(run_stepgraph("inspect " + small.path("")).exit_code == 2);
  CHECK(run_stepgraph("inspect " + small.path("nowhere")).exit_code == 2);
}
