// offload in the commands: what they print, refuse and draw.
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>

#include "engine/base/error.hpp"
#include "graphs/plan/offload_plan.hpp"
#include "graphs/predict/calibration.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/sanitizer.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using sg::testing::json_lines;
using sg::testing::SmallRun;

namespace {

std::vector<sg::JsonValue> of_type(const std::string& out, std::string_view type) {
  std::vector<sg::JsonValue> found;
  for (const sg::JsonValue& line : json_lines(out))
    if (line.at("type") == type) found.push_back(line);
  return found;
}

std::vector<std::string> losses(const std::string& out) {
  std::vector<std::string> all;
  for (const sg::JsonValue& line : of_type(out, "step")) all.push_back(line.at("loss").text);
  return all;
}

}  // namespace

TEST_CASE("train prints what offload moves, once, and the same losses", "[tools][offload]") {
  const SmallRun small;
  const auto plain = small.run("train", "--steps 3 --json");
  const auto moved = small.run("train", "--steps 3 --json --set offload.optimizer=true --set offload.params=true");
  CAPTURE(moved.err);
  REQUIRE(moved.exit_code == 0);
  CHECK(losses(moved.out) == losses(plain.out));
  CHECK(of_type(plain.out, "offload").empty());
  const auto lines = of_type(moved.out, "offload");
  REQUIRE(lines.size() == 1);
  const sg::JsonValue& line = lines[0];
  CHECK(line.at("h2d_bytes").as_integer() > 0);
  CHECK(line.at("d2h_bytes").as_integer() > 0);
  CHECK(line.at("disk_read_bytes") == 0);
  CHECK(line.at("disk_write_bytes") == 0);
  CHECK(line.at("exposed_s").as_real() >= 0);
  CHECK(line.at("exposed_s").as_real() <= line.at("transfer_s").as_real());
  CHECK(line.at("disk_bytes") == 0);
  CHECK(line.at("strategy") == "manual");
  CHECK(line.at("compress") == "none");
  CHECK(line.at("lossy") == false);
  CHECK(line.at("ratio").as_real() == 1);
  std::int64_t params = 0, states = 0;
  for (const sg::JsonValue& unit : line.at("units").items) {
    CHECK(unit.at("space") == "host");
    CHECK_FALSE(unit.at("unit").text.empty());
    const bool is_state = unit.at("class") == "optimizer";
    (is_state ? states : params) += unit.at("bytes").as_integer();
    CHECK(unit.at("update") == (is_state ? "host" : "none"));
  }
  CHECK(params > 0);
  CHECK(states == 2 * params);
  CHECK(line.at("host_bytes").as_integer() >= params + states);
  const auto plan = of_type(moved.out, "plan").at(0);
  CHECK(plan.at("host_bytes")[0] == line.at("host_bytes"));
  CHECK(plan.at("peak_bytes")[0].as_integer() < of_type(plain.out, "plan").at(0).at("peak_bytes")[0].as_integer());

  // One step, in words.
  const auto words = small.run("train", "--steps 1 --set offload.grads=true");
  CHECK(words.exit_code == 0);
  CHECK_THAT(words.err,
             ContainsSubstring("stepgraph train: offload: grads ") && ContainsSubstring(" to the device and "));
  CHECK_THAT(words.out, ContainsSubstring(" in its host memory"));
  CHECK_THAT(words.err, !ContainsSubstring("lossy"));
  CHECK_THAT(small.run("train", "--steps 1 --set offload.grads=true --set offload.compress=bf16").err,
             ContainsSubstring("; compress bf16 is lossy: it changes losses; "));
  const auto weights = small.run("train", "--steps 1 --set offload.params=true --set offload.compress=bf16");
  CHECK_THAT(weights.err, ContainsSubstring("; compress bf16 is lossy: it changes losses, and weights are rounded "
                                            "after each update; "));
}

TEST_CASE("train keeps what does not fit the host on disk", "[tools][offload][disk]") {
  const SmallRun small;
  const std::string disk = small.path("spill");
  std::filesystem::create_directory(disk);
  const auto plain = small.run("train", "--steps 2 --json");
  const auto moved = small.run("train",
                               "--steps 2 --json --set offload.optimizer=true --set offload.host_bytes=64KiB "
                               "--set offload.disk=" +
                                   disk);
  CAPTURE(moved.err);
  REQUIRE(moved.exit_code == 0);
  CHECK(losses(moved.out) == losses(plain.out));
  const auto line = of_type(moved.out, "offload").at(0);
  CHECK(line.at("disk_read_bytes").as_integer() > 0);
  CHECK(line.at("disk_write_bytes").as_integer() > 0);
  CHECK(line.at("disk_bytes").as_integer() > 0);
  CHECK(line.at("host_bytes").as_integer() <= 64 << 10);
  CHECK(std::filesystem::is_empty(disk));

  // Tensors of several chunks, compressed.
  const std::string large = "--steps 2 --json --set model.vocab=1024 ";
  const auto packed       = small.run("train", large +
                                                   "--set offload.params=true --set offload.compress=lossless --set "
                                                         "offload.host_bytes=64KiB --set offload.disk=" +
                                                   disk);
  CAPTURE(packed.err);
  REQUIRE(packed.exit_code == 0);
  CHECK(losses(packed.out) == losses(small.run("train", large).out));
  CHECK(of_type(packed.out, "offload").at(0).at("ratio").as_real() < 1);

  // A limit of file sizes is reported as a full disk is. ThreadSanitizer does not start with one.
  if (sg::testing::sanitizer() != sg::testing::Sanitizer::thread) {
    const auto limited = sg::testing::run_bash(
        sg::str("ulimit -f 8; exec ", sg::testing::command_path(), " train ", small.config(),
                " --steps 1 --set offload.optimizer=true --set offload.host_bytes=64KiB --set offload.disk=", disk));
    CAPTURE(limited.err);
    CHECK(limited.exit_code == 3);
    CHECK_THAT(limited.err, ContainsSubstring("storage: spill file of rank 0 in '") &&
                                ContainsSubstring("File too large (a larger limit of file sizes, ulimit -f, or"));
  }

  const auto refused =
      small.run("train", "--steps 1 --set offload.optimizer=true --set offload.disk=" + disk + "/none");
  CHECK(refused.exit_code == 2);
  CHECK_THAT(refused.err, ContainsSubstring("offload.disk: '") && ContainsSubstring("' does not exist (a folder"));
  // Commands that run nothing can plan for another machine.
  for (const char* command : {"plan-memory", "graph", "verify"}) {
    CAPTURE(command);
    CHECK(small
              .run(command,
                   "--set offload.optimizer=true --set offload.host_bytes=64KiB --set offload.disk=" + disk + "/none")
              .exit_code == 0);
  }
  if (geteuid() != 0) {  // root can write to every folder
    std::filesystem::permissions(disk, std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
    const auto read_only = small.run("train", "--steps 1 --set offload.optimizer=true --set offload.disk=" + disk);
    std::filesystem::permissions(disk, std::filesystem::perms::owner_all);
    CHECK(read_only.exit_code == 2);
    CHECK_THAT(read_only.err, ContainsSubstring("offload.disk: '") && ContainsSubstring("cannot be written to"));
  }
  const std::string weights = "--set offload.params=true --set offload.host_bytes=64KiB --set offload.disk=" + disk;
  const auto eval           = small.run("eval", "--json " + weights);
  CAPTURE(eval.err);
  REQUIRE(eval.exit_code == 0);
  CHECK(json_lines(eval.out).at(0).at("loss") == json_lines(small.run("eval", "--json").out).at(0).at("loss"));
  CHECK(eval.err.find("lossy") == std::string::npos);
  const auto rounded = small.run("eval", "--set offload.params=true --set offload.compress=bf16");
  CHECK(rounded.exit_code == 0);
  CHECK_THAT(rounded.err,
             ContainsSubstring("stepgraph eval: note: offload.compress bf16 is lossy: weights are rounded, "
                               "which changes the results\n"));
  // An evaluation has no states of the optimizer, so nothing is moved.
  CHECK(small.run("eval", "--set offload.optimizer=true --set offload.host_bytes=1KiB").exit_code == 0);
  const std::string prompt = "--prompt ab --tokens 2 ";
  const auto generate      = small.run("generate", prompt + weights);
  CAPTURE(generate.err);
  REQUIRE(generate.exit_code == 0);
  CHECK(generate.out == small.run("generate", prompt).out);
}

TEST_CASE("plan-memory, graph, verify and simulate show host and disk", "[tools][offload]") {
  const SmallRun small;
  const std::string offload = " --set offload.optimizer=true --set offload.grads=true";
  const auto plain          = json_lines(small.run("plan-memory", "--json").out).at(0);
  const auto row            = json_lines(small.run("plan-memory", "--json" + offload).out).at(0);
  CHECK(plain.at("host_bytes") == 0);
  CHECK(row.at("host_bytes").as_integer() >= plain.at("optimizer").as_integer() + plain.at("parameters").as_integer());
  CHECK(row.at("disk_bytes") == 0);
  CHECK(row.at("optimizer") == 0);
  CHECK(row.at("peak_bytes").as_integer() < plain.at("peak_bytes").as_integer());
  const auto table = small.run("plan-memory", offload);
  CHECK_THAT(table.out,
             StartsWith("ranks  parameters ") && ContainsSubstring("  lower bound") && ContainsSubstring("host\n"));
  CHECK_THAT(small.run("plan-memory").out, !ContainsSubstring("host"));

  for (const char* command : {"graph", "verify"}) {
    const auto line = json_lines(small.run(command, "--json" + offload).out).at(0);
    CHECK(line.at("host_bytes")[0] == row.at("host_bytes"));
    CHECK(line.at("disk_bytes")[0] == 0);
  }
  CHECK_THAT(small.run("verify", offload).out, ContainsSubstring("valid: no race"));
  const auto dot = small.run("graph", "--dot - --detail layer" + offload);
  CHECK(dot.exit_code == 0);
  for (const char* text : {"cluster_rank0_d2h", "cluster_rank0_h2d", "cluster_rank0_host", "device to pinned"})
    CHECK_THAT(dot.out, ContainsSubstring(text));
}

TEST_CASE("strategies of offload act by the budget of the device", "[tools][offload][strategy]") {
  const SmallRun small;
  const auto peak    = json_lines(small.run("plan-memory", "--json").out).at(0).at("peak_bytes").as_integer();
  const auto missing = small.run("train", "--steps 1 --set offload.strategy=balanced");
  CHECK(missing.exit_code == 2);
  CHECK_THAT(missing.err, ContainsSubstring("offload.strategy: balanced needs the size of the device"));
  const auto idle = small.run(
      "train", sg::str("--steps 1 --json --set offload.strategy=balanced --set offload.device_bytes=", 2 * peak));
  CAPTURE(idle.err);
  REQUIRE(idle.exit_code == 0);
  CHECK(of_type(idle.out, "offload").at(0).at("units").items.empty());
  CHECK_THAT(
      small.run("train", sg::str("--steps 1 --set offload.strategy=balanced --set offload.device_bytes=", 2 * peak))
          .err,
      ContainsSubstring("stepgraph train: offload: nothing is moved: the step fits the device\n"));
  const auto acts =
      small.run("train", sg::str("--steps 1 --json --set offload.strategy=balanced --set offload.device_bytes=", peak));
  CAPTURE(acts.err);
  REQUIRE(acts.exit_code == 0);
  CHECK_FALSE(of_type(acts.out, "offload").at(0).at("units").items.empty());
  CHECK(of_type(acts.out, "plan").at(0).at("peak_bytes")[0].as_integer() <= peak * 3 / 4);
  CHECK(losses(acts.out) == losses(idle.out));
  const auto refused =
      small.run("verify", sg::str("--set offload.strategy=conservative --set offload.device_bytes=", peak / 4));
  CHECK(refused.exit_code == 2);
  CHECK_THAT(refused.err, ContainsSubstring("offload.strategy: conservative moves at most 0.2"));
}

TEST_CASE("recompute auto prints what it has chosen for the layers", "[tools][offload][layers]") {
  const SmallRun small;
  const std::string batch = " --set batch.global=8 --set batch.micro=8";
  const auto peak         = [&](const std::string& kind) {
    const auto rows = json_lines(small.run("plan-memory", "--json --set recompute=" + kind + batch).out);
    return rows.at(0).at("peak_bytes").as_integer();
  };
  const std::int64_t limit = (peak("none") + peak("full")) / 2;
  const std::string chosen = sg::str(batch, " --set recompute=auto --set memory.limit_bytes=", limit);
  const sg::JsonValue layers{{"offloaded", 0}, {"recomputed", 1}, {"kept", 1}};
  const std::string text = "activations: 0 layers offloaded, 1 recomputed, 1 kept";
  CHECK(json_lines(small.run("plan-memory", "--json" + chosen).out).at(0).at("activation_layers") == layers);
  CHECK_THAT(small.run("plan-memory", chosen).out,
             ContainsSubstring("\nactivations: rank 0: 0 layers offloaded, 1 recomputed, 1 kept"));
  for (const char* command : {"graph", "verify"}) {
    CHECK(json_lines(small.run(command, "--json" + chosen).out).at(0).at("activation_layers") == layers);
    CHECK_THAT(small.run(command, chosen).out, ContainsSubstring(text));
  }
  const auto trained = small.run("train", "--steps 2 --json" + chosen);
  CAPTURE(trained.err);
  REQUIRE(trained.exit_code == 0);
  CHECK(of_type(trained.out, "plan").at(0).at("activation_layers") == layers);
  CHECK(of_type(trained.out, "plan").at(0).at("peak_bytes")[0].as_integer() <= limit);
  CHECK(losses(trained.out) == losses(small.run("train", "--steps 2 --json" + batch).out));
  const auto missing = small.run("train", "--steps 1 --set recompute=auto");
  CHECK(missing.exit_code == 2);
  CHECK_THAT(missing.err, ContainsSubstring("recompute: auto needs the size of the device, which is not known here"));
}

TEST_CASE("host_bytes is compared with the machine that a step is for", "[tools][offload]") {
  const SmallRun small;
  const std::int64_t here  = sg::machine_memory_bytes();
  const std::string budget = sg::str(" --set offload.optimizer=true --set offload.host_bytes=", here + 1);
  const auto refused       = small.run("train", "--steps 1" + budget);
  CHECK(refused.exit_code == 2);
  CHECK_THAT(refused.err, ContainsSubstring(sg::str("offload.host_bytes: ", here + 1,
                                                    " is above the memory of this machine (at most ", here)));
  const auto two = small.run(
      "train",
      sg::str("--steps 1 --set layout.dp=2 --set offload.optimizer=true --set offload.host_bytes=", here / 2 + 1));
  CHECK(two.exit_code == 2);
  CHECK_THAT(two.err,
             ContainsSubstring(sg::str("offload.host_bytes: ", here / 2 + 1, " for each of 2 ranks is above")));
  // A step can be planned for another machine. Its file may say how much memory that has.
  sg::Calibration machine{.host = "elsewhere", .cores = 4, .threads = 1};
  for (const char* op : {"linear", "adamw"}) machine.ops[op] = {{1e6, 1e4, 1e-3, 1e-3}};
  const std::string unknown = small.path("unknown.json"), large = small.path("large.json"),
                    tiny = small.path("tiny.json");
  sg::save_calibration(machine, unknown);
  machine.host_bytes = 2 * here;
  sg::save_calibration(machine, large);
  machine.host_bytes = 1 << 20;
  sg::save_calibration(machine, tiny);
  const std::string why      = sg::str("is above the memory of 'elsewhere' (at most ", 1 << 20);
  const std::string adaptive = " --set comm.algorithm=adaptive --set comm.machine=";
  for (const char* command : {"plan-memory", "graph", "verify"}) {
    CAPTURE(command);
    CHECK(small.run(command, budget).exit_code == 0);
    CHECK(small.run(command, budget + adaptive + large).exit_code == 0);
    CHECK(small.run(command, budget + adaptive + unknown).exit_code == 0);
    const auto tight = small.run(command, budget + adaptive + tiny);
    CHECK(tight.exit_code == 2);
    CHECK_THAT(tight.err, ContainsSubstring(why));
  }
  for (const std::string& file : {unknown, large})
    CHECK(small.run("simulate", budget + " --machine " + file).exit_code == 0);
  const auto tight = small.run("simulate", budget + " --machine " + tiny);
  CHECK(tight.exit_code == 2);
  CHECK_THAT(tight.err, ContainsSubstring(why));
}
