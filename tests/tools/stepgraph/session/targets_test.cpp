// Output files of commands: checked before the work, written after it.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>
#include <fstream>

#include "graphs/predict/calibration.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::json_lines;
using sg::testing::SmallRun;

namespace {

// Trains without end, runs `meanwhile` after some steps, and interrupts.
sg::testing::Outcome interrupted_run(const SmallRun& small, const std::string& more, const std::string& meanwhile) {
  return sg::testing::run_bash(sg::testing::command_path() + " train " + small.config() +
                               " --json --set 'data={\"synthetic\": 1}' --steps 1000000 " + more + " > " +
                               small.path("out") + " &\nwhile kill -0 $! && ! grep -q '\"step\":2,' " +
                               small.path("out") + "; do sleep 0.05; done\n" + meanwhile + "\nkill -INT $!\nwait $!");
}

}  // namespace

TEST_CASE("a model is saved even if the reader of stdout has gone", "[tools][train]") {
  const SmallRun small;
  for (const std::string json : {"", "--json"}) {
    const std::string kept = small.path("kept" + json);
    const auto outcome = sg::testing::run_bash("exec 3> >(true); wait $!\n" + sg::testing::command_path() + " train " +
                                               small.config() + " " + json + " --steps 1 --save " + kept + " >&3");
    CHECK(outcome.exit_code == 0);
    CHECK(outcome.err.empty());
    CHECK(std::filesystem::exists(kept + "/model.safetensors"));
  }
}

TEST_CASE("a model is saved even if the trace cannot be written", "[tools][train]") {
  const SmallRun small;
  std::filesystem::create_directory(small.path("traces"));
  const auto outcome =
      interrupted_run(small, "--save " + small.path("kept") + " --trace " + small.path("traces/t.json"),
                      "rmdir " + small.path("traces"));
  CHECK(outcome.exit_code == 130);
  CHECK_THAT(outcome.err, ContainsSubstring("interrupted after ") && ContainsSubstring("; model saved in ") &&
                              ContainsSubstring("traces/t.json: cannot be created"));
  CHECK(std::filesystem::exists(small.path("kept/model.safetensors")));
  CHECK(json_lines(sg::testing::file_bytes(small.path("out"))).back().at("type") == "summary");
}

TEST_CASE("a run whose only failure is its trace exits with the code of that failure", "[tools][train]") {
  const SmallRun small;
  const auto outcome = small.run("train", "--steps 1 --save " + small.path("kept") + " --trace /dev/full");
  CHECK(outcome.exit_code == 3);
  CHECK_THAT(outcome.err, ContainsSubstring("/dev/full: cannot be written: No space left on device") &&
                              ContainsSubstring("; model saved in " + small.path("kept")));
  // The loss is the more important failure.
  const auto both = small.run("train", "--set optimizer.lr=1e30 --set optimizer.kind=sgd --trace /dev/full");
  CHECK(both.exit_code == 1);
  CHECK_THAT(both.err, ContainsSubstring("step 1: loss ") && ContainsSubstring("; /dev/full: cannot be written"));
}

TEST_CASE("a schedule file is not read again at the end of a run", "[tools][train]") {
  const SmallRun small;
  const std::string schedule = small.path("s.csv");
  REQUIRE(sg::testing::run_stepgraph("schedule --kind 1f1b --stages 2 --microbatches 4 --csv " + schedule).exit_code ==
          0);
  const std::string layout = " --set layout.pp=2 --trace " + small.path("t.json");
  const auto outcome       = interrupted_run(small, "--set pipeline.schedule=" + schedule + layout, "rm " + schedule);
  CHECK(outcome.exit_code == 130);
  CHECK_THAT(outcome.err, ContainsSubstring("interrupted after "));
  const auto lines = json_lines(sg::testing::file_bytes(small.path("out")));
  REQUIRE(lines.size() > 3);
  const auto& last = lines[lines.size() - 2];
  REQUIRE(last.at("type") == "last_step");
  // The times vary on a busy machine, so the test only checks that the line is there.
  CHECK(last.at("bubble_rate").as_real() >= 0);
  CHECK(last.at("bubble_rate").as_real() < 1);
}

TEST_CASE("files that cannot be written are refused before any work", "[tools][train][refuses]") {
  const SmallRun small;
  std::filesystem::create_directories(small.path("model/model.safetensors"));
  std::filesystem::create_directory(small.path("folder"));
  const std::string long_name(250, 'x'), longer_name(300, 'x');
  for (const auto& [command, more, why] :
       sg::testing::some_of(std::vector<std::tuple<std::string, std::string, std::string>>{
           {"train", "--trace " + small.path("folder"), "folder: is a folder (a file, or a new name)"},
           {"train", "--trace /proc/t.json", "--trace /proc/t.json: cannot be created: "},
           {"train", "--trace " + small.path(long_name), "xxx: cannot be created: File name too long"},
           {"train", "--trace -", "--trace -: stdout is for the results (a file name)"},
           {"train", "--dump-grads /proc/g.safetensors", "--dump-grads /proc/g.safetensors: cannot be created: "},
           {"train", "--dump-grads " + small.path(longer_name + "/x"), "': there is no folder "},
           {"train", "--dump-grads -", "--dump-grads -: stdout is for the results (a file name)"},
           {"train", "--save " + small.path("model"), "model': model.safetensors in it is a folder (a file)"},
           {"train", "--save /proc", "--save /proc: is a mount point, which cannot be replaced at once"},
           {"train", "--save /proc/model", "--save /proc/model: cannot be created"},
           {"train", "--save " + small.path(longer_name), "File name too long"},
           {"train", "--save -", "--save -: stdout is for the results (a folder name)"},
           {"train", "--save ''", "--save '': is empty (a folder name)"},
           {"graph", "--svg " + small.path("folder"), "folder: is a folder"},
           {"graph", "--dot " + small.path(longer_name), ": cannot be created: File name too long"},
       })) {
    CAPTURE(command, more);
    const auto outcome = small.run(command, more);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph " + command) && ContainsSubstring(why));
  }
  for (const auto& entry : std::filesystem::directory_iterator(small.path("")))
    CHECK(entry.path().string().find(".partial") == std::string::npos);
}

namespace {

// An option that writes a file, with the rest of its command.
struct FileOption {
  std::string command, option;
};
const std::vector<FileOption> file_options = {{"train CONFIG --steps 1", "--trace"},
                                              {"train CONFIG --steps 1", "--dump-grads"},
                                              {"graph CONFIG", "--dot"},
                                              {"graph CONFIG", "--svg"},
                                              {"simulate CONFIG --cluster CLUSTER", "--trace"},
                                              {"schedule --kind 1f1b --stages 2 --microbatches 4", "--csv"},
                                              {"schedule --kind 1f1b --stages 2 --microbatches 4", "--svg"},
                                              {"bench copy --backend loopback --dry-run", "--trace"}};

sg::testing::Outcome run(const SmallRun& small, const FileOption& what, const std::string& path,
                         const std::string& more = "") {
  std::string command = what.command;
  if (const auto at = command.find("CONFIG"); at != command.npos) command.replace(at, 6, small.config());
  if (const auto at = command.find("CLUSTER"); at != command.npos) {
    sg::testing::write_file(small.path("cluster.json"), R"({"preset": "a100", "nodes": 1})");
    command.replace(at, 7, small.path("cluster.json"));
  }
  return sg::testing::run_stepgraph(command + " " + what.option + "=" + path + " " + more);
}

}  // namespace

TEST_CASE("only files that stepgraph wrote are replaced, unless --force is given", "[tools][refuses]") {
  const SmallRun small;
  for (const FileOption& what : sg::testing::some_of(file_options)) {
    CAPTURE(what.command, what.option);
    const std::string path = small.path("out");
    std::ofstream(path) << "my notes\n";
    const auto refused = run(small, what, path);
    CHECK(refused.exit_code == 2);
    CHECK(refused.out.empty());
    CHECK_THAT(refused.err, ContainsSubstring(what.option + " '" + path +
                                              "': has no mark of stepgraph (a new name, "
                                              "or --force to replace it)"));
    CHECK(sg::testing::file_bytes(path) == "my notes\n");
    CHECK(run(small, what, path, "--force").exit_code == 0);
    const std::string written = sg::testing::file_bytes(path);
    CHECK(written.size() > 20);
    // The same command again, and onto an empty file.
    CHECK(run(small, what, path).exit_code == 0);
    std::ofstream(path, std::ios::trunc).close();
    CHECK(run(small, what, path).exit_code == 0);
    CHECK(sg::testing::file_bytes(path).size() > 20);
    CHECK(run(small, what, "/dev/null").exit_code == 0);
    std::filesystem::remove(path);
  }
}

TEST_CASE("files go to a pipe as they do to a file", "[tools][train]") {
  const SmallRun small;
  const std::string pipe = small.path("pipe");
  const auto piped       = sg::testing::run_bash("mkfifo " + pipe + "\n" + sg::testing::command_path() + " graph " +
                                                 small.config() + " --dot " + pipe + " &\ncat " + pipe + "\nwait $!");
  CHECK(piped.exit_code == 0);
  CHECK_THAT(piped.out, ContainsSubstring("digraph stepgraph {"));
  CHECK(std::filesystem::is_fifo(pipe));
}

TEST_CASE("a link is written through, and /dev/stdout is stdout", "[tools][graph]") {
  const SmallRun small;
  std::filesystem::create_symlink("real.dot", small.path("link.dot"));
  for (int i = 0; i < 2; ++i) {
    CHECK(small.run("graph", "--dot " + small.path("link.dot")).exit_code == 0);
    CHECK(std::filesystem::is_symlink(small.path("link.dot")));
    CHECK_THAT(sg::testing::file_bytes(small.path("real.dot")), ContainsSubstring("digraph stepgraph {"));
  }
  const auto printed = small.run("graph", "--dot /dev/stdout");
  CHECK(printed.exit_code == 0);
  CHECK_THAT(printed.out, ContainsSubstring("digraph stepgraph {") && ContainsSubstring(" nodes, "));
  // A file that stdout goes to is not replaced.
  const auto redirected = sg::testing::run_bash("(echo before; " + sg::testing::command_path() + " graph " +
                                                small.config() + " --dot /dev/stdout) > " + small.path("all"));
  CHECK(redirected.exit_code == 0);
  CHECK_THAT(sg::testing::file_bytes(small.path("all")),
             ContainsSubstring("before\n") && ContainsSubstring("digraph stepgraph {"));
}

TEST_CASE("a file name that begins with a dash is a file name", "[tools][graph]") {
  const SmallRun small;
  const auto outcome =
      sg::testing::run_bash("cd " + small.path("") + " && " + sg::testing::command_path() + " graph " + small.config() +
                            " --svg=-Tpng.svg --dot=-o.dot && " + sg::testing::command_path() + " train " +
                            small.config() + " --steps 1 --save=--model");
  CAPTURE(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK_THAT(sg::testing::file_bytes(small.path("-Tpng.svg")), ContainsSubstring("<svg"));
  CHECK_THAT(sg::testing::file_bytes(small.path("-o.dot")), ContainsSubstring("digraph"));
  CHECK(std::filesystem::exists(small.path("--model/model.safetensors")));
}

TEST_CASE("simulate --calibrate replaces only calibrations", "[tools][refuses]") {
  const SmallRun small;
  const auto outcome = small.run("simulate", "--calibrate --machine " + small.path("text.txt"));
  CHECK(outcome.exit_code == 2);
  CHECK_THAT(outcome.err, ContainsSubstring("--calibrate: would replace a file that is no calibration") &&
                              ContainsSubstring("--force"));
}

TEST_CASE("simulate --calibrate measures again where its file exists or is damaged", "[tools]") {
  const SmallRun small;
  const std::string machine   = small.path("machine.json");
  const std::string arguments = " --calibrate --threads 1 --machine " + machine;
  sg::save_calibration({.host = sg::host_name()}, machine);
  const std::string whole = sg::testing::file_bytes(machine);
  for (const bool damaged : {false, true}) {
    CAPTURE(damaged);
    if (damaged) sg::testing::write_file(machine, whole.substr(0, whole.size() / 2));
    // A measurement takes long: this one is killed when it begins.
    const auto begins = sg::testing::run_bash("cd " + small.path("") + " && rm -f lines && mkfifo lines && { " +
                                              sg::testing::command_path() + " simulate " + small.config() + arguments +
                                              " 2>lines & read -r line <lines; kill -KILL $!; " + "echo \"$line\"; }");
    CHECK_THAT(begins.out, ContainsSubstring("simulate: measuring this machine with 1 thread"));
  }
  if (!sg::testing::runs_all()) return;  // takes 40 s; other tests measure with small models
  const auto outcome = small.run("simulate", arguments);
  CAPTURE(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK_FALSE(sg::load_calibration(machine).ops.empty());
}
