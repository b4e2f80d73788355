#include "tests/support/processes/command_run.hpp"

#include <sstream>

#include "engine/base/error.hpp"

namespace stepgraph::testing {

Outcome run_stepgraph(const std::string& arguments) {
  return run_command(str(command_path(), " ", arguments));
}

Outcome run_bash(const std::string& script) {
  return run_command("bash -c \"$(cat <<'END'\n" + script + "\nEND\n)\"");
}

std::vector<JsonValue> json_lines(const std::string& text) {
  std::vector<JsonValue> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(parse_json(line));
  return lines;
}

SmallRun::SmallRun() {
  std::string text;
  for (int i = 0; text.size() < 4 * 8 * 12 + 9; ++i) text += str("line ", i * i, "\n");
  text.resize(4 * 8 * 12 + 9);
  folder_.put("text.txt", text);
  folder_.put(
      "run.json",
      json_line(
          {{"model", {{"kind", "gpt2"}, {"layers", 2}, {"width", 16}, {"heads", 2}, {"context", 8}, {"vocab", 256}}},
           {"data", {{"text", path("text.txt")}}},
           {"batch", {{"global", 4}, {"micro", 1}, {"seq", 8}}},
           {"optimizer", {{"lr", 0.01}}},
           {"threads", 1}}));
}

Outcome SmallRun::run(const std::string& command, const std::string& more) const {
  return run_stepgraph(command + " " + config() + " " + more);
}

}  // namespace stepgraph::testing
