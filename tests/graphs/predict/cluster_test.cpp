#include "graphs/predict/cluster.hpp"

#include <algorithm>
#include <array>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/predict/machine_file.hpp"
#include "graphs/predict/prediction.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::WithinRel;

namespace {

// A cluster on which everything but products and messages takes no time.
constexpr const char* plain = R"({"nodes": 2, "devices_per_node": 2,
  "links": {"inside": {"bandwidth": "100GB/s", "latency": "1us"}, "between": {"bandwidth": "10GB/s", "latency": "5us"}},
  "rates": {"fp32": "10TFLOPS", "memory": "1000TB/s"}, "memory_bytes": "1GiB"})";

const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};
sg::Model model() { return sg::gpt2({.layers = 4, .width = 16, .heads = 2, .context = 8, .vocab = 32}); }

}  // namespace

TEST_CASE("a cluster is read from a file, with units or without", "[graphs][predict][cluster]") {
  const sg::Cluster cluster = sg::parse_cluster(plain);
  CHECK(cluster.num_devices() == 4);
  CHECK(cluster.inside == sg::Link{1e-6, 100e9});
  CHECK(cluster.between == sg::Link{5e-6, 10e9});
  CHECK(cluster.flops_per_s == std::map<sg::DType, double>{{sg::DType::f32, 10e12}});
  CHECK(cluster.memory_bytes_per_s == 1e15);
  CHECK(cluster.memory_bytes == std::int64_t{1} << 30);
  CHECK(cluster.efficiency == 1);
  CHECK(sg::parse_cluster(R"({"nodes": 2, "devices_per_node": 2,
    "links": {"inside": {"bandwidth": 100e9, "latency": 1e-6}, "between": {"bandwidth": "80Gbit/s", "latency": "5000ns"}},
    "rates": {"fp32": "0.01PFLOP/s", "memory": 1e15}, "memory_bytes": 1073741824})") == cluster);
}

TEST_CASE("a preset is a node, and the file can change its fields", "[graphs][predict][cluster]") {
  const sg::Cluster node = sg::parse_cluster(R"({"preset": "a100"})");
  CHECK(node == sg::cluster_preset("a100"));
  CHECK(node.nodes == 1);
  CHECK(node.devices_per_node == 8);
  CHECK(node.flops_per_s.at(sg::DType::bf16) == 312e12);
  const sg::Cluster changed = sg::parse_cluster(
      R"({"preset": "a100", "nodes": 4, "efficiency": 0.5, "overhead": "2us", "memory_bytes": "40GB",
          "rates": {"bf16": "300TFLOPS"}, "links": {"between": {"bandwidth": "100GB/s"}}})");
  sg::Cluster expected                  = node;
  expected.nodes                        = 4;
  expected.efficiency                   = 0.5;
  expected.overhead_s                   = 2e-6;
  expected.memory_bytes                 = 40'000'000'000;
  expected.flops_per_s[sg::DType::bf16] = 300e12;
  expected.between.bytes_per_s          = 100e9;
  CHECK(changed == expected);
  for (const char* name : {"a100", "h100", "h200"}) {
    const sg::Cluster preset = sg::cluster_preset(name);
    CHECK(preset.name == name);
    CHECK(preset.flops_per_s.size() == 4);
    CHECK(preset.memory_bytes >= 80'000'000'000);
  }
}

TEST_CASE("a description that is wrong or incomplete is refused, by its key", "[graphs][predict][cluster][refuses]") {
  const auto refused = [](const char* text, const char* why) {
    CAPTURE(text);
    CHECK_THROWS_WITH(sg::parse_cluster(text), ContainsSubstring(why));
  };
  refused("[]", "cluster: [] is not an object (such as {\"preset\": \"a100\", \"nodes\": 2})");
  refused(R"({"preset": "a10"})", "preset: \"a10\" is unknown (did you mean a100? known: a100, h100, h200)");
  refused(R"({"preset": "a100", "node": 2})", "node: unknown key (did you mean nodes?");
  refused(R"({"preset": "a100", "nodes": 0})", "nodes: 0 is out of range (an integer from 1 to 1048576)");
  refused(R"({"preset": "a100", "nodes": 1000000})", "nodes: 1000000 of 8 devices (at most 1048576 devices in all)");
  refused(R"({"preset": "a100", "links": {"inside": {"bandwith": 1}}})",
          "links.inside.bandwith: unknown key (did you mean bandwidth?");
  refused(R"({"preset": "a100", "links": {"inside": {"bandwidth": "300GBps"}}})",
          "links.inside.bandwidth: \"300GBps\" is not a number with a unit (GB/s, TB/s, MB/s,");
  refused(R"({"preset": "a100", "links": {"inside": {"bandwidth": 0}}})", "links.inside.bandwidth: 0 is out of range");
  refused(R"({"preset": "a100", "links": {"inside": {"latency": "-1us"}}})", "links.inside.latency: \"-1us\" is out");
  refused(R"({"preset": "a100", "rates": {"fp8": 1}})",
          "rates.fp8: unknown key (known: fp64, fp32, bf16, fp16, memory)");
  refused(R"({"preset": "a100", "rates": {"bf16": "312TOPS"}})", "rates.bf16: \"312TOPS\" is not a number with a unit");
  refused(R"({"preset": "a100", "host": {"h2d": 0}})", "host.h2d: 0 is out of range");
  refused(R"({"preset": "a100", "host": {"link": 1}})", "host.link: unknown key (known: h2d, d2h, memory)");
  refused(R"({"preset": "a100", "disk": {"reads": 1}})", "disk.reads: unknown key (did you mean read?");
  refused(R"({"preset": "a100", "efficiency": 1.5})", "efficiency: 1.5 is out of range (a number above 0, at most 1)");
  refused(R"({"preset": "a100", "memory_bytes": "80G"})", "memory_bytes: '80G' is not a size");
  refused(R"({"preset": "a100", "nodes": 2, "links": {"between": {"latency": "1us"}}})",
          "links.between.latency: 1e-06 s is less than that inside of a node");
  refused(R"({"nodes": 2})", "devices_per_node: missing (of one node; or a preset: a100, h100 or h200)");
  refused(R"({"devices_per_node": 2})", "links.inside.bandwidth: missing (of a device, each way");
  refused(R"({"devices_per_node": 1, "nodes": 2})", "links.between.bandwidth: missing");
  refused(R"({"devices_per_node": 1})", "rates: missing (of the types that are used");
  refused(R"({"devices_per_node": 1, "rates": {"fp32": 1e12}})", "rates.memory: missing");
  refused(R"({"devices_per_node": 1, "rates": {"fp32": 1e12, "memory": 1e12}})", "memory_bytes: missing");
  CHECK_NOTHROW(
      sg::parse_cluster(R"({"devices_per_node": 1, "rates": {"fp32": 1e12, "memory": 1e12}, "memory_bytes": 1000})"));
}

TEST_CASE("products take their flops at the cluster's rate, other work its bytes", "[graphs][predict][cluster]") {
  sg::Cluster cluster = sg::parse_cluster(plain);
  const auto busy     = [&] {
    const sg::StepPrediction step = sg::predict_step(model(), {}, batch, cluster);
    double flops = 0, seconds = 0;
    for (std::uint32_t i = 0; i < step.step.graph.num_nodes(); ++i) {
      flops += step.step.graph.cost(sg::Node{i}).flops;
      seconds += step.timeline.nodes[i].end_s - step.timeline.nodes[i].begin_s;
    }
    return std::pair(flops, seconds);
  };
  const auto [flops, seconds] = busy();
  CHECK_THAT(seconds, WithinRel(flops / 10e12, 0.01));  // memory takes almost no time
  cluster.efficiency = 0.5;
  CHECK_THAT(busy().second, WithinRel(flops / 5e12, 0.01));
  cluster.flops_per_s        = {{sg::DType::f32, 1e30}};
  cluster.memory_bytes_per_s = 1e9;
  double bytes               = 0;
  const auto step            = sg::predict_step(model(), {}, batch, cluster);
  for (std::uint32_t i = 0; i < step.step.graph.num_nodes(); ++i)
    bytes += step.step.graph.cost(sg::Node{i}).bytes_moved;
  CHECK_THAT(step.makespan_s(), WithinRel(bytes / 1e9, 0.01));
}

TEST_CASE("a step on more devices is as fast as links and layout allow", "[graphs][predict][cluster]") {
  const sg::Cluster cluster = sg::parse_cluster(plain);
  const auto step_s         = [&](const sg::LayoutSpec& layout, const sg::Cluster& on) {
    return sg::predict_step(model(), {.layout = layout}, batch, on).makespan_s();
  };
  sg::Cluster fast         = cluster;
  fast.between.bytes_per_s = fast.inside.bytes_per_s = 1e15;
  fast.between.latency_s = fast.inside.latency_s = 0;
  CHECK(step_s({.dp = 4}, cluster) > step_s({.dp = 4}, fast));
  CHECK(step_s({.dp = 4}, fast) < 0.4 * step_s({}, fast));
  // Between nodes a pipeline sends less than data parallelism does.
  sg::Cluster slow         = cluster;
  slow.between.bytes_per_s = 1e6;
  CHECK(step_s({.pp = 4}, slow) < step_s({.tp = 2, .pp = 2, .order = "tp-pp-dp"}, slow));
}

TEST_CASE("a cluster that is too small, or has no rate for a type, is refused", "[graphs][predict][cluster][refuses]") {
  const sg::Cluster cluster = sg::parse_cluster(plain);
  CHECK_THROWS_WITH(
      sg::predict_step(model(), {.layout = {.dp = 2, .pp = 4}}, {.global = 8, .micro = 1, .seq = 8}, cluster),
      "cluster: the layout has 8 ranks, but there are 4 devices (2 x 2; more nodes, or a smaller layout)");
  CHECK_THROWS_WITH(sg::predict_step(model(), {.precision = {.param = sg::DType::bf16}}, batch, cluster),
                    "rates.bf16: missing (the step computes in bf16)");
}

TEST_CASE("adaptive collectives are chosen for the machine that is given", "[graphs][predict][cluster]") {
  const sg::Plan plan{.layout = {.dp = 4}, .algorithm = sg::Algorithm::adaptive};
  sg::Cluster cluster      = sg::parse_cluster(plain);
  cluster.inside.latency_s = 0;
  cluster.between          = {.latency_s = 0, .bytes_per_s = 1e9};  // a direct all-reduce crosses it several times
  const auto nodes         = [&](const sg::Plan& of) {
    return sg::predict_step(model(), of, batch, cluster).step.graph.num_nodes();
  };
  const std::uint32_t expanded = nodes(plan);
  CHECK(expanded > nodes({.layout = {.dp = 4}}));
  cluster.inside.latency_s = cluster.between.latency_s = 1;  // now the number of rounds decides
  CHECK(nodes(plan) < expanded);
  // A file can be of either kind.
  const sg::testing::TempFolder folder;
  const sg::Calibration here{.host = "here", .threads = 2, .ops = {{"linear", {{1e6, 1e4, 2e-3, 1e-3}}}}};
  folder.put("described.json", plain);
  folder.put("measured.json", sg::to_json(here));
  CHECK(std::get<sg::Cluster>(sg::load_machine_file(folder / "described.json")) == sg::parse_cluster(plain));
  CHECK(std::get<sg::Calibration>(sg::load_machine_file(folder / "measured.json")) == here);
  CHECK(sg::machine_of(sg::load_machine_file(folder / "described.json"), 3, sg::DType::f32).has_network());
  CHECK_FALSE(sg::machine_of(sg::load_machine_file(folder / "measured.json"), 3, sg::DType::f32).has_network());
  folder.put("neither.json", "[1]");
  CHECK_THROWS_WITH(sg::load_machine_file(folder / "neither.json"), ContainsSubstring("neither.json: cluster: [1]"));
}

// The stages of the models in the Zero Bubble paper (arXiv 2401.10241, Table 9), which were measured on A100. A stage
// in the middle of the pipeline has only layers. The guide states these ratios.
TEST_CASE("stages on described A100 take some of the time that was published", "[graphs][predict][cluster]") {
  struct Shape {
    std::string model;
    int layers_per_stage, heads, width, micro;
  };
  const Shape shapes[] = {
      {"1.5B", 3, 24, 2304, 6}, {"6.2B", 4, 32, 4096, 3}, {"14.6B", 3, 40, 5120, 1}, {"28.3B", 2, 48, 6144, 1}};
  std::istringstream table(sg::testing::file_bytes(sg::testing::data_file("zero_bubble.csv")));
  int rows = 0;
  std::map<std::string, std::array<double, 2>> simulated;  // seconds by model, at the peak and at 0.6 of it
  for (std::string line; std::getline(table, line);) {
    if (line.starts_with("#") || line.starts_with("model,")) continue;
    const auto cells          = sg::split_text(line, ',');
    const auto number         = [&](std::size_t i) { return std::stod(std::string(cells[i])); };
    const int stages          = static_cast<int>(number(1));
    const auto& of            = *std::find_if(std::begin(shapes), std::end(shapes),
                                              [&](const Shape& shape) { return shape.model == cells[0]; });
    const auto [found, fresh] = simulated.try_emplace(of.model);
    for (std::size_t i = 0; i < 2 && fresh; ++i) {
      const sg::Model large = sg::gpt2({.layers  = of.layers_per_stage * stages,
                                        .width   = of.width,
                                        .heads   = of.heads,
                                        .context = 1024,
                                        .vocab   = 50257});
      const sg::Plan plan{
          .layout = {.pp = stages}, .pipeline = {.schedule = "zb-h1"}, .precision = {.param = sg::DType::bf16}};
      sg::Cluster cluster = sg::cluster_preset("a100");
      cluster.nodes       = (stages + 7) / 8;
      cluster.efficiency  = i == 0 ? 1 : 0.6;
      const auto step = sg::predict_step(large, plan, {.global = of.micro, .micro = of.micro, .seq = 1024}, cluster);
      const sg::Costs costs = sg::stage_costs(step.step, step.timeline)[1];
      found->second[i]      = costs.F + costs.I + costs.W;
    }
    const double published = 1e-3 * (number(3) + number(4) + number(5));
    const double peak = found->second[0] / published, usual = found->second[1] / published;
    CAPTURE(of.model, peak, usual);
    CHECK(peak > 0.53);
    CHECK(peak < 0.66);
    CHECK(usual > 0.87);
    CHECK(usual < 1.09);
    ++rows;
  }
  CHECK(rows == 8);
}
