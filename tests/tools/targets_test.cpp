// Output files of commands: checked before the work, written after it.
#include <sys/stat.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "tests/support/command_run.hpp"
#include "tests/support/paths.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::json_lines;
using sg::testing::SmallRun;

namespace {

sg::testing::Outcome bash(const std::string& script) {
  return sg::testing::run_command("bash -c \"$(cat <<'END'\n" + script + "\nEND\n)\"");
}

// Trains without end, runs `meanwhile` after some steps, and interrupts.
sg::testing::Outcome interrupted_run(const SmallRun& small, const std::string& more, const std::string& meanwhile) {
  return bash(sg::testing::command_path() + " train " + small.config() +
              " --json --set 'data={\"synthetic\": 1}' --steps 1000000 " + more + " > " + small.path("out") +
              " &\nwhile kill -0 $! && ! grep -q '\"step\":2,' " + small.path("out") + "; do sleep 0.05; done\n" +
              meanwhile + "\nkill -INT $!\nwait $!");
}

}  // namespace

TEST_CASE("a model is saved even if the reader of stdout has gone", "[tools][train]") {
  const SmallRun small;
  for (const std::string json : {"", "--json"}) {
    const std::string kept = small.path("kept" + json);
    const auto outcome = bash("exec 3> >(true); wait $!\n" + sg::testing::command_path() + " train " + small.config() +
                              " " + json + " --steps 1 --save " + kept + " >&3");
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
  CHECK(outcome.exit_code != 0);
  CHECK_THAT(outcome.err, ContainsSubstring("traces/t.json"));
  CHECK(std::filesystem::exists(small.path("kept/model.safetensors")));
}

TEST_CASE("a schedule file is not read again at the end of a run", "[tools][train]") {
  const SmallRun small;
  const std::string schedule = small.path("s.csv");
  REQUIRE(sg::testing::run_stepgraph("schedule --kind 1f1b --stages 2 --microbatches 4 --csv " + schedule).exit_code ==
          0);
  const std::string layout = " --set layout.pp=2 --trace " + small.path("t.json");
  const auto outcome       = interrupted_run(small, "--set pipeline.schedule=" + schedule + layout, "rm " + schedule);
  CHECK(outcome.exit_code == 1);
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
  REQUIRE(mkfifo(small.path("pipe").c_str(), 0600) == 0);
  std::filesystem::create_directories(small.path("model/model.safetensors"));
  const std::string long_name(250, 'x'), longer_name(300, 'x');
  for (const auto& [command, more, why] :
       sg::testing::some_of(std::vector<std::tuple<std::string, std::string, std::string>>{
           {"train", "--trace " + small.path("pipe"), "pipe': is not a regular file (a file, or a new name)"},
           {"train", "--trace /proc/t.json", "--trace '/proc/t.json': cannot be written: "},
           {"train", "--trace " + small.path(long_name), "xxx': cannot be written: File name too long"},
           {"train", "--trace -", "--trace -: stdout is for the results (a file name)"},
           {"train", "--dump-grads /dev/null", "--dump-grads '/dev/null': is not a regular file"},
           {"train", "--dump-grads /proc/g.safetensors", "--dump-grads '/proc/g.safetensors': cannot be written: "},
           {"train", "--dump-grads " + small.path(longer_name + "/x"), "': there is no folder "},
           {"train", "--dump-grads -", "--dump-grads -: stdout is for the results (a file name)"},
           {"train", "--save " + small.path("model"), "model/model.safetensors': is a folder (a file name)"},
           {"train", "--save /proc", "--save '/proc/config.json': cannot be written: "},
           {"train", "--save " + small.path(longer_name), "': the folder cannot be created: File name too long"},
           {"train", "--save -", "--save -: stdout is for the results (a folder name)"},
           {"graph", "--svg " + small.path("pipe"), "pipe': is not a regular file"},
           {"graph", "--dot " + small.path(longer_name), "': cannot be written: File name too long"},
       })) {
    CAPTURE(command, more);
    const auto outcome = small.run(command, more);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph " + command) && ContainsSubstring(why));
  }
  CHECK(std::filesystem::is_fifo(small.path("pipe")));
  for (const auto& entry : std::filesystem::directory_iterator(small.path("")))
    CHECK(entry.path().extension() != ".partial");
}
