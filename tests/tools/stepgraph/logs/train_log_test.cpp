#include "tools/stepgraph/logs/train_log.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <csignal>
#include <limits>

#include "engine/base/error.hpp"
#include "graphs/files/json_value.hpp"
#include "tests/support/processes/killed_child.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg  = stepgraph;
namespace cli = stepgraph::cli;
using Catch::Matchers::ContainsSubstring;
using sg::testing::file_bytes;
using sg::testing::TempFolder;

namespace {

cli::StepRecord step(std::int64_t number) {
  const auto value = static_cast<double>(number);
  return {.step = number, .loss = 5 - value / 4, .rate = 1e-3, .grad_norm = 1.5, .tokens_per_s = 100, .seconds = value};
}

// Two runs: the first ends after 6 steps, the second goes on from step `at`.
std::string two_runs(const std::string& path, std::int64_t at) {
  {
    cli::TrainLog log(path, 0);
    for (int i = 0; i < 6; ++i) {
      log.add(step(i));
      if (i % 2 == 1) log.add(cli::EvalRecord{.step = i + 1, .loss = 3, .seconds = static_cast<double>(i)});
    }
  }
  cli::TrainLog log(path, at);
  cli::StepRecord next = step(at);
  next.seconds         = 0.5;
  log.add(next);
  return file_bytes(path);
}

}  // namespace

TEST_CASE("a log has a line for each step and each evaluation", "[tools][log]") {
  const TempFolder folder;
  const std::string csv = (folder / "log.csv").string(), lines = (folder / "log.jsonl").string();
  for (const std::string& path : {csv, lines}) {
    sg::testing::write_file(path, "an earlier run\n");
    cli::TrainLog log(path, 0);
    log.add(
        cli::StepRecord{.step = 0, .loss = 5.25, .rate = 0.5, .grad_norm = 1.0 / 3, .tokens_per_s = 8, .seconds = 2});
    log.add(cli::EvalRecord{.step = 1, .loss = 4.5, .seconds = 3});
    log.add(cli::StepRecord{.step = 1, .loss = std::numeric_limits<double>::infinity()});
  }
  CHECK(file_bytes(csv) ==
        "step,loss,rate,grad_norm,tokens_per_s,seconds,eval_loss\n"
        "0,5.25,0.5,0.33333333333333331,8,2,\n"
        "1,,,,,3,4.5\n"
        "1,inf,0,0,0,0,\n");
  CHECK(file_bytes(lines) ==
        "{\"type\":\"step\",\"step\":0,\"loss\":5.25,\"rate\":0.5,\"grad_norm\":0.33333333333333331,\"tokens_per_s\":8,"
        "\"seconds\":2}\n"
        "{\"type\":\"eval\",\"step\":1,\"loss\":4.5,\"seconds\":3}\n"
        "{\"type\":\"step\",\"step\":1,\"loss\":null,\"rate\":0,\"grad_norm\":0,\"tokens_per_s\":0,\"seconds\":0}\n");
}

TEST_CASE("a resumed run continues its log without lines of steps that are run again", "[tools][log]") {
  const TempFolder folder;
  CHECK(two_runs((folder / "log.csv").string(), 4) ==
        "step,loss,rate,grad_norm,tokens_per_s,seconds,eval_loss\n"
        "0,5,0.001,1.5,100,0,\n1,4.75,0.001,1.5,100,1,\n2,,,,,1,3\n2,4.5,0.001,1.5,100,2,\n3,4.25,0.001,1.5,100,3,\n"
        "4,,,,,3,3\n4,4,0.001,1.5,100,3.5,\n");  // the time goes on
  std::vector<std::string> kinds;
  const std::string lines = two_runs((folder / "log.jsonl").string(), 3);
  for (std::size_t begin = 0; begin < lines.size(); begin = lines.find('\n', begin) + 1) {
    const sg::JsonValue line = sg::parse_json(lines.substr(begin, lines.find('\n', begin) - begin));
    kinds.push_back(sg::str(line.at("type").as_string(), line.at("step").as_integer()));
  }
  CHECK(kinds == std::vector<std::string>{"step0", "step1", "eval2", "step2", "step3"});
}

TEST_CASE("a line that a killed process has left in part is removed when the log is continued", "[tools][log]") {
  const TempFolder folder;
  const std::string path = (folder / "log.csv").string();
  for (const char* torn : {"2,4.", "2", "1,4.75,0.001,1.5,100,1", "\n\n2,4,5\n3"}) {
    CAPTURE(torn);
    {
      cli::TrainLog log(path, 0);
      log.add(step(0));
      log.add(step(1));
    }
    sg::testing::write_file(path, file_bytes(path) + torn);
    cli::TrainLog(path, 2).add(step(2));
    CHECK(file_bytes(path) ==
          "step,loss,rate,grad_norm,tokens_per_s,seconds,eval_loss\n"
          "0,5,0.001,1.5,100,0,\n1,4.75,0.001,1.5,100,1,\n2,4.5,0.001,1.5,100,3,\n");
  }
}

TEST_CASE("a resumed run without an earlier log begins one", "[tools][log]") {
  const TempFolder folder;
  const std::string path = (folder / "log.jsonl").string();
  cli::TrainLog(path, 7).add(cli::EvalRecord{.step = 8, .loss = 2});
  CHECK(file_bytes(path) == "{\"type\":\"eval\",\"step\":8,\"loss\":2,\"seconds\":0}\n");
}

TEST_CASE("a log on a full disk ends with a whole line, and goes on when there is room", "[tools][log]") {
  const TempFolder folder;
  const std::string path = (folder / "log.csv").string();
  // In a process of its own: files may have 120 bytes there, then as many as they like.
  const int child = sg::testing::start_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    cli::TrainLog log(path, 0);
    const rlimit small{120, before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
    int failed = 0;
    for (int i = 0; i < 5; ++i) {
      try {
        log.add(step(i));
      } catch (const sg::Error& error) {
        failed += std::string(error.what()).find("cannot be written: File too large") != std::string::npos ? 1 : 100;
      }
    }
    ::setrlimit(RLIMIT_FSIZE, &before);
    log.add(step(5));
    if (failed != 3) throw std::runtime_error("another number of failures");
  });
  CHECK(sg::testing::wait_for(child) == sg::testing::Ended::done);
  CHECK(file_bytes(path) ==
        "step,loss,rate,grad_norm,tokens_per_s,seconds,eval_loss\n"
        "0,5,0.001,1.5,100,0,\n1,4.75,0.001,1.5,100,1,\n5,3.75,0.001,1.5,100,5,\n");
  CHECK_THROWS_WITH(cli::TrainLog("/dev/full", 0).add(step(0)), ContainsSubstring("/dev/full: cannot be written"));
}
