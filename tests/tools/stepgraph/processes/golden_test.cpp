// The golden models over real processes: losses, norms and first gradients have loopback's bits.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/processes/launched.hpp"
#include "tests/support/training/golden.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::Matches;
using sg::str;
using sg::testing::Outcome;

namespace {

struct Setting {
  int size;
  std::string options;
};
const Setting full4{4, "--set layout.dp=4 --set shard.strategy=full"};
const Setting zero_bubble{2, "--set layout.pp=2 --set pipeline.schedule=zb-h1"};
const Setting searched{
    2, "--set layout.pp=2 --set pipeline.schedule=auto --set pipeline.limit=2 --set pipeline.split=balanced"};

void check_golden(const std::string& backend, const std::string& model, const Setting& setting, int limit_s = 100) {
  CAPTURE(backend, model, setting.size, setting.options);
  sg::testing::require_backend(backend);
  const sg::testing::TempFolder files;
  const std::string run  = str("train ", files.put("run.json", sg::testing::golden_config(model)).string(),
                               " --steps 20 --json ", setting.options, " --dump-grads ");
  const std::string here = (files / "here.safetensors").string(), there = (files / "there.safetensors").string();
  const Outcome loopback = sg::testing::run_stepgraph(run + here);
  const Outcome found    = sg::testing::run_over(backend, setting.size, run + there, limit_s);
  CAPTURE(loopback.err, found.err);
  REQUIRE(loopback.exit_code == 0);
  REQUIRE(found.exit_code == 0);
  CHECK(sg::testing::json_lines(loopback.out).size() > 20);
  CHECK(sg::testing::without_times(found.out) == sg::testing::without_times(loopback.out));
  CHECK(sg::testing::file_bytes(here) == sg::testing::file_bytes(there));
  if (setting.options != searched.options) return;
  // Process 0 searches, and tells the others.
  for (const std::string& err : {loopback.err, found.err})
    CHECK_THAT(err, ContainsSubstring(" found by ") && !Matches("[^]*found by[^]*found by[^]*"));
}

}  // namespace

TEST_CASE("the golden models train over Gloo to the bits of loopback", "[tools][golden][jobs]") {
  if (sg::testing::is_sanitized()) SKIP("sanitized builds train smaller models over processes");
  check_golden("gloo", "gpt2-tiny", full4);
  check_golden("gloo", "llama-tiny", zero_bubble);
  check_golden("gloo", "gpt2-tiny", searched);
}

TEST_CASE("the golden models train over MPI to the bits of loopback", "[tools][golden][jobs]") {
  if (sg::testing::is_sanitized()) SKIP("sanitized builds train smaller models over processes");
  check_golden("mpi", "gpt2-tiny", zero_bubble);
  check_golden("mpi", "llama-tiny", full4);
}

TEST_CASE("the golden models train over processes to the bits of loopback in every layout",
          "[.nightly][tools][golden][jobs]") {
  const std::string backend = GENERATE("gloo", "mpi");
  const std::string model   = GENERATE("gpt2-tiny", "llama-tiny");
  const Setting setting =
      GENERATE(Setting{2, "--set layout.dp=2"}, Setting{2, "--set layout.tp=2"}, Setting{2, "--set layout.pp=2"},
               zero_bubble, Setting{8, "--set layout.dp=2 --set layout.tp=2 --set layout.pp=2"},
               Setting{2, "--set layout.dp=2 --set shard.strategy=full"}, full4);
  check_golden(backend, model, setting, 600);  // MPI polls: where other programs use all cores, a step takes seconds
}
