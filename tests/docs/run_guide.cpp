#include <catch2/catch_test_macros.hpp>
#include <cstdlib>
#include <filesystem>

#include "graphs/predict/calibration.hpp"
#include "tests/docs/block.hpp"
#include "tests/docs/guide.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/process.hpp"
#include "tests/support/temp_folder.hpp"

namespace fs = std::filesystem;

namespace stepgraph::testing {
namespace {

// The folder in which the blocks and commands of a guide run. It is the current folder while the object lives.
class GuideFolder {
 public:
  explicit GuideFolder(const Guide& guide) : before_(fs::current_path()) {
    for (const Block& block : guide.blocks) {
      if (block.file) folder_.put(*block.file, block.text);
    }
    fs::create_symlink(fs::path(source_path()) / "README.md", folder_ / "README.md");
    setenv("XDG_CACHE_HOME", (folder_ / "cache").c_str(), 1);
    fs::current_path(folder_.path());
  }
  ~GuideFolder() { fs::current_path(before_); }
  GuideFolder(const GuideFolder&)            = delete;
  GuideFolder& operator=(const GuideFolder&) = delete;

 private:
  fs::path before_;
  TempFolder folder_;
};

// Writes a calibration, because `simulate` would otherwise measure this machine for up to a minute. Products take a
// millisecond per megaflop.
void put_calibration() {
  Calibration machine{.host = host_name(), .cores = num_cores(), .threads = num_cores()};
  for (const char* op : {"linear", "linear_gelu", "linear_input_gradient", "linear_weight_gradient"})
    machine.ops[op] = {{1e6, 1e4, 1e-3, 1e-3}};
  machine.ops["adamw"] = {{1e6, 1e6, 1e-9, 1e-9}};
  save_calibration(machine, calibration_path(num_cores()));
}

void run_shown(const Command& command) {
  static const std::string name = "stepgraph ";
  CAPTURE(command.text);
  REQUIRE(command.text.starts_with(name));
  if (command.text.starts_with(name + "simulate ") && !fs::exists(calibration_path(num_cores()))) put_calibration();
  const Outcome outcome = run_command(command_path() + " " + command.text.substr(name.size()));
  CAPTURE(outcome.out, outcome.err);
  REQUIRE(outcome.exit_code == command.exit_code);
  if (!command.expected.empty())
    CHECK(output_matches(command.expected, split_lines(command.exit_code == 0 ? outcome.out : outcome.err)));
}

}  // namespace

void run_block(const std::string& guide, void (*block)()) {
  const GuideFolder folder(read_guide(source_path(), guide));
  REQUIRE_NOTHROW(block());
}

void run_commands(const std::string& path) {
  const Guide guide = read_guide(source_path(), path);
  const GuideFolder folder(guide);
  for (const Block& block : guide.blocks) {
    if (block.language != "console" || !block.runs()) continue;
    CAPTURE(path, block.first_line);
    for (const Command& command : commands_of(block)) run_shown(command);
  }
}

}  // namespace stepgraph::testing
