// The golden models over NCCL, with processes that share the first GPU.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "engine/base/error.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/processes/launched.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/golden.hpp"

namespace sg = stepgraph;
using sg::str;
using sg::testing::Outcome;
using sg::testing::Trained;

namespace {

struct Setting {
  int size;
  std::string options;
};

Trained train(const std::string& backend, const std::string& model, const Setting& setting, int steps,
              const std::string& more) {
  const sg::testing::TempFolder files;
  const std::string gradients = (files / "gradients.safetensors").string();
  const std::string command =
      str("train ", files.put("run.json", sg::testing::golden_config(model)).string(), " --json --steps ", steps, " ",
          setting.options, " --dump-grads ", gradients, " ", more);
  std::string shared = "0";
  for (int rank = 1; rank < setting.size; ++rank) shared += ",0";
  const Outcome run = backend == "nccl"
                          ? sg::testing::run_over(backend, setting.size, command + " --devices " + shared, 200)
                          : sg::testing::run_stepgraph(command + " --set backend=" + backend);
  CAPTURE(backend, run.err);
  REQUIRE(run.exit_code == 0);
  return sg::testing::trained_by_command(run.out, gradients);
}

void check_over_nccl(const std::string& model) {
  sg::testing::require_backend("nccl");
  sg::testing::need_device();
  const Setting setting =
      GENERATE(Setting{2, "--set layout.dp=2"}, Setting{2, "--set layout.tp=2"}, Setting{2, "--set layout.pp=2"},
               Setting{2, "--set layout.dp=2 --set shard.strategy=full"},
               Setting{4, "--set layout.dp=2 --set layout.tp=2"}, Setting{4, "--set layout.tp=2 --set layout.pp=2"});
  CAPTURE(model, setting.size, setting.options);
  constexpr int all_steps = 20, exact_steps = 4;
  sg::testing::check_golden_bounds(sg::testing::golden(model), train("nccl", model, setting, all_steps, ""), all_steps);
  const Trained exact = train("nccl", model, setting, exact_steps, "--set comm.exact=true");
  const Trained one   = train("cuda", model, setting, exact_steps, "");
  CHECK(exact.loss == one.loss);
  CHECK(exact.grad_norm == one.grad_norm);
  CHECK(exact.gradients == one.gradients);
}

}  // namespace

TEST_CASE("GPT-2 trains over NCCL as transformers does, and with exact sums to the bits of one process",
          "[tools][cuda][nccl][golden][jobs]") {
  check_over_nccl("gpt2-tiny");
}
TEST_CASE("Llama trains over NCCL as transformers does, and with exact sums to the bits of one process",
          "[tools][cuda][nccl][golden][jobs]") {
  check_over_nccl("llama-tiny");
}
