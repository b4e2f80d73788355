// Reports about all ranks, where several processes have them. Processes are threads here.
#include "graphs/predict/step_report.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/short_training.hpp"
#include "tests/support/worlds/thread_processes.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::Exchanges;
using sg::testing::in_processes;
using sg::testing::neighbours;

namespace {

const sg::Plan plan{.layout = {.dp = 2, .pp = 2}};
constexpr sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};

}  // namespace

TEST_CASE("the size of a step over processes is that of the whole step", "[graphs][processes][threads]") {
  const sg::Model model = sg::testing::small_gpt2();
  sg::LoopbackWorld loopback(4);
  sg::Trainer whole(model, plan, batch, loopback, {.threads = 1});
  const sg::StepSize expected = sg::step_size(whole.run());
  std::mutex mutex;
  sg::StepSize found;
  in_processes(neighbours(4, 3), Exchanges::hub, [&](sg::World& world) {
    sg::Trainer trainer(model, plan, batch, world, {.threads = 1});
    const sg::StepSize size = sg::step_size(trainer.run());
    const std::lock_guard lock(mutex);
    if (trainer.run().is_first()) found = size;
  });
  CHECK(found.nodes == expected.nodes);
  CHECK(found.edges - found.reuse_edges == expected.edges - expected.reuse_edges);
  CHECK(found.peak_bytes.size() == 4);
  for (const std::int64_t peak : found.peak_bytes) CHECK(peak > 0);
}

TEST_CASE("a trace over processes is one file with all nodes, and arrows lead from process to process",
          "[graphs][processes][threads]") {
  const sg::Model model = sg::testing::small_gpt2();
  const sg::testing::TempFolder folder;
  const std::string path = (folder / "trace.json").string();
  std::mutex mutex;
  std::int64_t num_nodes = 0;
  sg::StepFigures figures;
  in_processes(neighbours(4, 4), Exchanges::messages, [&](sg::World& world) {
    sg::Trainer trainer(model, plan, batch, world, {.threads = 1});
    sg::Recorder recorder;
    trainer.run().memory().poison();
    static_cast<void>(trainer.step(sg::testing::tokens_for(batch, 0, model.vocab), &recorder));
    sg::write_step_trace(trainer.run(), recorder, path, {.title = "four processes"});
    const sg::StepFigures all = sg::step_figures(trainer.run(), recorder.timeline());
    const std::lock_guard lock(mutex);
    num_nodes += static_cast<std::int64_t>(trainer.run().step().graph.num_nodes());
    if (trainer.run().is_first()) figures = all;
  });
  const sg::JsonValue file = sg::parse_json(sg::testing::file_bytes(path), "trace");
  std::int64_t slices      = 0;
  std::set<std::string> ranks;
  std::map<std::string, std::pair<int, int>> arrows;  // by id: begins and ends
  std::map<std::string, std::set<std::string>> rows;  // by row: ranks
  for (const sg::JsonValue& event : file.find("traceEvents")->items) {
    const std::string phase = event.find("ph")->text, rank = event.find("pid")->text;
    if (phase == "X") {
      ++slices;
      ranks.insert(rank);
      rows[event.find("tid")->text].insert(rank);
      CHECK(event.find("ts")->number >= 0);
    }
    if (phase == "s") ++arrows[event.find("id")->text].first;
    if (phase == "f") ++arrows[event.find("id")->text].second;
  }
  CHECK(slices == num_nodes);
  CHECK(file.find("otherData")->find("nodes")->text == std::to_string(num_nodes));
  CHECK(ranks == std::set<std::string>{"0", "1", "2", "3"});
  for (const auto& [row, of] : rows) CHECK(of.size() == 1);
  int between = 0;
  for (const auto& [id, ends] : arrows) {
    CAPTURE(id);
    CHECK(ends == std::pair(1, 1));
    between += id.starts_with("pp_s");
  }
  CHECK(between == 2 * 2 * 2);  // for each of two microbatches of two data-parallel ranks, there and back
  CHECK(figures.step_s > 0);
  CHECK(figures.workers_busy > 0);
  CHECK(figures.used_bytes > 0);
  CHECK(figures.planned_bytes >= figures.used_bytes);
  CHECK(figures.bubble >= 0);
}

TEST_CASE("a trace that cannot be written is an error in every process", "[graphs][processes][threads]") {
  const sg::Model model = sg::testing::small_gpt2();
  const sg::testing::TempFolder folder;
  std::mutex mutex;
  std::vector<std::string> errors;
  in_processes(neighbours(4, 2), Exchanges::hub, [&](sg::World& world) {
    sg::Trainer trainer(model, plan, batch, world, {.threads = 1});
    sg::Recorder recorder;
    static_cast<void>(trainer.step(sg::testing::tokens_for(batch, 0, model.vocab), &recorder));
    std::string error;
    try {
      sg::write_step_trace(trainer.run(), recorder, (folder / "no/folder/trace.json").string());
    } catch (const sg::Error& caught) {
      error = caught.what();
    }
    const std::lock_guard lock(mutex);
    errors.push_back(error);
  });
  CHECK_THAT(errors[0], ContainsSubstring("no/folder"));
  CHECK(errors[0] == errors[1]);
}
