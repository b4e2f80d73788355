#include "tools/bench/training/updates.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <iomanip>
#include <memory>
#include <sstream>
#include <thread>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/files/token_data.hpp"
#include "graphs/step/with_bodies.hpp"
#include "tools/bench/training/training.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Which rank is slow in which step.
struct Slow {
  double factor = 1;
  bool in_turns = false;  // rank s mod n is slow in step s; else rank 0 in all steps
  int num_ranks = 1;
  [[nodiscard]] bool is(Rank rank, std::int64_t step) const {
    return factor > 1 && index(rank) == (in_turns ? static_cast<int>(step % num_ranks) : 0);
  }
};

// The nodes of a slow rank sleep after their work. A window knows the steps of its nodes; the number of a single step
// is read when it runs.
Graph slowed(const Graph& graph, const Slow& slow, const std::shared_ptr<std::atomic<std::int64_t>>& now) {
  std::vector<std::int64_t> takes(static_cast<std::size_t>(graph.num_ranks()), 0);
  return with_bodies(graph, [&](Node node, const Body& body) {
    const Rank rank      = graph.rank(node);
    std::int64_t& passed = takes[static_cast<std::size_t>(index(rank))];
    passed += graph.labels(node).phase == "take";
    const std::string phase = graph.labels(node).phase;
    if (!body || (phase != "forward" && phase != "backward")) return body;
    return Body([body, slow, rank, now, in_window = passed - 1](const Context& context) {
      const auto begin = Clock::now();
      call_body(body, context);
      if (slow.is(rank, in_window >= 0 ? in_window : now->load()))
        std::this_thread::sleep_for((Clock::now() - begin) * (slow.factor - 1));
    });
  });
}

// A trainer with one kind of update.
class UpdateRun {
 public:
  UpdateRun(const TrainingCase& what, const std::string& update, const TrainOptions& options)
      : name_(update), world_(Layout(what.plan.layout).num_ranks()), trainer_(make(what, update, options)) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(what.tokens()) + 1);
    TokenData(SyntheticTokens{.seed = 1}, what.spec.vocab).read(0, tokens);
    const Batch batch{.inputs = {tokens.begin(), tokens.end() - 1}, .targets = {tokens.begin() + 1, tokens.end()}};
    batches_.assign(static_cast<std::size_t>(options.dry_run ? 1 : options.steps), batch);
    run();  // warms up
    seconds_.clear();
  }

  // All steps of a window.
  void run() {
    const auto begin = Clock::now();
    std::vector<StepResult> results;
    if (trainer_.plan().update.mode == UpdateWhen::asynchronous) {
      results = trainer_.steps(batches_);
    } else {
      for (std::size_t i = 0; i < batches_.size(); ++i) {
        now_->store(static_cast<std::int64_t>(i));
        results.push_back(trainer_.step(batches_[i]));
      }
    }
    seconds_.push_back(std::chrono::duration<double>(Clock::now() - begin).count() /
                       static_cast<double>(batches_.size()));
    staleness_ = {};
    for (const StepResult& result : results) {
      if (!std::isfinite(result.loss)) throw Error(ErrorKind::run, str("loss is ", result.loss, " (a finite loss)"));
      if (!result.staleness) continue;
      staleness_.mean += result.staleness->mean / static_cast<double>(results.size());
      staleness_.largest = std::max(staleness_.largest, result.staleness->largest);
    }
  }
  [[nodiscard]] double step_s() const { return quantile(seconds_, 0.5); }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const StepStaleness& staleness() const { return staleness_; }

 private:
  Trainer make(const TrainingCase& what, const std::string& update, const TrainOptions& options) {
    Plan plan   = what.plan;
    plan.update = parse_update(update);
    const Slow slow{.factor = options.slow_factor, .in_turns = options.slow_in_turns, .num_ranks = plan.layout.dp};
    return Trainer(gpt2(what.spec), plan, what.batch, world_,
                   {.threads = options.threads,
                    .window  = options.dry_run ? 1 : options.steps,
                    .change  = [slow, now = now_](const Graph& graph) { return slowed(graph, slow, now); }});
  }

  std::string name_;
  std::shared_ptr<std::atomic<std::int64_t>> now_ = std::make_shared<std::atomic<std::int64_t>>(0);
  LoopbackWorld world_;
  Trainer trainer_;
  std::vector<Batch> batches_;
  std::vector<double> seconds_;
  StepStaleness staleness_;  // of the last window
};

void print(const TrainingCase& what, const UpdateRun& run, double first_s, const TrainOptions& options) {
  const double step_s = run.step_s(), per_s = static_cast<double>(what.tokens()) / step_s;
  if (options.json) {
    cli::print_line(json_line({{"type", "update"},
                               {"model", what.model},
                               {"layout", what.layout},
                               {"update", run.name()},
                               {"threads", options.threads},
                               {"slow_factor", options.slow_factor},
                               {"slow_in_turns", options.slow_in_turns},
                               {"steps", options.steps},
                               {"step_s", step_s},
                               {"tokens_per_s", per_s},
                               {"ratio_to_first", first_s / step_s},
                               {"staleness_mean", run.staleness().mean},
                               {"staleness_max", run.staleness().largest}}));
    return;
  }
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << what.model << ' ' << what.layout << ' ' << run.name() << ": a step "
      << 1e3 * step_s << " ms, " << per_s << " tokens/s, " << std::setprecision(2) << first_s / step_s
      << " of the first's speed; staleness " << run.staleness().mean << ", at most " << run.staleness().largest;
  cli::print_line(out.str());
}

}  // namespace

UpdatePlan parse_update(const std::string& text) {
  UpdatePlan update;
  const std::size_t colon = text.find(':');
  const std::string mode  = text.substr(0, colon);
  bool right              = false;
  for (const UpdateWhen when : {UpdateWhen::synchronous, UpdateWhen::stale, UpdateWhen::asynchronous}) {
    if (mode != to_string(when)) continue;
    update.mode = when;
    right       = true;
  }
  if (right && colon != std::string::npos) {
    const char *begin = text.data() + colon + 1, *end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(begin, end, update.max_staleness);
    right                    = error == std::errc() && rest == end;
  }
  if (!right)
    throw Error(
        ErrorKind::config,
        str("--update '", text, "': is no mode (synchronous, stale:K or asynchronous:K, where K is max_staleness)"));
  check_update(update);
  return update;
}

void train_updates(const TrainOptions& options) {
  if (options.backend != "loopback")
    throw Error(ErrorKind::config, str("--update: with backend ", options.backend, " (loopback)"));
  for (const std::string& model : options.models) {
    for (const std::string& layout : options.layouts) {
      const TrainingCase what = training_case(model, layout);
      std::vector<std::unique_ptr<UpdateRun>> runs;
      for (const std::string& update : options.updates)
        runs.push_back(std::make_unique<UpdateRun>(what, update, options));
      const int rounds = options.dry_run ? 1 : 3;
      for (int round = 0; round < rounds; ++round) {
        for (const std::unique_ptr<UpdateRun>& run : runs) run->run();
      }
      for (const std::unique_ptr<UpdateRun>& run : runs) print(what, *run, runs.front()->step_s(), options);
    }
  }
}

}  // namespace stepgraph::bench
