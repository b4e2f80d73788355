#include "graphs/predict/cluster.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "engine/base/error.hpp"
#include "graphs/config/reader.hpp"
#include "graphs/files/files.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/plan/precision.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t most_bytes = 1 << 20;  // of a file
constexpr int most_devices        = 1 << 20;

constexpr std::array types{DType::f64, DType::f32, DType::bf16, DType::f16};

constexpr Unit bandwidths[] = {{"GB/s", 1e9},     {"TB/s", 1e12},     {"MB/s", 1e6},    {"GiB/s", 0x1p30},
                               {"TiB/s", 0x1p40}, {"Gbit/s", 1e9, 8}, {"Gb/s", 1e9, 8}, {"Tbit/s", 1e12, 8}};
constexpr Unit flop_rates[] = {{"TFLOPS", 1e12},  {"GFLOPS", 1e9},  {"PFLOPS", 1e15},
                               {"TFLOP/s", 1e12}, {"GFLOP/s", 1e9}, {"PFLOP/s", 1e15}};
constexpr Unit times[]      = {{"us", 1, 1e6}, {"ms", 1, 1e3}, {"ns", 1, 1e9}, {"s"}};
constexpr RealRange efficiencies{.min_allowed = false, .below = 1 + 1e-9, .words = "above 0, at most 1"};

// NVIDIA's data sheets of the SXM boards, without sparsity, and of the DGX systems; latencies are those of NCCL's cost
// model (ring, Simple protocol).
constexpr std::array preset_names{std::string_view("a100"), std::string_view("h100"), std::string_view("h200")};
Cluster hopper(std::string name, std::int64_t memory_bytes, double memory_bytes_per_s) {
  return {
      .name             = std::move(name),
      .devices_per_node = 8,
      .inside           = {.latency_s = 3.4e-6, .bytes_per_s = 450e9},
      .between          = {.latency_s = 9.6e-6, .bytes_per_s = 400e9},
      .flops_per_s = {{DType::f64, 66.9e12}, {DType::f32, 66.9e12}, {DType::bf16, 989.4e12}, {DType::f16, 989.4e12}},
      .memory_bytes_per_s      = memory_bytes_per_s,
      .memory_bytes            = memory_bytes,
      .h2d_bytes_per_s         = 64e9,
      .d2h_bytes_per_s         = 64e9,
      .host_memory_bytes_per_s = 614.4e9,
      .disk_read_bytes_per_s   = 7e9,
      .disk_write_bytes_per_s  = 3.8e9};
}

void read_link(const ConfigReader& links, std::string_view key, Link& link) {
  const ConfigReader section = links.section(key, {"bandwidth", "latency"});
  section.quantity("bandwidth", link.bytes_per_s, positive, bandwidths);
  section.quantity("latency", link.latency_s, not_negative, times);
}

void read_host(const ConfigReader& root, Cluster& cluster) {
  const ConfigReader host = root.section("host", {"h2d", "d2h", "memory"});
  host.quantity("h2d", cluster.h2d_bytes_per_s, positive, bandwidths);
  host.quantity("d2h", cluster.d2h_bytes_per_s, positive, bandwidths);
  host.quantity("memory", cluster.host_memory_bytes_per_s, positive, bandwidths);
  const ConfigReader disk = root.section("disk", {"read", "write"});
  disk.quantity("read", cluster.disk_read_bytes_per_s, positive, bandwidths);
  disk.quantity("write", cluster.disk_write_bytes_per_s, positive, bandwidths);
}

// The op of a transfer, its rate and the key of that rate.
struct TransferRate {
  std::string_view op, key;
  double Cluster::*bytes_per_s;
};
constexpr std::array transfer_rates{TransferRate{"h2d", "host.h2d", &Cluster::h2d_bytes_per_s},
                                    TransferRate{"d2h", "host.d2h", &Cluster::d2h_bytes_per_s},
                                    TransferRate{"disk_read", "disk.read", &Cluster::disk_read_bytes_per_s},
                                    TransferRate{"disk_write", "disk.write", &Cluster::disk_write_bytes_per_s}};

// Transfers do not use the memory of a device for long. Host nodes of a node of the cluster share the host's memory.
void add_host(const Cluster& cluster, Machine& machine) {
  // Costs count bytes read and bytes written; a transfer moves half of their sum.
  for (const TransferRate& of : transfer_rates)
    machine.rate(of.op, {.bytes_per_s = 2 * cluster.*of.bytes_per_s, .overhead_s = cluster.overhead_s});
  BusId host = no_bus;
  for (int rank = 0; rank < machine.num_ranks(); ++rank) {
    if (rank % cluster.devices_per_node == 0)
      host = machine.bus({.name        = str("host memory of node ", rank / cluster.devices_per_node),
                          .bytes_per_s = cluster.host_memory_bytes_per_s});
    machine.bind({.rank = Rank{rank}, .lane = LaneKind::host}, host);
    for (const LaneKind lane : {LaneKind::h2d, LaneKind::d2h, LaneKind::disk})
      machine.bind({.rank = Rank{rank}, .lane = lane}, no_bus);
  }
}

void read_slow(const ConfigReader& root, const JsonValue* list, Cluster& cluster) {
  constexpr std::string_view example = R"([{"rank": 0, "factor": 2}])";
  if (!list) return;
  if (!list->is_list()) root.refuse("slow", str(excerpt(*list), " is not a list (", example, ")"));
  for (std::size_t i = 0; i < list->size(); ++i) {
    const ConfigReader section(&(*list)[i], str("slow[", i, "]"), {"rank", "factor"});
    int rank      = 0;
    double factor = 1;
    section.required("rank", "a device");
    section.required("factor", "how many times as long it takes");
    section.integer("rank", rank, 0, cluster.num_devices() - 1);
    section.real("factor", factor, positive);
    if (!cluster.slow.emplace(rank, factor).second) section.refuse("rank", str(rank, " is there twice (once)"));
  }
}

void check_complete(const Cluster& cluster) {
  const auto missing = [](std::string_view key, std::string_view what) {
    throw Error(ErrorKind::config, str(key, ": missing (", what, "; or a preset: a100, h100 or h200)"));
  };
  if (cluster.devices_per_node > 1 && !std::isfinite(cluster.inside.bytes_per_s))
    missing("links.inside.bandwidth", "of a device, each way: \"300GB/s\"");
  if (cluster.nodes > 1 && !std::isfinite(cluster.between.bytes_per_s))
    missing("links.between.bandwidth", "of a node, each way: \"200GB/s\"");
  if (cluster.flops_per_s.empty()) missing("rates", "of the types that are used: {\"bf16\": \"312TFLOPS\"}");
  if (!std::isfinite(cluster.memory_bytes_per_s)) missing("rates.memory", "of a device: \"2039GB/s\"");
  if (cluster.memory_bytes == 0) missing("memory_bytes", "of a device: \"80GB\"");
  if (cluster.nodes > 1 && cluster.between.latency_s < cluster.inside.latency_s)
    throw Error(ErrorKind::config,
                str("links.between.latency: ", cluster.between.latency_s, " s is less than that inside of a node, ",
                    cluster.inside.latency_s, " s (at least that)"));
}

}  // namespace

Cluster cluster_preset(std::string_view name) {
  if (name == "a100")
    return {.name             = "a100",
            .devices_per_node = 8,
            .inside           = {.latency_s = 3.4e-6, .bytes_per_s = 300e9},
            .between          = {.latency_s = 9.6e-6, .bytes_per_s = 200e9},
            .flops_per_s = {{DType::f64, 19.5e12}, {DType::f32, 19.5e12}, {DType::bf16, 312e12}, {DType::f16, 312e12}},
            .memory_bytes_per_s      = 2039e9,
            .memory_bytes            = 80'000'000'000,
            .h2d_bytes_per_s         = 32e9,
            .d2h_bytes_per_s         = 32e9,
            .host_memory_bytes_per_s = 409.6e9,
            .disk_read_bytes_per_s   = 7e9,
            .disk_write_bytes_per_s  = 3.8e9};
  if (name == "h100") return hopper("h100", 80'000'000'000, 3350e9);
  if (name == "h200") return hopper("h200", 141'000'000'000, 4800e9);
  const ConfigReader::Names known(preset_names.begin(), preset_names.end());
  throw Error(ErrorKind::config, str("preset: \"", name, "\" is unknown (", known_text(name, known), ")"));
}

Cluster parse_cluster(std::string_view text) {
  const JsonValue value = parse_json(text);
  if (!value.is_object())
    throw Error(ErrorKind::config,
                str("cluster: ", excerpt(value), " is not an object (such as {\"preset\": \"a100\", \"nodes\": 2})"));
  const ConfigReader root(&value, "",
                          {"preset", "nodes", "devices_per_node", "links", "rates", "efficiency", "overhead",
                           "memory_bytes", "host", "disk", "slow", "slow_in_turns"});
  Cluster cluster;
  if (root.has("preset")) {
    const ConfigReader::Names names(preset_names.begin(), preset_names.end());
    cluster = cluster_preset(names[root.choice("preset", 0, names)]);
  } else {
    root.required("devices_per_node", "of one node; or a preset: a100, h100 or h200");
  }
  root.integer("nodes", cluster.nodes, 1, most_devices);
  root.integer("devices_per_node", cluster.devices_per_node, 1, most_devices);
  if (std::int64_t{cluster.nodes} * cluster.devices_per_node > most_devices)
    root.refuse("nodes", str(cluster.nodes, " of ", cluster.devices_per_node, " devices (at most ", most_devices,
                             " devices in all)"));
  const ConfigReader links = root.section("links", {"inside", "between"});
  read_link(links, "inside", cluster.inside);
  read_link(links, "between", cluster.between);
  ConfigReader::Names rate_names;
  for (const DType type : types) rate_names.push_back(config_name(type));
  rate_names.push_back("memory");
  const ConfigReader rates = root.section("rates", rate_names);
  for (const DType type : types) {
    if (rates.has(config_name(type)))
      rates.quantity(config_name(type), cluster.flops_per_s[type], positive, flop_rates);
  }
  rates.quantity("memory", cluster.memory_bytes_per_s, positive, bandwidths);
  read_host(root, cluster);
  root.real("efficiency", cluster.efficiency, efficiencies);
  root.quantity("overhead", cluster.overhead_s, not_negative, times);
  root.size("memory_bytes", cluster.memory_bytes);
  read_slow(root, value.find("slow"), cluster);
  root.real("slow_in_turns", cluster.slow_in_turns, positive);
  check_complete(cluster);
  return cluster;
}

Cluster load_cluster(const std::filesystem::path& path) {
  const std::string text = read_text(path, most_bytes);
  try {
    return parse_cluster(text);
  } catch (const Error& error) {
    throw Error(error.kind(), str(path.string(), ": ", error.what()));
  }
}

Machine cluster_machine(const Cluster& cluster, int num_ranks, DType type) {
  if (num_ranks > cluster.num_devices())
    throw Error(ErrorKind::config, str("cluster: the layout has ", num_ranks, " ranks, but there are ",
                                       cluster.num_devices(), " devices (", cluster.nodes, " x ",
                                       cluster.devices_per_node, "; more nodes, or a smaller layout)"));
  const auto flops = cluster.flops_per_s.find(type);
  if (flops == cluster.flops_per_s.end())
    throw Error(ErrorKind::config,
                str("rates.", config_name(type), ": missing (the step computes in ", config_name(type), ")"));
  const Rate compute{.flops_per_s = flops->second * cluster.efficiency, .overhead_s = cluster.overhead_s};
  const Rate other{.overhead_s = cluster.overhead_s};
  Link between      = cluster.between;
  between.latency_s = std::max(between.latency_s, cluster.inside.latency_s);  // of one node: not used
  Machine machine =
      two_level_machine({.ranks          = num_ranks,
                         .ranks_per_node = cluster.devices_per_node,
                         .inside         = cluster.inside,
                         .between        = between,
                         .rates          = {.compute = compute, .communicate = other, .copy = other, .host = other}});
  for (int rank = 0; rank < num_ranks; ++rank) {
    const BusId memory = machine.bus({.name = str("memory of rank ", rank), .bytes_per_s = cluster.memory_bytes_per_s});
    machine.bind({.rank = Rank{rank}}, memory);
    // Nodes without a lane run one after another, beside the lanes.
    machine.bind({.rank = Rank{rank}, .laneless = true}, machine.pool({.name = str("rank ", rank)}));
  }
  add_host(cluster, machine);
  for (const auto& [rank, factor] : cluster.slow) {
    if (rank >= num_ranks)
      throw Error(ErrorKind::config,
                  str("cluster: slow: rank ", rank, " is not in the layout (0 to ", num_ranks - 1, ")"));
    machine.slow(Rank{rank}, factor);
  }
  return machine;
}

OffloadRates offload_rates(const Cluster& cluster) {
  constexpr double bytes_of_update = 30;  // f32 weight and moments read and written, f32 gradient, 16-bit weight
  const auto known                 = [](double rate, double usual) { return std::isfinite(rate) ? rate : usual; };
  return {.h2d_bytes_per_s       = known(cluster.h2d_bytes_per_s, usual_offload_rates.h2d_bytes_per_s),
          .d2h_bytes_per_s       = known(cluster.d2h_bytes_per_s, usual_offload_rates.d2h_bytes_per_s),
          .host_elements_per_s   = known(cluster.host_memory_bytes_per_s / cluster.devices_per_node / bytes_of_update,
                                         usual_offload_rates.host_elements_per_s),
          .device_elements_per_s = known(cluster.memory_bytes_per_s / bytes_of_update, 0)};
}

void check_offload_rates(const Cluster& cluster, const StepGraph& step) {
  std::string keys, first;  // that are missing, and what needs the first of them
  const auto missing = [&](std::string_view key, std::string_view what) {
    if (keys.find(key) != keys.npos) return;
    keys += str(keys.empty() ? "" : ", ", key);
    if (first.empty()) first = what;
  };
  if (step.homes.empty()) return;
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    const std::string_view op = step.graph.op(Node{i});
    for (const TransferRate& of : transfer_rates) {
      if (op == of.op && !std::isfinite(cluster.*of.bytes_per_s))
        missing(of.key, str("transfers of offload, such as '", step.graph.name(Node{i}), "'"));
    }
    const bool on_host = step.graph.lane(Node{i}) == Lane{step.graph.rank(Node{i}), LaneKind::host};
    if (on_host && !std::isfinite(cluster.host_memory_bytes_per_s))
      missing("host.memory", str("work on the host, such as '", step.graph.name(Node{i}), "'"));
  }
  if (!keys.empty())
    throw Error(ErrorKind::config, str(keys, ": missing (the step has ", first, "; or a preset: a100, h100 or h200)"));
}

}  // namespace stepgraph
