#include "graphs/train/data_parallel.hpp"

#include <algorithm>
#include <set>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "graphs/train/run_state.hpp"
#include "graphs/train/trainer.hpp"
#include "ops/tape/number.hpp"

namespace stepgraph {
namespace {

DataParallelOptions with_devices(DataParallelOptions options, const World& world) {
  if (world.local_ranks().size() != static_cast<std::size_t>(world.num_ranks()))
    throw Error(ErrorKind::config, str("data_parallel: ", world.local_ranks().size(), " of ", world.num_ranks(),
                                       " ranks are in this process (all of them; or use a Trainer)"));
  if (options.devices == 0) options.devices = world.num_ranks();
  return options;
}

std::vector<float> read_floats(const Memory& memory, Buffer buffer, std::size_t size, DType type) {
  std::vector<float> floats(size);
  dispatch_float(type, [&]<class T>(T) {
    std::vector<T> values(size);
    memory.read(buffer, std::span(values));
    std::transform(values.begin(), values.end(), floats.begin(),
                   [](T value) { return static_cast<float>(wide(value)); });
  });
  return floats;
}

void check_tokens(const DataParallelOptions& options, std::size_t given, bool targets) {
  const std::size_t wanted = static_cast<std::size_t>(options.global) * static_cast<std::size_t>(options.seq) + targets;
  if (given == wanted) return;
  throw Error(ErrorKind::config, str("data_parallel: ", given, " tokens given (", wanted, ": ", options.global,
                                     " sequences of ", options.seq, targets ? " and one more token)" : ")"));
}

}  // namespace

DataParallel::DataParallel(const Model& model, const DataParallelOptions& options, World& world)
    : model_(model),
      options_(with_devices(options, world)),
      step_(data_parallel_step(model, options_)),
      world_(&world),
      run_(make_run()),
      rate_(options.optimizer ? options.optimizer->lr : 0) {}

std::unique_ptr<StepRun> DataParallel::make_run() const {
  return std::make_unique<StepRun>(step_.step, *world_,
                                   RunOptions{.threads = options_.threads, .reuse = options_.reuse});
}

int DataParallel::set_update_mode(const UpdatePlan& update) {
  check_update(update);
  if (update == options_.update) return 0;
  DataParallelOptions options = options_;
  options.update              = update;
  DataParallelStep made       = data_parallel_step(model_, options);  // throws: nothing has changed yet
  const int waiting           = run_->num_waiting();
  const RunState state        = take_state(*run_);
  forward_.reset();
  run_.reset();
  std::swap(step_, made);
  try {
    run_ = make_run();
  } catch (...) {
    std::swap(step_, made);
    run_ = make_run();
    put_state(*run_, state);
    throw;
  }
  put_state(*run_, state);
  options_ = options;
  return waiting;
}

std::size_t DataParallel::num_logits() const {
  return static_cast<std::size_t>(std::int64_t{options_.global} * options_.seq * model_.vocab);
}

void DataParallel::start() {
  if (!run_->has_weights()) set_fresh_weights(*run_, options_.seed);
}

DataParallelResult DataParallel::step(std::span<const std::int32_t> tokens) {
  check_tokens(options_, tokens.size(), true);
  start();
  const Memory& memory = run_->memory();
  memory.write(step_.tokens, tokens.first(tokens.size() - 1));
  memory.write(step_.targets, tokens.last(tokens.size() - 1));
  const std::vector<double> rates = rates_of(options_.optimizer.value_or(OptimizerPlan{}), rate_);
  const bool counts               = !options_.update.delays();  // else the step counts its updates
  const auto count_updates        = [&](std::int64_t more) {
    for (const StepRank& rank : step_.step.ranks) {
      if (rank.num_updates != Buffer{} && counts)
        memory.set_first(rank.num_updates, memory.first<std::int64_t>(rank.num_updates) + more);
    }
  };
  for (const StepRank& rank : step_.step.ranks) {  // they exist where dropout or an update reads them
    if (rank.step_number != Buffer{}) memory.set_first(rank.step_number, num_steps_ + 1);
    if (rank.rate != Buffer{}) memory.write(rank.rate, std::span<const double>(rates));
  }
  count_updates(1);
  try {
    run_->run();
  } catch (...) {
    count_updates(-1);
    throw;
  }
  ++num_steps_;
  DataParallelResult result{.loss   = run_->loss(),
                            .logits = read_floats(memory, step_.logits, num_logits(), step_.step.type)};
  if (options_.update.delays()) return result;
  const ParameterInventory inventory = model_.parameters();
  for (const Parameter& parameter : inventory.parameters()) {
    std::vector<float>& gradient = result.gradients[parameter.name];
    gradient.resize(static_cast<std::size_t>(parameter.num_elements()));
    run_->read_tensor(StepRun::Which::gradient, parameter.name, std::span<float>(gradient));
  }
  return result;
}

// The forward graph uses the bytes of the step's weights, on every rank.
DataParallel::Forward DataParallel::make_forward() const {
  DataParallelStep forward = data_parallel_forward(model_, options_);
  std::vector<SameBytes> same;
  std::set<std::uint32_t> seen;  // tied weights share one value; weights that no node reads have none
  for (std::size_t rank = 0; rank < forward.step.ranks.size(); ++rank) {
    const auto& weights = forward.step.ranks[rank].weights;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (weights[i].value.empty() || !seen.insert(weights[i].value.buffer.id).second) continue;
      same.push_back({.here = weights[i].value.buffer, .of_step = step_.step.ranks[rank].weights[i].value.buffer});
    }
  }
  Program program = run_->beside(forward.step.graph, same);
  return {std::move(forward), std::move(program)};
}

std::vector<float> DataParallel::forward(std::span<const std::int32_t> tokens) {
  check_tokens(options_, tokens.size(), false);
  start();
  if (!forward_) forward_.emplace(make_forward());
  forward_->program.memory().write(forward_->step.tokens, tokens);
  run_->run(forward_->program);
  return read_floats(forward_->program.memory(), forward_->step.logits, num_logits(), forward_->step.step.type);
}

}  // namespace stepgraph
