#include "graphs/train/window_run.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <set>

#include "engine/base/error.hpp"
#include "graphs/step/asynchronous.hpp"
#include "ops/layers/cross_entropy.hpp"

namespace stepgraph {
namespace {

constexpr std::size_t most_lengths = 3;  // of shorter windows that are kept: each has activations of its own

// Buffers that last from window to window.
std::vector<Buffer> lasting(const StepRank& rank) {
  std::vector<Buffer> found{rank.num_updates, rank.loss_scale, rank.good_steps};
  for (const StepWeight& weight : rank.weights)
    for (const StoredRange& part : {weight.value, weight.first, weight.second, weight.master})
      found.push_back(part.buffer);
  return found;
}

// Sets the inputs of one step on all ranks. Returns the targets of each rank that count.
std::vector<std::int64_t> set_inputs(const StepGraph& step, const StepRanks& ranks, const Memory& memory,
                                     const WindowStep& given, std::int64_t number) {
  const auto rows     = static_cast<std::size_t>(step.batch.micro) * static_cast<std::size_t>(step.batch.seq);
  const auto per_rank = rows * static_cast<std::size_t>(step.num_microbatches);
  const double dp     = step.layout.degree(Axis::dp);
  // Each rank's gradient is an update of its own. Together they move weights as far as one of a synchronous step.
  std::vector<double> rates = given.rates;
  for (double& rate : rates) rate /= dp;
  const std::int64_t ignored_of_all = std::ranges::count(given.targets, ignored_target);
  std::vector<std::int64_t> counted;
  for (const StepRank& rank : ranks) {
    const std::size_t first = static_cast<std::size_t>(rank.coord.dp) * per_rank;
    for (std::size_t mb = 0; mb < rank.tokens.size(); ++mb) {
      memory.write(rank.tokens[mb], given.inputs.subspan(first + mb * rows, rows));
      memory.write(rank.targets[mb], given.targets.subspan(first + mb * rows, rows));
    }
    const std::int64_t ignored = std::ranges::count(given.targets.subspan(first, per_rank), ignored_target);
    counted.push_back(static_cast<std::int64_t>(per_rank) - ignored);
    memory.set_first(rank.num_ignored, ignored);
    memory.set_first(rank.num_ignored_of_all, ignored_of_all);
    memory.set_first(rank.step_number, number);
    memory.write(rank.rate, std::span<const double>(rates));
  }
  return counted;
}

// The means over ranks.
StepResult result_of(const StepRanks& ranks, const Memory& memory, const std::vector<std::int64_t>& counted,
                     double rate) {
  StepResult result{.rate = rate, .staleness = StepStaleness{}};
  double squares = 0;
  int applied    = 0;
  double targets = 0;
  for (const std::int64_t each : counted) targets += static_cast<double>(each);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const StepRank& rank = ranks[i];
    const double norm    = memory.first<double>(rank.grad_norm);
    if (counted[i] > 0) result.loss += memory.first<double>(rank.loss) * (static_cast<double>(counted[i]) / targets);
    const bool overflows = rank.skipped != Buffer{} && memory.first<std::int64_t>(rank.skipped) != 0;
    result.staleness->num_dropped += memory.first<std::int64_t>(rank.given) < 0;
    if (!overflows) {
      squares += norm * norm;
      ++applied;
    }
    if (rank.loss_scale != Buffer{}) {
      const double scale = memory.first<double>(rank.loss_scale);
      result.loss_scale  = std::min(scale, result.loss_scale.value_or(scale));
    }
    std::vector<std::int64_t> taken(2);
    memory.read(rank.taken, std::span(taken));
    result.staleness->mean += static_cast<double>(taken[1]) / static_cast<double>(ranks.size());
    result.staleness->largest = std::max(result.staleness->largest, taken[1]);
  }
  result.skipped   = applied == 0;
  result.grad_norm = applied == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(squares / applied);
  return result;
}

}  // namespace

void check_asynchronous_world(World& world) {
  if (world.peers() == nullptr && world.device() == nullptr &&
      world.local_ranks().size() == static_cast<std::size_t>(world.num_ranks()))
    return;
  throw Error(ErrorKind::config,
              str("update.mode: asynchronous: ranks share the versions of weights in the memory of one process, but ",
                  world.device() != nullptr ? "these are on devices" : "some of these are in other processes",
                  " (backend loopback, or mode synchronous or stale)"));
}

const WindowRuns::Window& WindowRuns::shorter(const StepRun& run, const Build& build, int steps) {
  const auto found = shorter_.find(steps);
  if (found != shorter_.end()) return found->second;
  if (shorter_.size() == most_lengths)
    shorter_.erase(shorter_.begin()->first == recorded_ ? std::next(shorter_.begin()) : shorter_.begin());
  StepGraph window = build(steps);
  RunnableGraph runnable(window.graph, run.world(), {.reuse = run.plan().reuse});
  Window made{.step = std::move(window), .runnable = std::move(runnable)};
  std::vector<SameBytes> same;
  std::set<std::uint32_t> seen;  // weights that are tied share a buffer
  for (std::size_t place = 0; place < made.step.ranks.size(); ++place) {
    const std::vector<Buffer> here = lasting(made.step.ranks[place]), there = lasting(run.step().ranks[place]);
    for (std::size_t i = 0; i < here.size(); ++i) {
      if (here[i] != Buffer{} && seen.insert(here[i].id).second) same.push_back({.here = here[i], .of_step = there[i]});
    }
  }
  made.program = std::make_unique<Program>(run.beside(made.runnable, same));
  return shorter_.emplace(steps, std::move(made)).first->second;
}

StepView WindowRuns::recorded(const StepRun& run) const {
  const auto found = shorter_.find(recorded_);
  if (found == shorter_.end()) return run.view();
  return {found->second.step, found->second.runnable, found->second.program->memory()};
}

void WindowRuns::prepare(const StepRun& run, const Build& build, std::size_t steps) {
  if (steps != run.step().window.size()) static_cast<void>(shorter(run, build, static_cast<int>(steps)));
}

std::vector<StepResult> WindowRuns::run(StepRun& run, const Build& build, std::span<const WindowStep> steps,
                                        std::int64_t done, Recorder* recorder) {
  const bool whole           = steps.size() == run.step().window.size();
  const Window* const window = whole ? nullptr : &shorter(run, build, static_cast<int>(steps.size()));
  const StepGraph& step      = whole ? run.step() : window->step;
  Memory& memory             = whole ? run.memory() : window->program->memory();
  if (recorder != nullptr) {
    recorded_ = whole ? 0 : static_cast<int>(steps.size());
    if (!whole) memory.poison();  // for used_bytes; callers can do this for the trainer's own
  }
  std::vector<std::vector<std::int64_t>> counted;
  for (std::size_t i = 0; i < steps.size(); ++i)
    counted.push_back(set_inputs(step, step.window[i], memory, steps[i], done + static_cast<std::int64_t>(i) + 1));
  whole ? run.run(recorder) : run.run_window(*window->program, recorder);
  std::vector<StepResult> results;
  for (std::size_t i = 0; i < steps.size(); ++i)
    results.push_back(result_of(step.window[i], memory, counted[i], steps[i].rates.front()));
  return results;
}

}  // namespace stepgraph
