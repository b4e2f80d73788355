#include "tests/support/training/delayed_training.hpp"

#include <algorithm>
#include <cmath>
#include <deque>

#include "backends/loopback/world.hpp"
#include "ops/cpu/optimizer.hpp"

namespace stepgraph::testing {
namespace {

double comparable(double norm) { return std::isnan(norm) ? -1 : norm; }

std::vector<double> read(const StepRun& run, StepRun::Which which, const Parameter& parameter) {
  std::vector<double> values(run.is_first() ? static_cast<std::size_t>(parameter.num_elements()) : 0);
  run.read_tensor(which, parameter.name, std::span<double>(values));
  return values;
}

std::map<std::string, std::vector<double>> weights_of(const StepRun& run) {
  std::map<std::string, std::vector<double>> weights;
  const ParameterInventory inventory = run.step().model.parameters();
  for (const Parameter& parameter : inventory.parameters())
    weights[parameter.name] = read(run, StepRun::Which::value, parameter);
  return weights;
}

struct Tensor {
  std::vector<float> weight, first, second;
  double weight_decay = 0;
};

struct Set {
  std::map<std::string, std::vector<float>> gradients;  // with the scale
  double norm = 0, scale = 1;
};

template <class T>
Rows<T> rows(std::vector<std::remove_const_t<T>>& values) {
  const auto size = static_cast<std::int64_t>(values.size());
  return {values.data(), size, size, 1};
}

}  // namespace

DelayedRun run_trainer(Trainer& trainer, int first, int steps, const TokensOfStep& tokens) {
  DelayedRun run;
  bool late = false;
  for (int step = first; step < first + steps; ++step) {
    const StepResult result = trainer.step(tokens(step));
    run.loss.push_back(result.loss);
    run.scale.push_back(result.loss_scale.value_or(0));
    run.updates.push_back(trainer.num_updates());
    late = result.norm_is_late;
    if (!late) {
      run.grad_norm.push_back(comparable(result.grad_norm));
    } else if (step > first) {
      run.grad_norm.push_back(comparable(result.earlier_norm.value()));
    }
  }
  if (late) run.grad_norm.push_back(comparable(trainer.last_grad_norm()));
  run.weights = weights_of(trainer.run());
  return run;
}

DelayedRun delayed_reference(const Model& model, const Plan& plan, const BatchSpec& batch, int steps,
                             const TokensOfStep& tokens, const StartWeights& start, std::uint64_t seed) {
  Plan still      = plan;
  still.update    = {};
  still.optimizer = {.kind = OptimizerKind::sgd, .lr = 0, .momentum = 0, .weight_decay = 0, .clip = 0};
  LoopbackWorld world(Layout(plan.layout).num_ranks());
  Trainer gradients(model, still, batch, world, {.threads = 2, .keep_gradients = true, .seed = seed});
  start(gradients.run());
  const ParameterInventory inventory = model.parameters();
  std::map<std::string, Tensor> tensors;
  for (const Parameter& parameter : inventory.parameters()) {
    Tensor& tensor      = tensors[parameter.name];
    const auto values   = read(gradients.run(), StepRun::Which::value, parameter);
    tensor.weight       = {values.begin(), values.end()};
    tensor.first        = std::vector<float>(values.size());
    tensor.second       = tensor.first;
    tensor.weight_decay = parameter.shape.size() >= 2 ? plan.optimizer.weight_decay : 0;
  }
  const bool scales = plan.precision.scales(), dynamic = plan.precision.scaling() == Scaling::dynamic;
  double scale            = scales ? plan.precision.loss_scale.value : 1;
  std::int64_t good_steps = 0, updates = 0;
  std::deque<Set> waiting;
  DelayedRun run;
  for (int step = 0; step < steps; ++step) {
    for (const StepRank& rank : gradients.run().step().ranks)
      if (scales) gradients.run().memory().set_first(rank.loss_scale, scale);
    const StepResult result = gradients.step(tokens(step));
    run.loss.push_back(result.loss);
    run.grad_norm.push_back(comparable(result.grad_norm));
    run.scale.push_back(scales ? scale : 0);
    Set& made  = waiting.emplace_back();
    made.norm  = result.grad_norm;
    made.scale = scale;
    for (const Parameter& parameter : inventory.parameters()) {
      const auto values            = read(gradients.run(), StepRun::Which::gradient, parameter);
      std::vector<float>& gradient = made.gradients[parameter.name];
      gradient.resize(values.size());
      std::ranges::transform(values, gradient.begin(), [&](double value) { return static_cast<float>(value * scale); });
    }
    if (step >= plan.update.max_staleness) {
      Set applied = std::move(waiting.front());
      waiting.pop_front();
      const bool good = std::isfinite(applied.norm);
      if (good) {
        ++updates;
        const double ratio  = plan.optimizer.clip / (applied.norm + 1e-6);
        const double factor = (plan.optimizer.clip == 0 || ratio > 1 ? 1.0 : ratio) / applied.scale;
        for (auto& [name, tensor] : tensors) {
          cpu::adamw<float>({.weight   = rows<float>(tensor.weight),
                             .first    = rows<float>(tensor.first),
                             .second   = rows<float>(tensor.second),
                             .gradient = rows<const float>(applied.gradients.at(name))},
                            {.factor       = factor,
                             .rate         = plan.optimizer.lr * rate_factor(plan.optimizer.schedule, step),
                             .beta1        = plan.optimizer.beta1,
                             .beta2        = plan.optimizer.beta2,
                             .eps          = plan.optimizer.eps,
                             .weight_decay = tensor.weight_decay,
                             .step         = updates},
                            0, static_cast<std::int64_t>(tensor.weight.size()));
        }
      }
      if (scales && (!good || ++good_steps == plan.precision.loss_scale.growth_steps)) {
        good_steps = 0;
        if (dynamic) scale *= good ? 2 : 0.5;
      }
    }
    run.updates.push_back(updates);
    gradients.run().set_weights([&](const std::string& name, const TensorShape&, const Init&, std::span<double> out) {
      const std::vector<float>& weight = tensors.at(name).weight;
      std::copy(weight.begin(), weight.end(), out.begin());
    });
  }
  run.weights = weights_of(gradients.run());
  return run;
}

}  // namespace stepgraph::testing
