// simulate, and the benchmarks of training.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <filesystem>
#include <map>

#include "engine/base/error.hpp"
#include "graphs/predict/calibration.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::json_lines;
using sg::testing::SmallRun;

namespace {

// A machine on which products take a millisecond for each megaflop, and everything else almost no time.
std::string put_machine(const SmallRun& small, int threads = 1, const std::string& host = sg::host_name()) {
  const std::string path = small.path("machine.json");
  sg::Calibration machine{.host = host, .cores = 4, .threads = threads};
  for (const char* op :
       {"linear", "linear_gelu", "linear_input_gradient", "linear_input_gradient_gelu", "linear_weight_gradient"})
    machine.ops[op] = {{1e6, 1e4, 1e-3, 1e-3}};
  machine.ops["adamw"] = {{1e6, 1e6, 1e-9, 1e-9}};
  sg::save_calibration(machine, path);
  return path;
}

}  // namespace

TEST_CASE("simulate predicts the time of a step on a measured machine", "[tools][simulate]") {
  const SmallRun small;
  const std::string machine = "--machine " + put_machine(small);
  const auto outcome        = small.run("simulate", machine + " --json --trace " + small.path("trace.json"));
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK_THAT(outcome.err, ContainsSubstring("not measured, simulated at average rates: "));
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() > 5);
  CHECK(lines[0].at("type") == "plan");
  CHECK(lines[1].at("type") == "simulate");
  const double step_s = lines[1].at("step_s").as_real();
  double flops = 0, seconds = 0;
  for (std::size_t i = 2; i < lines.size(); ++i) {
    CHECK(lines[i].at("type") == "op");
    if (lines[i].at("op").as_string().find("linear") != 0) continue;
    flops += lines[i].at("flops").as_real();
    seconds += lines[i].at("seconds").as_real();
  }
  CHECK(flops > 1e6);
  CHECK(std::abs(seconds - flops * 1e-9) < 1e-9 * flops * 1e-6);
  CHECK(step_s >= seconds);
  CHECK(std::abs(lines[1].at("tokens_per_s").as_real() * step_s - 32) < 1e-6);
  CHECK(lines[1].at("layout") == "pp1-dp1-tp1");
  CHECK(lines[1].at("ranks") == 1);
  CHECK(lines[1].at("threads") == 1);
  CHECK(lines[1].at("bubble") == 0);
  CHECK(lines[1].at("peak_bytes") == lines[0].at("peak_bytes")[0]);
  CHECK(sg::parse_json(sg::testing::file_bytes(small.path("trace.json"))).at("traceEvents").size() > 100);

  const auto piped = json_lines(small.run("simulate", machine + " --json --set layout.pp=2").out).at(1);
  CHECK(piped.at("ranks") == 2);
  CHECK(piped.at("bubble").as_real() > 0.05);
  CHECK_THAT(small.run("simulate", machine).out, ContainsSubstring("simulated step: ") &&
                                                     ContainsSubstring(" tokens/s on 1 of 4 cores of ") &&
                                                     ContainsSubstring("linear_weight_gradient"));
  CHECK_THAT(small.run("simulate", "--machine " + put_machine(small, 1, "elsewhere")).err,
             ContainsSubstring("uses measurements of another machine, 'elsewhere'"));
}

TEST_CASE("simulate uses the measurements of a GPU, without the GPU", "[tools][simulate]") {
  const SmallRun small;
  const std::string path = small.path("gpu.json");
  // Products take a millisecond for each megaflop, ten times as long in fp32; copies and host updates are slow too.
  sg::Calibration machine{.host = "elsewhere", .device = "NVIDIA H200", .cores = 16, .threads = 1};
  for (const char* op :
       {"linear", "linear_gelu", "linear_input_gradient", "linear_input_gradient_gelu", "linear_weight_gradient"}) {
    machine.ops[op]      = {{1e6, 1e4, 1e-2, 1e-2}};
    machine.ops_bf16[op] = {{1e6, 1e4, 1e-3, 1e-3}};
  }
  machine.ops["adamw"]      = {{1e6, 1e6, 1e-9, 1e-9}};
  machine.ops["adamw@host"] = {{15e3, 28e3, 1, 1}};
  machine.ops["h2d"] = machine.ops["d2h"] = {{0, 1e3, 1e-3, 1e-3}};
  sg::save_calibration(machine, path);
  const auto seconds = [&](const std::string& more) {
    const auto outcome = small.run("simulate", "--json --backend cuda --machine " + path + " " + more);
    CAPTURE(outcome.err, more);
    REQUIRE(outcome.exit_code == 0);
    CHECK_THAT(outcome.err, !ContainsSubstring("measured in fp32") && !ContainsSubstring("but times are those of"));
    const auto line = json_lines(outcome.out).at(1);
    CHECK(line.at("device") == "NVIDIA H200");
    CHECK_FALSE(line.at("bound").as_string().empty());
    CHECK(line.at("bound_s").as_real() > 0.5 * line.at("step_s").as_real());
    CHECK(line.at("bound_s").as_real() <= line.at("step_s").as_real() * (1 + 1e-9));
    return line.at("step_s").as_real();
  };
  const double f32 = seconds(""), bf16 = seconds("--set precision.param=bf16");
  CHECK(f32 > 8 * bf16);
  CHECK(seconds("--set offload.optimizer=true") > 2 * f32);  // the host's updates
  CHECK_THAT(small.run("simulate", "--machine " + path + " --set backend=cuda").out,
             ContainsSubstring(" tokens/s on 1 NVIDIA H200 and 1 of 16 cores of elsewhere\ndevices busy ") &&
                 ContainsSubstring("\nat least ") && ContainsSubstring(" ms, bound by compute\n"));
  CHECK_THAT(small.run("simulate", "--machine " + path).err,
             ContainsSubstring("backend loopback, but times are those of NVIDIA H200"));
  CHECK_THAT(small.run("simulate", "--backend cuda --machine " + put_machine(small)).err,
             ContainsSubstring("backend cuda, but times are those of a processor"));
}

TEST_CASE("simulate names its other sources where there is no GPU to measure", "[tools][simulate][refuses]") {
  const SmallRun small;
  const auto outcome = small.run("simulate", "--backend cuda --set devices=[99]");  // in no machine
  CHECK(outcome.exit_code == 3);
  CHECK(outcome.out.empty());
  CHECK_THAT(outcome.err, ContainsSubstring("backend cuda: no device can be measured here: ") &&
                              ContainsSubstring("--machine FILE") && ContainsSubstring("--cluster FILE"));
}

TEST_CASE("simulate predicts the time of a step on a cluster that is described", "[tools][simulate]") {
  const SmallRun small;
  sg::testing::write_file(small.path("cluster.json"), R"({"preset": "a100", "nodes": 2, "memory_bytes": "1MB"})");
  const std::string cluster = "--cluster " + small.path("cluster.json");
  const auto outcome = small.run("simulate", cluster + " --json --set layout.dp=2 --trace " + small.path("trace.json"));
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() > 5);
  CHECK(lines[0].at("type") == "plan");
  const auto& step = lines[1];
  CHECK(step.at("type") == "simulate");
  CHECK(step.at("cluster") == "a100");
  CHECK(step.at("cluster_nodes") == 2);
  CHECK(step.at("devices_per_node") == 8);
  CHECK(step.at("ranks") == 2);
  CHECK(step.at("memory_bytes") == 1'000'000);
  CHECK(step.at("fits") == (step.at("peak_bytes").as_integer() <= 1'000'000));
  double flops = 0;
  for (std::size_t i = 2; i < lines.size(); ++i) {
    CHECK(lines[i].at("type") == "op");
    flops += lines[i].at("flops").as_real();
  }
  const double rate = step.at("flops_per_device_s").as_real();
  CHECK(std::abs(rate * 2 * step.at("step_s").as_real() - flops) < 1e-6 * flops);
  CHECK(std::abs(step.at("share_of_peak").as_real() * 19.5e12 - rate) < 1e-6 * rate);  // in fp32
  for (const char* share : {"compute_busy", "overlap", "bubble", "share_of_peak"}) {
    CHECK(step.at(share).as_real() >= 0);
    CHECK(step.at(share).as_real() <= 1);
  }
  CHECK(sg::parse_json(sg::testing::file_bytes(small.path("trace.json"))).at("traceEvents").size() > 100);

  CHECK_THAT(small.run("simulate", cluster).out,
             ContainsSubstring(" tokens/s on 1 of 16 devices (a100, 2 x 8)\ncompute lanes busy "));
  sg::testing::write_file(small.path("cluster.json"), R"({"preset": "h100", "memory_bytes": "10kB"})");
  CHECK_THAT(small.run("simulate", cluster).out, ContainsSubstring("\nmemory: does not fit: rank 0 needs ") &&
                                                     ContainsSubstring(", a device has 9.8 KiB\n"));
  sg::testing::write_file(small.path("cluster.json"), R"({"preset": "h100"})");
  CHECK_THAT(small.run("simulate", cluster).out, ContainsSubstring(" of the 75 GiB of a device\n"));
}

TEST_CASE("simulate refuses a cluster that does not fit the layout or is not one", "[tools][simulate][refuses]") {
  const SmallRun small;
  sg::testing::write_file(small.path("cluster.json"), R"({"preset": "a100", "devices_per_node": 2})");
  sg::testing::write_file(small.path("wrong.json"), R"({"preset": "a100", "nods": 2})");
  const std::string cluster = "--cluster " + small.path("cluster.json");
  for (const auto& [more, why] : sg::testing::some_of(std::vector<std::pair<std::string, std::string>>{
           {cluster + " --set layout.dp=4",
            "cluster.json': cluster: the layout has 4 ranks, but there are 2 devices (1 x 2"},
           {cluster + " --machine " + put_machine(small),
            "--cluster and --machine: a cluster is described, not measured"},
           {cluster + " --calibrate", "--cluster and --calibrate: a cluster is described, not measured"},
           {cluster + " --threads 2", "--cluster and --threads: a cluster is described, not measured"},
           {"--cluster " + small.path("wrong.json"), "wrong.json: nods: unknown key (did you mean nodes?"},
           {"--cluster " + small.path("none.json"), "none.json: there is no such file"},
       })) {
    CAPTURE(more);
    const auto outcome = small.run("simulate", more);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph simulate: ") && ContainsSubstring(why));
  }
}

TEST_CASE("commands take the machine for adaptive collectives from the config", "[tools][simulate]") {
  const SmallRun small;
  // Rounds cost all of the time, or bytes do.
  const auto put = [&](const char* latency, const char* bandwidth) {
    sg::testing::write_file(small.path("m.json"),
                            sg::str(R"({"preset": "a100", "links": {"inside": {"latency": ")", latency,
                                    R"(", "bandwidth": ")", bandwidth, R"("}, "between": {"latency": "9s"}}})"));
  };
  const auto nodes = [&](const std::string& command, const std::string& more) {
    const auto outcome = small.run(command, "--json --set layout.dp=4 --set comm.algorithm=adaptive " + more);
    CAPTURE(outcome.err);
    REQUIRE(outcome.exit_code == 0);
    for (const auto& line : json_lines(outcome.out)) {
      if (line.at("type") == "plan") return line.at("nodes").as_integer();
    }
    return std::int64_t{0};
  };
  const std::string machine = "--set comm.machine=" + small.path("m.json");
  put("1s", "900GB/s");
  const auto direct = nodes("graph", machine);
  put("0s", "1MB/s");
  CHECK(nodes("graph", machine) >= direct);
  CHECK(nodes("verify", machine) == nodes("graph", machine));
  CHECK(nodes("train", "--steps 1 " + machine) == nodes("graph", machine));
  CHECK(nodes("simulate", "--cluster " + small.path("m.json")) == nodes("graph", machine));
  const auto refused = small.run("eval", "--set comm.algorithm=adaptive --set comm.machine=" + small.path("no.json"));
  CHECK(refused.exit_code == 2);
  CHECK_THAT(refused.err, ContainsSubstring("comm.machine: ") && ContainsSubstring("no.json: there is no such file"));
}

TEST_CASE("the calibration of another machine is not overwritten", "[tools][simulate][refuses]") {
  const SmallRun small;
  const std::string theirs = put_machine(small, 1, "elsewhere"), before = sg::testing::file_bytes(theirs);
  const auto outcome = small.run("simulate", "--calibrate --machine " + theirs);
  CHECK(outcome.exit_code == 2);
  CHECK_THAT(outcome.err, ContainsSubstring("machine.json' was measured on 'elsewhere', but this is '"));
  CHECK(sg::testing::file_bytes(theirs) == before);
}

TEST_CASE("simulate refuses a calibration that does not fit, and says what to do", "[tools][simulate][refuses]") {
  const SmallRun small;
  sg::testing::TempFolder folder;
  const std::string broken = folder.put("broken.json", "{\"type\": \"machine\"}").string();
  for (const auto& [more, why] : sg::testing::some_of(std::vector<std::pair<std::string, std::string>>{
           {"--machine " + broken,
            "broken.json: has no \"version\" (a file that `stepgraph simulate --calibrate` wrote)"},
           {"--machine " + small.config(), "run.json: does not describe a machine (a file that"},
           {"--machine " + small.path("none.json"), "none.json"},
           {"--machine " + put_machine(small, 3),
            "was measured with 3 threads, but the run has 1 (--threads 3, or --calibrate"},
           {"--machine " + small.path("machine.json") + " --threads 3 --trace -",
            "--trace -: stdout is for the results"},
       })) {
    CAPTURE(more);
    const auto outcome = small.run("simulate", more);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph simulate: ") && ContainsSubstring(why));
  }
  // A calibration in the cache that another machine wrote is refused.
  const auto path   = sg::calibration_path(1);
  const auto cached = folder / "stepgraph" / path.filename().string();
  sg::save_calibration({.host = "elsewhere", .cores = 4, .threads = 1, .ops = {{"linear", {{1, 1, 1, 1}}}}}, cached);
  const auto outcome = sg::testing::run_command(sg::str("XDG_CACHE_HOME=", folder.path().string(), " ",
                                                        sg::testing::command_path(), " simulate ", small.config()));
  CHECK(outcome.exit_code == 2);
  CHECK_THAT(outcome.err, ContainsSubstring(cached.string() + ": was measured on 'elsewhere'") &&
                              ContainsSubstring("(--calibrate to measure again"));
}

TEST_CASE("bench train prints the promised fields and nothing else", "[tools][bench]") {
  const auto outcome = sg::testing::run_stepgraph(
      "bench train --models tiny --layouts 1x1x1,2x1x1,1x2x1,1x1x2 --threads 2 --dry-run --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  std::vector<std::string> layouts;
  std::size_t kernels = 0;
  double share        = 0;
  for (const auto& line : json_lines(outcome.out)) {
    if (line.at("type") == "kernel") {
      ++kernels;
      share += line.at("share").as_real();
      for (const char* field : {"nodes", "ms", "share", "gflops", "GBps"}) CHECK(line.at(field).is_number());
      if (line.at("ms").as_real() > 0) CHECK(line.at("floor_share").as_real() >= 0);
      CHECK(line.at("threads") == 2);
      CHECK(line.at("op").is_string());
      continue;
    }
    CHECK(line.at("type") == "train");
    CHECK(line.at("model") == "tiny");
    CHECK(line.at("backend") == "loopback");
    CHECK(line.at("shard") == "none");
    layouts.push_back(line.at("layout").as_string());
    // 6 (12 L d^2 + V d) + 12 L T d
    CHECK(line.at("flops_per_token") == 6 * (12 * 2 * 16 * 16 + 64 * 16) + 12 * 2 * 8 * 16);
    for (const char* field : {"tokens_per_s", "step_s", "peak_gflops", "share_of_peak", "peak_bytes", "ratio_to_1x1x1",
                              "fma_gflops", "triad_GBps", "share_of_fma"})
      CHECK(line.at(field).as_real() > 0);
    CHECK(line.at("lower_bound_bytes").as_integer() <= line.at("peak_bytes").as_integer());
    for (const char* field : {"resident_bytes", "process_bytes", "cpu_share"}) CHECK(line.at(field).is_number());
    const bool in_pieces = layouts.back() == "1x2x1" || layouts.back() == "1x1x2";
    CHECK(line.at("global_batch") == (in_pieces ? 32 : 4));
    CHECK(line.at("micro_batch") == (layouts.back() == "2x1x1" ? 2 : 4));
  }
  CHECK(layouts == std::vector<std::string>{"1x1x1", "2x1x1", "1x2x1", "1x1x2"});
  CHECK(kernels > 40);
  CHECK(std::abs(share - 4) < 1e-6);
  for (const auto& [arguments, why] :
       {std::pair{"--models XXL", "XXL"}, std::pair{"--models tiny --layouts 2x2", "2x2"},
        std::pair{"--models tiny --layouts 3x1x1", "over 3 data-parallel ranks"},
        std::pair{"--threads 1,0", "--threads"},
        std::pair{"--threads 1,2 --layouts 2x1x1 --update synchronous", "several numbers are for backend loopback"}}) {
    const auto refused = sg::testing::run_stepgraph(sg::str("bench train ", arguments));
    CHECK(refused.exit_code == 2);
    CHECK_THAT(refused.err, ContainsSubstring(why));
  }
}

TEST_CASE("bench train with several numbers of threads prints the scaling", "[tools][bench]") {
  const std::string command = "bench train --models tiny --layouts 1x1x1,2x1x1 --threads 1,2,3 --dry-run";
  const auto outcome        = sg::testing::run_stepgraph(command + " --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  std::vector<std::string> trained, scaled;
  std::map<std::string, double> tokens_per_s;  // by layout and threads
  const auto name_of = [](const auto& line) {
    return sg::str(line.at("layout").as_string(), " ", line.at("threads").as_integer());
  };
  for (const auto& line : json_lines(outcome.out)) {
    if (line.at("type") == "train") {
      trained.push_back(name_of(line));
      tokens_per_s[trained.back()] = line.at("tokens_per_s").as_real();
    } else if (line.at("type") == "scaling") {
      scaled.push_back(name_of(line));
      CHECK(line.at("first_threads") == 1);
      const double speed = tokens_per_s.at(scaled.back());
      CHECK(line.at("tokens_per_s").as_real() == speed);
      CHECK(line.at("speedup").as_real() == speed / tokens_per_s.at(line.at("layout").as_string() + std::string(" 1")));
      CHECK(line.at("share_of_fma_speedup").as_real() ==
            line.at("speedup").as_real() / line.at("fma_speedup").as_real());
      CHECK(line.at("cpu_share").as_real() > 0);
    }
  }
  CHECK(trained == std::vector<std::string>{"1x1x1 1", "2x1x1 1", "1x1x1 2", "2x1x1 2", "1x1x1 3", "2x1x1 3"});
  CHECK(scaled == std::vector<std::string>{"1x1x1 1", "1x1x1 2", "1x1x1 3", "2x1x1 1", "2x1x1 2", "2x1x1 3"});
  CHECK_THAT(sg::testing::run_stepgraph(command).out,
             ContainsSubstring("of floor") && ContainsSubstring("of multiply-adds"));
}

TEST_CASE("bench pipeline has a measured and a predicted bubble for each schedule", "[tools][bench]") {
  const auto outcome =
      sg::testing::run_stepgraph("bench pipeline --model tiny --schedules 1f1b,zb-h1 --dry-run --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() == 2);
  for (const auto& line : lines) {
    CHECK(line.at("type") == "pipeline");
    CHECK(line.at("step_s").as_real() > 0);
    for (const char* field : {"measured_bubble", "predicted_bubble"}) {
      CHECK(line.at(field).as_real() >= 0);
      CHECK(line.at(field).as_real() < 1);
    }
  }
  CHECK(lines[0].at("peak_activation") == 2);
  CHECK(sg::testing::run_stepgraph("bench pipeline --schedules 1f1b,zb-w --dry-run").exit_code == 2);
}

TEST_CASE("bench predict has a predicted and a measured time for each layout", "[tools][bench]") {
  if (sg::testing::sanitized()) return;  // the next test runs the same code
  const auto outcome = sg::testing::run_stepgraph(
      "bench predict --models tiny --layouts 1x1x1,2x2x2 --threads 2 --rounds 2 --dry-run --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() == 2);
  for (const auto& line : lines) {
    CHECK(line.at("type") == "predict");
    CHECK(line.at("rounds") == 2);
    for (const char* field : {"predicted_s", "measured_s", "ratio"}) CHECK(line.at(field).as_real() > 0);
  }
}

TEST_CASE("bench predict --kernels prints the time of each kernel in a step", "[tools][bench]") {
  const auto outcome =
      sg::testing::run_stepgraph("bench predict --models tiny --layouts 2x1x1 --threads 2 --kernels --dry-run --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  double predicted_s = 0, measured_s = 0, of_kernels_predicted_s = 0, of_kernels_measured_s = 0, num_updates = 0;
  for (const auto& line : json_lines(outcome.out)) {
    const bool of_kernel = line.at("type") == "predict_kernel";
    CHECK(line.at("layout") == "2x1x1");
    (of_kernel ? of_kernels_predicted_s : predicted_s) += line.at("predicted_s").as_real();
    (of_kernel ? of_kernels_measured_s : measured_s) += line.at("measured_s").as_real();
    CHECK(line.at("predicted_s").as_real() >= 0);
    CHECK(line.at("measured_s").as_real() >= 0);
    if (of_kernel && line.at("op") == "adamw") num_updates = line.at("nodes").as_real();
  }
  CHECK(num_updates > 0);
  CHECK(of_kernels_predicted_s <= 1.001 * predicted_s);
  CHECK(of_kernels_measured_s <= 1.001 * measured_s);
}
