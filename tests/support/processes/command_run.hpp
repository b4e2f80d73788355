#pragma once
#include <string>
#include <vector>

#include "graphs/files/json_value.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/process.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace stepgraph::testing {

// Runs `stepgraph ARGUMENTS`, without the search for leaks that takes seconds at the end of each process of the asan
// build (tests/tools/stepgraph/leaks_test.cpp has its own).
[[nodiscard]] Outcome run_stepgraph(const std::string& arguments);

// Runs a script of bash.
[[nodiscard]] Outcome run_bash(const std::string& script);

// The JSON values of a text that has one in each line.
[[nodiscard]] std::vector<JsonValue> json_lines(const std::string& text);

// Every fourth case in sanitized builds, else all.
template <class Case>
[[nodiscard]] std::vector<Case> some_of(const std::vector<Case>& cases) {
  std::vector<Case> some;
  for (std::size_t i = 0; i < cases.size(); i += static_cast<std::size_t>(scale())) some.push_back(cases[i]);
  return some;
}

// A folder with a small run: `run.json`, a model of two layers on `text.txt`, which has 12 steps and some extra bytes.
class SmallRun {
 public:
  SmallRun();

  [[nodiscard]] std::string path(const std::string& name) const { return (folder_ / name).string(); }
  [[nodiscard]] std::string config() const { return path("run.json"); }
  // `stepgraph COMMAND run.json MORE`.
  [[nodiscard]] Outcome run(const std::string& command, const std::string& more = {}) const;

 private:
  TempFolder folder_;
};

}  // namespace stepgraph::testing
