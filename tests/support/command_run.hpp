#pragma once
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/process.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace stepgraph::testing {

// Disables the leak check at exit, which takes seconds in the asan build (tests/tools/leaks_test.cpp covers it).
[[nodiscard]] inline Outcome run_stepgraph(const std::string& arguments) {
  return run_command(str("ASAN_OPTIONS=detect_leaks=0 ", command_path(), " ", arguments));
}

[[nodiscard]] inline std::vector<nlohmann::json> json_lines(const std::string& text) {
  std::vector<nlohmann::json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

// Every fourth case under sanitizers.
template <class Case>
[[nodiscard]] std::vector<Case> some_of(const std::vector<Case>& cases) {
  std::vector<Case> some;
  for (std::size_t i = 0; i < cases.size(); i += static_cast<std::size_t>(scale())) some.push_back(cases[i]);
  return some;
}

// A folder with a small run: `run.json`, a model of two layers on `text.txt`, which has 12 steps and some extra bytes.
class SmallRun {
 public:
  SmallRun() {
    std::string text;
    for (int i = 0; text.size() < 4 * 8 * 12 + 9; ++i) text += "line " + std::to_string(i * i) + "\n";
    text.resize(4 * 8 * 12 + 9);
    folder_.put("text.txt", text);
    folder_.put(
        "run.json",
        nlohmann::json(
            {{"model", {{"kind", "gpt2"}, {"layers", 2}, {"width", 16}, {"heads", 2}, {"context", 8}, {"vocab", 256}}},
             {"data", {{"text", path("text.txt")}}},
             {"batch", {{"global", 4}, {"micro", 1}, {"seq", 8}}},
             {"optimizer", {{"lr", 0.01}}},
             {"threads", 1}})
            .dump());
  }

  [[nodiscard]] std::string path(const std::string& name) const { return (folder_ / name).string(); }
  [[nodiscard]] std::string config() const { return path("run.json"); }
  // `stepgraph COMMAND run.json MORE`.
  [[nodiscard]] Outcome run(const std::string& command, const std::string& more = {}) const {
    return run_stepgraph(command + " " + config() + " " + more);
  }

 private:
  TempFolder folder_;
};

}  // namespace stepgraph::testing
