// Reads and writes the weights of a run.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/output_folder.hpp"
#include "graphs/files/safetensors.hpp"
#include "graphs/models/checkpoint.hpp"
#include "graphs/models/fresh_weights.hpp"
#include "graphs/train/trainer.hpp"

namespace stepgraph {

void set_fresh_weights(StepRun& run, std::uint64_t seed) {
  run.set_weights([seed, threads = run.threads()](const std::string& name, const TensorShape&, const Init& init,
                                                  std::span<double> values) {
    if (init.deviation == 0) {
      std::fill(values.begin(), values.end(), init.constant);
    } else {
      fill_normal(seed, name, 0, init.deviation, values, threads);
    }
  });
}

void set_weights(StepRun& run, const Checkpoint& checkpoint) {
  check_tensors(checkpoint, run.step().model.parameters().parameters());
  run.set_weights([&](const std::string& name, const TensorShape& shape, const Init&, std::span<double> values) {
    load_tensor(checkpoint, name, shape, values);
  });
}

namespace {

// A model that cannot be used must not replace one that can.
template <class T>
void check_finite(const std::string& name, std::span<const T> values) {
  const auto bad = std::ranges::find_if(values, [](T value) { return !std::isfinite(value); });
  if (bad != values.end())
    throw Error(ErrorKind::run,
                str("not saved: element ", bad - values.begin(), " of '", name, "' is ", *bad, " (finite weights)"));
}

void write_tensors(const StepRun& run, StepRun::Which which, const std::filesystem::path& path) {
  std::vector<TensorToWrite> tensors;
  const ParameterInventory inventory = run.step().model.parameters();
  for (const Parameter& parameter : inventory.parameters()) {
    TensorToWrite tensor{.name = parameter.name, .shape = parameter.shape};
    const auto fill = [&run, which, name = parameter.name]<class T>(std::span<T> values) {
      run.read_tensor(which, name, values);
      if (which == StepRun::Which::value) check_finite(name, std::span<const T>(values));
    };
    if (run.step().type == DType::f64) {
      tensor.fill = std::function<void(std::span<double>)>(fill);
    } else {
      tensor.fill = std::function<void(std::span<float>)>(fill);
    }
    tensors.push_back(std::move(tensor));
  }
  write_safetensors(path, tensors, {{"format", "pt"}, {"written_by", "stepgraph"}});
}

}  // namespace

void save_model(const StepRun& run, const std::string& folder) {
  OutputFolder out(folder);
  const std::filesystem::path made = out.temporary();
  write_tensors(run, StepRun::Which::value, made / "model.safetensors");
  // A user's own model has no config.json of a known kind.
  const Model& model       = run.step().model;
  const std::string config = model.config.empty() ? str("{\"model_type\": \"", model.kind, "\"}\n") : model.config;
  write_text(made / "config.json", config);
  out.keep();
}

void save_gradients(const StepRun& run, const std::string& path) { write_tensors(run, StepRun::Which::gradient, path); }

}  // namespace stepgraph
