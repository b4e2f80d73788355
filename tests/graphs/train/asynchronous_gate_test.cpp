// A slow rank: the others go on up to the bound and no further. Counted, not timed.
#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/step/with_bodies.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::small_gpt2;

namespace {

constexpr int dp = 3, steps = 7;

// What the ranks have done. A rank waits in the forward pass of one of its steps until the test opens it.
struct Watch {
  std::atomic<bool> open{false};
  std::atomic<int> num_early{0};  // steps beyond the bound that began while it was closed
  std::vector<std::atomic<int>> begun     = std::vector<std::atomic<int>>(dp),
                                completed = std::vector<std::atomic<int>>(dp);
};

// The graph with a rank that waits at the beginning of step `slow_step`.
sg::Graph watched(const sg::Graph& graph, Watch& watch, int slow_step, int bound) {
  std::vector<int> takes(dp, 0);
  bool waits = false;
  return sg::with_bodies(graph, [&, waits](sg::Node node, const sg::Body& body) mutable {
    const auto rank = static_cast<std::size_t>(index(graph.rank(node)));
    if (graph.labels(node).phase == "take") {
      const int step = takes[rank]++;
      if (step == steps) return body;  // the window's end
      return sg::Body([&watch, body, rank, step, slow_step, bound](const sg::Context& context) {
        if (rank != 0 && step > slow_step + bound && !watch.open) ++watch.num_early;
        ++watch.begun[rank];
        sg::call_body(body, context);
      });
    }
    if (graph.labels(node).phase == "give") {
      return sg::Body([&watch, body, rank](const sg::Context& context) {
        sg::call_body(body, context);
        ++watch.completed[rank];
      });
    }
    if (rank == 0 && !waits && takes[0] == slow_step + 1 && graph.labels(node).phase == "forward") {
      waits = true;
      return sg::Body([&watch, body](const sg::Context& context) {
        while (!watch.open && !context.stopping()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        sg::call_body(body, context);
      });
    }
    return body;
  });
}

std::vector<sg::Batch> batches_for(const sg::BatchSpec& batch) {
  std::vector<sg::Batch> made;
  for (int step = 0; step < steps; ++step) {
    const std::vector<std::int32_t> tokens = sg::testing::tokens_for(batch, step, 64);
    made.push_back({.inputs = {tokens.begin(), tokens.end() - 1}, .targets = {tokens.begin() + 1, tokens.end()}});
  }
  return made;
}

}  // namespace

TEST_CASE("while a rank is in a step, the others complete that step and as many more as the bound, and begin no other",
          "[graphs][asynchronous]") {
  const int bound = GENERATE(0, 1, 3), slow_step = GENERATE(0, 2);
  CAPTURE(bound, slow_step);
  if (sg::testing::sanitized() && (bound == 1) != (slow_step == 2)) return;
  const sg::BatchSpec batch{.global = dp, .micro = 1, .seq = 8};
  const sg::Plan plan{.layout = {.dp = dp}, .update = {.mode = sg::UpdateWhen::asynchronous, .max_staleness = bound}};
  Watch watch;
  sg::LoopbackWorld world(dp);
  sg::Trainer trainer(small_gpt2(), plan, batch, world,
                      {.threads = 2, .seed = 7, .window = steps, .change = [&](const sg::Graph& graph) {
                         return watched(graph, watch, slow_step, bound);
                       }});
  const std::vector<sg::Batch> batches = batches_for(batch);
  std::vector<int> completed(dp), begun(dp);
  // Ends when the others have come as far as they may: if they do not, the test's time-out does.
  std::jthread opens([&](const std::stop_token& stop) {
    const int far = slow_step + bound + 1;
    while (!stop.stop_requested() && (watch.completed[1] < far || watch.completed[2] < far))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // No step can be begun any more: its gate waits for rank 0.
    for (std::size_t rank = 0; rank < dp; ++rank) {
      completed[rank] = watch.completed[rank];
      begun[rank]     = watch.begun[rank];
    }
    watch.open = true;
  });
  const std::vector<sg::StepResult> results = trainer.steps(batches);
  opens.join();
  CHECK(completed == std::vector<int>{slow_step, slow_step + bound + 1, slow_step + bound + 1});
  CHECK(begun == std::vector<int>{slow_step + 1, slow_step + bound + 1, slow_step + bound + 1});
  CHECK(watch.num_early == 0);
  for (std::size_t rank = 0; rank < dp; ++rank) CHECK(watch.completed[rank] == steps);
  // The others began step slow_step + bound while rank 0 had completed slow_step steps.
  std::int64_t largest = 0;
  for (const sg::StepResult& result : results) largest = std::max(largest, result.staleness->largest);
  CHECK(largest == bound);
}

TEST_CASE("while a rank is in a step, the others of a synchronous run complete none", "[graphs][asynchronous]") {
  const sg::BatchSpec batch{.global = dp, .micro = 1, .seq = 8};
  std::atomic<bool> open{false};
  std::atomic<int> num_updates{0};
  std::atomic<int> num_backward{0};
  sg::LoopbackWorld world(dp);
  const auto change = [&](const sg::Graph& graph) {
    bool waits = false;
    return sg::with_bodies(graph, [&, waits](sg::Node node, const sg::Body& body) mutable {
      const bool is_slow = graph.rank(node) == sg::Rank{0} && graph.labels(node).phase == "forward";
      if (is_slow && !std::exchange(waits, true)) {
        return sg::Body([&open, body](const sg::Context& context) {
          while (!open && !context.stopping()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          sg::call_body(body, context);
        });
      }
      const bool updates = graph.labels(node).phase == sg::update_phase;
      if (!updates && graph.labels(node).phase != "backward") return body;
      return sg::Body([&num = updates ? num_updates : num_backward, body](const sg::Context& context) {
        sg::call_body(body, context);
        ++num;
      });
    });
  };
  sg::Trainer trainer(small_gpt2(), {.layout = {.dp = dp}}, batch, world, {.threads = 2, .seed = 7, .change = change});
  int backward           = 0;
  const sg::Graph& graph = trainer.run().step().graph;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i)
    backward += graph.labels(sg::Node{i}).phase == "backward" && !graph.has_part(sg::Node{i});
  int updates_before = -1;
  std::jthread opens([&](const std::stop_token& stop) {
    while (!stop.stop_requested() && num_backward < backward / dp * (dp - 1))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    updates_before = num_updates;
    open           = true;
  });
  static_cast<void>(trainer.step(sg::testing::tokens_for(batch, 0, 64)));
  opens.join();
  CHECK(updates_before == 0);
  CHECK(num_updates > 0);
}
