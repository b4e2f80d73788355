#include "graphs/predict/calibration.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <system_error>
#include <thread>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "graphs/files/files.hpp"
#include "graphs/files/json_value.hpp"

namespace stepgraph {
namespace {

constexpr int format_version          = 1;
constexpr std::int64_t most_bytes     = 16 << 20;
constexpr double streaming_intensity  = 4;  // flops per byte; ops below it are limited by memory
constexpr std::string_view what_to_do = "(a file that `stepgraph simulate --calibrate` wrote)";

using Kind = JsonValue::Kind;

[[noreturn]] void refuse(std::string_view why) { throw Error(ErrorKind::config, str(why, " ", what_to_do)); }

const JsonValue& need(const JsonValue& object, std::string_view key) {
  const JsonValue* const found = object.find(key);
  if (found == nullptr) refuse(str("has no \"", key, "\""));
  return *found;
}

double number(const JsonValue& value, std::string_view what) {
  if (value.kind != Kind::integer && value.kind != Kind::real)
    refuse(str(what, ": is ", excerpt(value), ", not a number"));
  return value.number;
}

int count(const JsonValue& object, std::string_view key) {
  const JsonValue& value = need(object, key);
  if (value.kind != Kind::integer || value.number < 1 || value.number > 65536)
    refuse(str(key, ": is ", excerpt(value), ", not 1 to 65536"));
  return static_cast<int>(value.number);
}

std::vector<RatePoint> points_of(const JsonValue& list, const std::string& op) {
  std::vector<RatePoint> points;
  if (list.kind != Kind::list || list.items.empty()) refuse(str("ops.", op, ": is not a list of points"));
  for (const JsonValue& item : list.items) {
    if (item.kind != Kind::list || item.items.size() != 4)
      refuse(str("ops.", op, ": a point is ", excerpt(item), ", not [flops, bytes, busy_s, alone_s]"));
    const auto at = [&](std::size_t i) { return number(item.items[i], str("ops.", op)); };
    points.push_back({at(0), at(1), at(2), at(3)});
  }
  try {
    (void)RateTable(points);
  } catch (const Error& error) {
    refuse(str("ops.", op, ": ", error.what()));
  }
  return points;
}

// The rate of ops without measurements.
Rate usual_rate(const Calibration& calibration) {
  Rate rate{.flops_per_s = 0, .overhead_s = calibration.node_overhead_s};
  std::vector<double> streams;
  for (const auto& [op, points] : calibration.ops) {
    for (const RatePoint& point : points) {
      rate.flops_per_s = std::max(rate.flops_per_s, point.flops / point.busy_s);
      if (point.bytes_moved > 0 && point.flops <= streaming_intensity * point.bytes_moved)
        streams.push_back(point.bytes_moved / point.busy_s);
    }
  }
  if (rate.flops_per_s <= 0) rate.flops_per_s = unlimited;
  if (!streams.empty()) {
    std::nth_element(streams.begin(), streams.begin() + static_cast<std::ptrdiff_t>(streams.size() / 2), streams.end());
    rate.bytes_per_s = streams[streams.size() / 2];
  }
  return rate;
}

}  // namespace

Machine calibrated_machine(const Calibration& calibration, int num_ranks) {
  const Rate usual = usual_rate(calibration);
  Machine machine  = loopback_machine({.ranks   = num_ranks,
                                       .threads = calibration.threads,
                                       .rates = {.compute = usual, .communicate = usual, .copy = usual, .host = usual}});
  for (const auto& [op, points] : calibration.ops) machine.rate(op, RateTable(points));
  return machine;
}

std::string to_json(const Calibration& calibration) {
  std::string text =
      str("{\"type\": \"machine\", \"version\": ", format_version, ",\n \"host\": ", json_line(calibration.host),
          ", \"cores\": ", calibration.cores, ", \"threads\": ", calibration.threads,
          ", \"node_overhead_s\": ", json_line(calibration.node_overhead_s), ",\n \"ops\": {");
  const char* between = "\n";
  for (const auto& [op, points] : calibration.ops) {
    JsonValue list = JsonValue::list();
    for (const RatePoint& point : points)
      list.items.push_back(JsonValue::list({point.flops, point.bytes_moved, point.busy_s, point.alone_s}));
    text += str(between, "  ", json_line(op), ": ", json_line(list));
    between = ",\n";
  }
  return text + "\n}}\n";
}

Calibration parse_calibration(std::string_view text) {
  const JsonValue all = [&] {
    try {
      return parse_json(text);
    } catch (const Error& error) {
      refuse(error.what());
    }
  }();
  const JsonValue* const type = all.kind == Kind::object ? all.find("type") : nullptr;
  if (type == nullptr || type->kind != Kind::string || type->text != "machine") refuse("does not describe a machine");
  if (number(need(all, "version"), "version") != format_version)
    refuse(str("version: is ", excerpt(need(all, "version")), ", not ", format_version));
  Calibration calibration{.cores = count(all, "cores"), .threads = count(all, "threads")};
  const JsonValue& host = need(all, "host");
  if (host.kind != Kind::string) refuse(str("host: is ", excerpt(host), ", not a name"));
  calibration.host            = host.text;
  calibration.node_overhead_s = number(need(all, "node_overhead_s"), "node_overhead_s");
  if (!(calibration.node_overhead_s >= 0 && std::isfinite(calibration.node_overhead_s)))
    refuse("node_overhead_s: is not a time");
  const JsonValue& ops = need(all, "ops");
  if (ops.kind != Kind::object || ops.items.empty()) refuse("ops: is empty");
  for (std::size_t i = 0; i < ops.items.size(); ++i) {
    if (ops.key[i].empty()) refuse("ops: a name is empty");
    calibration.ops.emplace(ops.key[i], points_of(ops.items[i], ops.key[i]));
  }
  return calibration;
}

void save_calibration(const Calibration& calibration, const std::filesystem::path& path) {
  std::error_code error;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  if (error)
    throw Error(ErrorKind::backend, str(path.parent_path().string(),
                                        ": the folder cannot be created: ", error.message(), " (another path)"));
  write_text(path, to_json(calibration));
}

Calibration load_calibration(const std::filesystem::path& path) {
  const std::string text = read_text(path, most_bytes);
  try {
    return parse_calibration(text);
  } catch (const Error& error) {
    throw Error(error.kind(), str(path.string(), ": ", error.what()));
  }
}

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "localhost";
  return name;
}

int num_cores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

std::filesystem::path calibration_path(int threads) {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::filesystem::path(value != nullptr ? value : "");
  };
  std::filesystem::path folder = variable("XDG_CACHE_HOME");
  if (folder.empty()) {
    if (variable("HOME").empty())
      throw Error(ErrorKind::config, "neither XDG_CACHE_HOME nor HOME is set (set one of them, or use --machine FILE)");
    folder = variable("HOME") / ".cache";
  }
  std::string name = host_name();
  std::replace(name.begin(), name.end(), '/', '_');
  return folder / "stepgraph" / str(name, "-", num_cores(), "-cores-", threads, "-threads.json");
}

}  // namespace stepgraph
