// STEPGRAPH_INSTRUCTIONS: every kind of instructions that this machine has trains as transformers does.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstdlib>

#include "engine/base/error.hpp"
#include "ops/cpu/instructions.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/processes/launched.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/golden.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::str;
using sg::testing::Outcome;

namespace {

// Under an emulator only those that not every processor has: the others are tested without it.
std::vector<std::string> instructions_here() {
  const bool emulated = std::getenv("STEPGRAPH_EMULATOR") != nullptr;
  std::vector<std::string> found;
  for (const sg::cpu::Instructions each : sg::cpu::all_instructions) {
    const bool everywhere = each == sg::cpu::Instructions::of_the_build || each == sg::cpu::Instructions::neon;
    if (sg::cpu::has(each) && !(emulated && everywhere)) found.emplace_back(to_string(each));
  }
  return found;
}

// Under an emulator, which has other instructions than the machine, STEPGRAPH_EMULATOR starts it for each program.
Outcome run_with(const std::string& instructions, const std::string& arguments) {
  return sg::testing::run_bash(str("STEPGRAPH_INSTRUCTIONS=", instructions, " $STEPGRAPH_EMULATOR ",
                                   sg::testing::command_path(), " ", arguments));
}

}  // namespace

TEST_CASE("the golden models train within their bounds with every kind of instructions, in fp32 and in bf16",
          "[tools][golden][instructions]") {
  const std::string model        = GENERATE("gpt2-tiny", "llama-tiny");
  const std::string instructions = GENERATE(from_range(instructions_here()));
  const std::string precision    = GENERATE("fp32", "bf16");
  // Sanitized: bf16 of one model. The next test has the other.
  if (sg::testing::scale() > 1 && (precision == "fp32" || model == "gpt2-tiny")) return;
  CAPTURE(model, instructions, precision);
  const sg::testing::TempFolder files;
  const int steps             = sg::testing::cases(20);
  const std::string gradients = (files / "gradients.safetensors").string();
  const Outcome found         = run_with(
              instructions, str("train ", files.put("run.json", sg::testing::golden_config(model)).string(), " --steps ", steps,
                                " --json --set threads=3 --set precision.param=", precision, " --dump-grads ", gradients));
  CAPTURE(found.err);
  REQUIRE(found.exit_code == 0);
  const sg::testing::Golden& golden   = sg::testing::golden(model);
  const sg::testing::Trained& trained = sg::testing::trained_by_command(found.out, gradients);
  if (precision == "fp32") {
    sg::testing::check_golden_bounds(golden, trained, steps);
    return;
  }
  const sg::testing::GoldenErrors errors = sg::testing::golden_errors(golden, trained, steps);
  // Numbers of 8 bits. Kernels that widen them are as far away as those that multiply them.
  CHECK(errors.loss < 1e-3);
  CHECK(errors.norm < 0.02);
  CHECK(errors.gradient < 0.05);
}

TEST_CASE("training in bf16 has the same bits on 1, 2, 3, 8 and 16 threads with every kind of instructions",
          "[tools][instructions]") {
  const std::string instructions = GENERATE(from_range(instructions_here()));
  CAPTURE(instructions);
  const sg::testing::TempFolder files;
  // Large enough that its products are cut.
  const std::string run =
      str("train ",
          files
              .put("run.json", str(R"({"model": {"kind": "gpt2", "layers": )", sg::testing::sanitized() ? 1 : 2,
                                   R"(, "width": 160, "heads": 4, "context": 96, "vocab": 500},
                   "data": {"synthetic": 3}, "batch": {"global": 4, "micro": 2, "seq": 96},
                   "precision": {"param": "bf16"}})"))
              .string(),
          " --steps ", sg::testing::cases(3), " --json");
  std::string first;
  for (const int threads : {1, 2, 3, 8, 16}) {
    if (sg::testing::sanitized() && threads != 1 && threads != 8) continue;
    const Outcome found = run_with(instructions, str(run, " --threads ", threads));
    CAPTURE(threads, found.err);
    REQUIRE(found.exit_code == 0);
    std::string steps;
    for (const sg::JsonValue& line : sg::testing::json_lines(found.out)) {
      if (line.at("type") == "step") steps += str(line.at("loss"), " ", line.at("grad_norm"), "\n");
    }
    if (threads == 1) first = steps;
    CHECK(steps == first);
    CHECK_FALSE(steps.empty());
  }
}

TEST_CASE("without a name the last instructions that the machine has are chosen, except those only used by name",
          "[tools][instructions]") {
  if (std::getenv("STEPGRAPH_INSTRUCTIONS") != nullptr) SKIP("STEPGRAPH_INSTRUCTIONS names the instructions");
  auto last = sg::cpu::Instructions::of_the_build;
  for (const sg::cpu::Instructions each : sg::cpu::all_instructions) {
    const bool by_name = each == sg::cpu::Instructions::avx512_bf16 || each == sg::cpu::Instructions::sve;
    if (sg::cpu::has(each) && !by_name) last = each;
  }
  CHECK(to_string(sg::cpu::product_instructions()) == to_string(last));
}

TEST_CASE("instructions that do not exist or that the machine does not have are refused by name",
          "[tools][instructions]") {
  const sg::testing::SmallRun small;
  const Outcome unknown = run_with("sse9", str("train ", small.config()));
  CHECK(unknown.exit_code == 2);
  CHECK_THAT(unknown.err, ContainsSubstring("STEPGRAPH_INSTRUCTIONS: 'sse9' does not exist (build, "));
  const Outcome bench = run_with("sse9", "bench adam --dry-run");
  CHECK(bench.exit_code == 2);
  CHECK_THAT(bench.err, ContainsSubstring("STEPGRAPH_INSTRUCTIONS: 'sse9' does not exist (build, "));
  for (const sg::cpu::Instructions each : sg::cpu::all_instructions) {
    if (sg::cpu::has(each)) continue;
    const Outcome missing = run_with(std::string(to_string(each)), str("train ", small.config()));
    CAPTURE(to_string(each));
    CHECK(missing.exit_code == 2);
    CHECK_THAT(missing.err, ContainsSubstring(str("STEPGRAPH_INSTRUCTIONS: '", to_string(each),
                                                  "' is not available on this machine (build, ")));
  }
}
