#include "graphs/train/check_gradients.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "engine/base/error.hpp"
#include "graphs/files/token_data.hpp"
#include "graphs/train/trainer.hpp"

namespace stepgraph {
namespace {

using Tensors = std::map<std::string, std::vector<double>>;

// Nothing is updated: the rate is 0.
Plan plan_of(const Plan& given) {
  Plan plan            = given;
  plan.precision       = {.param = DType::f64};
  plan.optimizer       = {.kind = OptimizerKind::sgd, .lr = 0, .momentum = 0, .weight_decay = 0, .clip = 0};
  plan.shard.reduction = Reduction::average;
  plan.update          = {};  // gradients are read after each step
  return plan;
}

// The loss of a step as a function of the weights.
class Loss {
 public:
  Loss(const Model& model, World& world, const GradientCheckOptions& options)
      : trainer_(model, plan_of(options.plan), options.batch, world,
                 {.threads = options.threads, .keep_gradients = true, .seed = options.seed}),
        tokens_(static_cast<std::size_t>(options.batch.global) * static_cast<std::size_t>(options.batch.seq) + 1) {
    TokenData(SyntheticTokens{options.seed}, model.vocab).read(0, tokens_);
    set_fresh_weights(trainer_.run(), options.seed);
    weights_ = read(StepRun::Which::value);
  }

  [[nodiscard]] Tensors& weights() { return weights_; }
  [[nodiscard]] const StepRun& run() { return trainer_.run(); }
  [[nodiscard]] Tensors gradients() {
    static_cast<void>(value());
    return read(StepRun::Which::gradient);
  }

  // Always the first step, so that dropout has one mask.
  double value() {
    trainer_.run().set_weights([&](const std::string& name, const TensorShape&, const Init&, std::span<double> values) {
      std::copy(weights_.at(name).begin(), weights_.at(name).end(), values.begin());
    });
    trainer_.set_num_steps(0);
    return trainer_.step(tokens_).loss;
  }

 private:
  [[nodiscard]] Tensors read(StepRun::Which which) {
    Tensors tensors;
    const ParameterInventory inventory = trainer_.run().step().model.parameters();
    for (const Parameter& parameter : inventory.parameters()) {
      std::vector<double>& values = tensors[parameter.name];
      values.resize(static_cast<std::size_t>(parameter.num_elements()));
      trainer_.run().read_tensor(which, parameter.name, std::span<double>(values));
    }
    return tensors;
  }

  Trainer trainer_;
  std::vector<std::int32_t> tokens_;
  Tensors weights_;
};

double norm_of(const Tensors& tensors) {
  double sum = 0;
  for (const auto& [name, values] : tensors) {
    for (const double value : values) sum += value * value;
  }
  return std::sqrt(sum);
}

// Not a number is worst of all.
bool is_worse(double error, double than) { return std::isnan(than) ? false : std::isnan(error) || error > than; }

// One element of each of `count` equal parts of a tensor, at another place in each.
std::vector<std::size_t> spread(std::size_t size, int count, std::uint64_t seed) {
  std::vector<std::size_t> chosen;
  const std::size_t parts = std::min(size, static_cast<std::size_t>(count));
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t begin = size * part / parts, end = size * (part + 1) / parts;
    seed = seed * 6364136223846793005u + 1442695040888963407u;  // Knuth's generator
    chosen.push_back(begin + (seed >> 33) % (end - begin));
  }
  return chosen;
}

}  // namespace

bool GradientCheck::passed() const {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const GradientError& tensor) { return tensor.error <= tolerance; });
}

const GradientError& GradientCheck::worst() const {
  return *std::max_element(tensors.begin(), tensors.end(),
                           [](const GradientError& a, const GradientError& b) { return is_worse(b.error, a.error); });
}

std::string to_string(const GradientCheck& check) {
  std::string text;
  for (const GradientError& tensor : check.tensors) {
    if (tensor.error <= check.tolerance) continue;
    text += str("gradient of '", tensor.tensor, "', element ", tensor.element, ": ", tensor.analytic,
                " by the backward pass, ", tensor.numeric, " by differences of the loss\n");
  }
  return text + str(check.num_checked, " elements of ", check.tensors.size(), " tensors: largest relative error ",
                    check.worst().error, " in '", check.worst().tensor, "' (at most ", check.tolerance, ")\n");
}

GradientCheck check_gradients(const Model& model, World& world, const GradientCheckOptions& options) {
  if (options.elements < 1)
    throw Error(ErrorKind::config, str("check_gradients: ", options.elements, " elements (at least 1)"));
  if (world.local_ranks().size() != static_cast<std::size_t>(world.num_ranks()))
    throw Error(ErrorKind::config, str("check_gradients: ", world.local_ranks().size(), " of ", world.num_ranks(),
                                       " ranks are in this process (all of them)"));
  constexpr double step = 1e-4;  // of a weight
  Loss loss(model, world, options);
  const double rounding   = 10 * std::numeric_limits<double>::epsilon() * std::abs(loss.value());
  const Tensors gradients = loss.gradients();
  const double norm       = norm_of(gradients);
  const double least      = std::max(std::isfinite(norm) ? 1e-5 * norm : 0, rounding / (step * options.tolerance));
  GradientCheck check{.tolerance = options.tolerance};
  const ParameterInventory inventory = loss.run().step().model.parameters();
  for (const Parameter& parameter : inventory.parameters()) {
    GradientError worst{.tensor = parameter.name, .error = -1};
    std::vector<double>& weight = loss.weights().at(parameter.name);
    for (const std::size_t i : spread(weight.size(), options.elements, options.seed + check.tensors.size())) {
      const double before = weight[i], by = step * std::max(1.0, std::abs(before));
      const double above = weight[i] = before + by;
      const double loss_above        = loss.value();
      const double below = weight[i] = before - by;
      const double loss_below        = loss.value();
      weight[i]                      = before;
      const double numeric = (loss_above - loss_below) / (above - below), analytic = gradients.at(parameter.name)[i];
      const double error = std::abs(analytic - numeric) / std::max({std::abs(analytic), std::abs(numeric), least});
      if (is_worse(error, worst.error))
        worst = {parameter.name, static_cast<std::int64_t>(i), analytic, numeric, error};
      ++check.num_checked;
    }
    check.tensors.push_back(std::move(worst));
  }
  return check;
}

}  // namespace stepgraph
