#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "graphs/config/config.hpp"
#include "tools/stepgraph/command_line.hpp"

// Arguments of all commands that read a config.
namespace stepgraph::cli {

struct ConfigOptions {
  std::string path;
  std::vector<std::string> overrides;
  std::optional<int> threads;
  std::optional<std::string> devices;
  bool json = false;
};
// Adds CONFIG, --set and --json, and --threads for commands that run steps.
void add_config_options(Command command, ConfigOptions& options, bool runs);
void add_devices_option(Command command, std::optional<std::string>& devices);  // --devices
// Of --devices: "0,1", or "all", which is an empty list. Throws Error(config).
[[nodiscard]] std::vector<int> parse_devices(std::string_view text);
[[nodiscard]] Config read(const ConfigOptions& options);
// Warns on stderr if there are more threads than cores.
void warn_about_threads(int threads);

}  // namespace stepgraph::cli
