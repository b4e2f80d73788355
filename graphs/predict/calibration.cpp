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

constexpr int format_version          = 1;  // a point may lack halved_s, or paired_s and halved_s
constexpr std::int64_t most_bytes     = 16 << 20;
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

std::vector<RatePoint> points_of(const JsonValue& list, const std::string& what) {
  std::vector<RatePoint> points;
  if (list.kind != Kind::list || list.items.empty()) refuse(str(what, ": is not a list of points"));
  for (const JsonValue& item : list.items) {
    if (item.kind != Kind::list || item.items.size() < 4 || item.items.size() > 6)
      refuse(str(what, ": a point is ", excerpt(item),
                 ", not [flops, bytes, busy_s, alone_s], which paired_s, or paired_s and halved_s, may follow"));
    const auto at = [&](std::size_t i) { return number(item.items[i], what); };
    points.push_back(
        {at(0), at(1), at(2), at(3), item.items.size() > 4 ? at(4) : 0, item.items.size() > 5 ? at(5) : 0});
  }
  try {
    (void)RateTable(points);
  } catch (const Error& error) {
    refuse(str(what, ": ", error.what()));
  }
  return points;
}

Calibration::Ops ops_in(const JsonValue& ops, std::string_view what) {
  Calibration::Ops found;
  if (ops.kind != Kind::object || ops.items.empty()) refuse(str(what, ": is empty"));
  for (std::size_t i = 0; i < ops.items.size(); ++i) {
    if (ops.key[i].empty()) refuse(str(what, ": a name is empty"));
    found.emplace(ops.key[i], points_of(ops.items[i], str(what, ".", ops.key[i])));
  }
  return found;
}

LaneKind lane_in(const JsonValue& value) {
  for (std::size_t i = 0; value.kind == Kind::string && i < num_lane_kinds; ++i) {
    if (value.text == to_string(static_cast<LaneKind>(i))) return static_cast<LaneKind>(i);
  }
  refuse(str("beside: is ", excerpt(value), ", not a lane"));
}

// [["host", ["h2d", "d2h"], 2.1]]
std::vector<Calibration::Beside> beside_in(const JsonValue& list) {
  std::vector<Calibration::Beside> all;
  if (list.kind != Kind::list) refuse(str("beside: is ", excerpt(list), ", not a list"));
  for (const JsonValue& item : list.items) {
    if (item.kind != Kind::list || item.items.size() != 3 || item.items[1].kind != Kind::list)
      refuse(str("beside: has ", excerpt(item), ", not [lane, [lanes], factor]"));
    Calibration::Beside made{.lane = lane_in(item.items[0]), .factor = number(item.items[2], "beside")};
    for (const JsonValue& other : item.items[1].items) made.others.push_back(lane_in(other));
    try {
      Machine(1).beside(made.lane, made.others, made.factor);
    } catch (const Error& error) {
      refuse(str("beside: ", error.what()));
    }
    all.push_back(std::move(made));
  }
  return all;
}

std::string ops_text(const Calibration::Ops& ops) {
  std::string text;
  const char* between = "\n";
  for (const auto& [op, points] : ops) {
    JsonValue list = JsonValue::list();
    for (const RatePoint& point : points) {
      list.items.push_back(JsonValue::list({point.flops, point.bytes_moved, point.busy_s, point.alone_s}));
      if (point.paired_s > 0 || point.halved_s > 0) list.items.back().items.push_back(point.paired_s);
      if (point.halved_s > 0) list.items.back().items.push_back(point.halved_s);
    }
    text += str(between, "  ", json_line(op), ": ", json_line(list));
    between = ",\n";
  }
  return text + "\n}";
}

}  // namespace

std::string to_json(const Calibration& calibration) {
  std::string text =
      str("{\"type\": \"machine\", \"version\": ", format_version, ",\n \"host\": ", json_line(calibration.host),
          ", \"cores\": ", calibration.cores, ", \"threads\": ", calibration.threads,
          ", \"node_overhead_s\": ", json_line(calibration.node_overhead_s));
  if (!calibration.device.empty()) text += str(",\n \"device\": ", json_line(calibration.device));
  if (!calibration.disk.empty()) text += str(",\n \"disk\": ", json_line(calibration.disk));
  if (calibration.host_bytes > 0) text += str(", \"host_bytes\": ", calibration.host_bytes);
  if (calibration.device_bytes > 0) text += str(", \"device_bytes\": ", calibration.device_bytes);
  if (!calibration.beside.empty()) {
    JsonValue list = JsonValue::list();
    for (const Calibration::Beside& each : calibration.beside) {
      JsonValue others = JsonValue::list();
      for (const LaneKind other : each.others) others.items.emplace_back(std::string(to_string(other)));
      list.items.push_back(JsonValue::list({std::string(to_string(each.lane)), others, each.factor}));
    }
    text += str(",\n \"beside\": ", json_line(list));
  }
  text += str(",\n \"ops\": {", ops_text(calibration.ops));
  if (!calibration.ops_bf16.empty()) text += str(",\n \"ops_bf16\": {", ops_text(calibration.ops_bf16));
  return text + "}\n";
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
  calibration.ops = ops_in(need(all, "ops"), "ops");
  if (const JsonValue* const found = all.find("ops_bf16")) calibration.ops_bf16 = ops_in(*found, "ops_bf16");
  if (const JsonValue* const found = all.find("beside")) calibration.beside = beside_in(*found);
  const auto read_name = [&](std::string_view key, std::string& into) {
    const JsonValue* const found = all.find(key);
    if (found == nullptr) return;
    if (found->kind != Kind::string) refuse(str(key, ": is ", excerpt(*found), ", not a name"));
    into = found->text;
  };
  read_name("device", calibration.device);
  read_name("disk", calibration.disk);
  const auto read_bytes = [&](const std::string& key, std::int64_t& into) {
    const JsonValue* const found = all.find(key);
    if (found == nullptr) return;
    const double bytes = number(*found, key);
    if (!(bytes >= 0 && bytes < 1e18)) refuse(str(key, ": is ", excerpt(*found), ", not a number of bytes"));
    into = static_cast<std::int64_t>(bytes);
  };
  read_bytes("host_bytes", calibration.host_bytes);
  read_bytes("device_bytes", calibration.device_bytes);
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

std::filesystem::path calibration_path(int threads, const std::string& device) {
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
  std::string name =
      str(host_name(), "-", num_cores(), "-cores-", threads, "-threads", device.empty() ? "" : "-", device);
  std::replace(name.begin(), name.end(), '/', '_');
  std::replace(name.begin(), name.end(), ' ', '-');
  return folder / "stepgraph" / (name + ".json");
}

}  // namespace stepgraph
