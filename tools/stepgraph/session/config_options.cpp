#include "tools/stepgraph/session/config_options.hpp"

#include <algorithm>
#include <charconv>
#include <iostream>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/predict/calibration.hpp"

namespace stepgraph::cli {

void add_config_options(Command command, ConfigOptions& options, bool runs) {
  command.option("CONFIG", options.path, "The config, a JSON file; file names in it are relative to the current folder")
      .required();
  command.repeated(
      "--set", options.overrides,
      "path=value: change a key of the config, as in layout.dp=2 or 'data={\"text\": \"FILE\"}'. A value that is "
      "not JSON is a string. May be repeated");
  if (runs)
    command.option("--threads", options.threads, "Compute threads, instead of the config's; 0 uses all cores")
        .between(0, 1024);
  command.flag("--json", options.json, "Print JSON lines and nothing else");
}

void add_devices_option(Command command, std::optional<std::string>& devices) {
  command.option(
      "--devices", devices,
      "With backend cuda: the GPUs of the ranks, as in 0,1, or all (default: the config's, or 0). With nccl: those of "
      "the processes of this machine (default: all); 0,0 lets two processes share one");
}

std::vector<int> parse_devices(std::string_view text) {
  std::vector<int> devices;
  if (text == "all") return devices;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end       = std::min(text.find(',', begin), text.size());
    const std::string_view item = text.substr(begin, end - begin);
    int number                  = -1;
    const auto [stop, error]    = std::from_chars(item.data(), item.data() + item.size(), number);
    if (error != std::errc{} || stop != item.data() + item.size() || number < 0)
      throw Error(ErrorKind::config, str("--devices: '", text, "' is no list of devices (as in 0,1; or all)"));
    devices.push_back(number);
    begin = end + 1;
  }
  return devices;
}

Config read(const ConfigOptions& options) {
  std::vector<std::string> overrides = options.overrides;
  if (options.devices) {
    const std::vector<int> devices = parse_devices(*options.devices);
    overrides.push_back(devices.empty() ? "devices=all"
                                        : str("devices=[", join_text(devices, ",", [](int d) { return str(d); }), "]"));
  }
  Config config = read_config(options.path, overrides);
  if (options.threads) config.threads = *options.threads;
  return config;
}

void warn_about_threads(int threads) {
  if (threads > num_cores())
    std::cerr << str("stepgraph: ", threads, " threads are more than the ", num_cores(),
                     num_cores() == 1 ? " core" : " cores", " of this machine (", num_cores(), " uses all of them)\n");
}

}  // namespace stepgraph::cli
