// The host and the disk of a described cluster.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <string>

#include "engine/base/error.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/predict/cluster.hpp"
#include "graphs/predict/prediction.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::WithinRel;

namespace {

constexpr const char* plain = R"({"devices_per_node": 1, "rates": {"fp32": "10TFLOPS", "memory": "1000TB/s"},
  "memory_bytes": "1GiB"})";

const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};
sg::Model model() { return sg::gpt2({.layers = 4, .width = 16, .heads = 2, .context = 8, .vocab = 32}); }

}  // namespace

TEST_CASE("presets have the rates of the host link, the host and the disk", "[graphs][predict][cluster]") {
  struct Expected {
    const char* name;
    double link, host, read, write;
  };
  for (const Expected& of : {Expected{"a100", 32e9, 409.6e9, 7e9, 3.8e9}, Expected{"h100", 64e9, 614.4e9, 7e9, 3.8e9},
                             Expected{"h200", 64e9, 614.4e9, 7e9, 3.8e9}}) {
    CAPTURE(of.name);
    const sg::Cluster preset = sg::cluster_preset(of.name);
    CHECK(preset.h2d_bytes_per_s == of.link);
    CHECK(preset.d2h_bytes_per_s == of.link);
    CHECK(preset.host_memory_bytes_per_s == of.host);
    CHECK(preset.disk_read_bytes_per_s == of.read);
    CHECK(preset.disk_write_bytes_per_s == of.write);
    const sg::OffloadRates rates = sg::offload_rates(preset);
    CHECK(rates.h2d_bytes_per_s == of.link);
    CHECK(rates.d2h_bytes_per_s == of.link);
    CHECK(rates.host_elements_per_s == of.host / 8 / 30);
    CHECK(rates.device_elements_per_s == preset.memory_bytes_per_s / 30);
  }
  const sg::Cluster changed = sg::parse_cluster(
      R"({"preset": "h200", "host": {"h2d": "50GB/s", "d2h": 40e9, "memory": "300GB/s"},
          "disk": {"read": "3GB/s", "write": "16Gbit/s"}})");
  CHECK(changed.h2d_bytes_per_s == 50e9);
  CHECK(changed.d2h_bytes_per_s == 40e9);
  CHECK(changed.host_memory_bytes_per_s == 300e9);
  CHECK(changed.disk_read_bytes_per_s == 3e9);
  CHECK(changed.disk_write_bytes_per_s == 2e9);
}

TEST_CASE("transfers and host updates of an offloaded step take their bytes at the cluster's rates",
          "[graphs][predict][cluster][offload]") {
  const sg::testing::TempFolder folder;
  sg::Plan plan{.layout = {.dp = 2}};
  plan.offload        = {.params = true, .optimizer = true, .host_bytes = 96 << 10, .disk = folder.path().string()};
  sg::Cluster cluster = sg::cluster_preset("a100");
  // Seconds that one node of each op takes, less than 1 in a million from its bytes / rate.
  const auto check = [&](const sg::StepPrediction& step) {
    std::map<std::string, int> counts;
    const std::map<std::string, double> rates{{"h2d", cluster.h2d_bytes_per_s},
                                              {"d2h", cluster.d2h_bytes_per_s},
                                              {"disk_read", cluster.disk_read_bytes_per_s},
                                              {"disk_write", cluster.disk_write_bytes_per_s}};
    for (std::uint32_t i = 0; i < step.step.graph.num_nodes(); ++i) {
      const auto rate = rates.find(std::string(step.step.graph.op(sg::Node{i})));
      if (rate == rates.end()) continue;
      const double bytes   = step.step.graph.cost(sg::Node{i}).bytes_moved / 2;  // read and written
      const double seconds = step.timeline.nodes[i].end_s - step.timeline.nodes[i].begin_s;
      CHECK_THAT(seconds, WithinRel(bytes / rate->second, 1e-6));
      ++counts[rate->first];
    }
    return counts.size();
  };
  CHECK(check(sg::predict_step(model(), plan, batch, cluster)) == 4);
  cluster.h2d_bytes_per_s       = 1e9;
  cluster.disk_read_bytes_per_s = 1e8;
  CHECK(check(sg::predict_step(model(), plan, batch, cluster)) == 4);
  // Updates on the host: one device alone uses all of the host's memory.
  plan                            = {};
  plan.offload                    = {.optimizer = true};
  cluster.host_memory_bytes_per_s = 1e12;
  const auto step = sg::predict_step(model(), plan, batch, cluster, {.offload_rates = sg::OffloadRates{1, 1, 1e12}});
  int updates     = 0;
  for (std::uint32_t i = 0; i < step.step.graph.num_nodes(); ++i) {
    if (step.step.graph.op(sg::Node{i}) != "adamw") continue;
    const double seconds = step.timeline.nodes[i].end_s - step.timeline.nodes[i].begin_s;
    CHECK_THAT(seconds, WithinRel(step.step.graph.cost(sg::Node{i}).bytes_moved / 1e12, 1e-6));
    ++updates;
  }
  CHECK(updates > 0);
}

TEST_CASE("a cluster without rates of the host refuses steps with offload, and no others",
          "[graphs][predict][cluster][offload][refuses]") {
  const sg::Cluster cluster = sg::parse_cluster(plain);
  CHECK_NOTHROW(sg::predict_step(model(), {}, batch, cluster));
  sg::Plan plan;
  plan.offload.params = true;
  CHECK_THROWS_WITH(
      sg::predict_step(model(), plan, batch, cluster),
      ContainsSubstring("host.h2d, host.d2h: missing (the step has transfers of offload, such as 'h2d ") &&
          ContainsSubstring("; or a preset: a100, h100 or h200)"));
}
