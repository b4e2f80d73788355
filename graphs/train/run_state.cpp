#include "graphs/train/run_state.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

namespace stepgraph {
namespace {

constexpr StoredRange StepWeight::*states_of_weight[] = {&StepWeight::value, &StepWeight::master, &StepWeight::first,
                                                         &StepWeight::second};

std::int64_t element_bytes(const StepGraph& step, const StoredRange& part) {
  return static_cast<std::int64_t>(size_bytes(step.element_type(part.buffer)));
}

}  // namespace

RunState take_state(const StepRun& run) {
  const StepGraph& step = run.step();
  const StepRank& first = step.ranks.front();
  RunState state{.has_weights = run.has_weights()};
  if (first.num_updates != Buffer{}) state.num_updates = run.memory().first<std::int64_t>(first.num_updates);
  if (first.loss_scale != Buffer{}) {
    state.scale      = run.memory().first<double>(first.loss_scale);
    state.good_steps = run.memory().first<std::int64_t>(first.good_steps);
  }
  for (std::size_t place = 0; place < step.ranks.size(); ++place) {
    const auto& weights = step.ranks[place].weights;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      for (const auto which : states_of_weight) {
        const StoredRange& part = weights[i].*which;
        if (part.empty() || part.buffer == Buffer{}) continue;
        const std::int64_t size = element_bytes(step, part);
        RunState::Tensor tensor{.place = place, .weight = i, .which = which};
        tensor.bytes.resize(static_cast<std::size_t>(part.size() * size));
        run.values().read_bytes(part.buffer, part.offset * size, tensor.bytes);
        state.tensors.push_back(std::move(tensor));
      }
    }
  }
  run.values().flush();
  return state;
}

void put_state(StepRun& run, const RunState& state) {
  const StepGraph& step = run.step();
  // The states of an asynchronous run are on one rank each; in other runs without sharding all ranks have them.
  std::map<std::pair<std::size_t, std::size_t>, const RunState::Tensor*> anywhere;  // by weight, and kind of state
  std::map<std::tuple<std::size_t, std::size_t, std::size_t>, const RunState::Tensor*> there;
  const auto kind_of = [](StoredRange StepWeight::*which) {
    return static_cast<std::size_t>(std::ranges::find(states_of_weight, which) - std::begin(states_of_weight));
  };
  for (const RunState::Tensor& tensor : state.tensors) {
    anywhere[{tensor.weight, kind_of(tensor.which)}]            = &tensor;
    there[{tensor.place, tensor.weight, kind_of(tensor.which)}] = &tensor;
  }
  for (std::size_t place = 0; place < step.ranks.size(); ++place) {
    const auto& weights = step.ranks[place].weights;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      for (std::size_t kind = 0; kind < std::size(states_of_weight); ++kind) {
        const StoredRange& part = weights[i].*states_of_weight[kind];
        if (part.empty() || part.buffer == Buffer{}) continue;
        const auto same                = there.find({place, i, kind});
        const RunState::Tensor* tensor = same != there.end() ? same->second : anywhere.at({i, kind});
        const std::int64_t size        = element_bytes(step, part);
        run.values().write_bytes(part.buffer, part.offset * size, tensor->bytes);
      }
    }
  }
  run.values().flush();
  for (const StepRank& rank : step.ranks) {
    if (rank.num_updates != Buffer{}) run.memory().set_first(rank.num_updates, state.num_updates);
    if (!state.scale) continue;
    run.memory().set_first(rank.loss_scale, *state.scale);
    run.memory().set_first(rank.good_steps, state.good_steps);
  }
  if (state.has_weights) run.set_has_weights();
}

}  // namespace stepgraph
