// Reads and writes the weights of a run.
#include <algorithm>
#include <filesystem>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
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

void write_tensors(const StepRun& run, StepRun::Which which, const std::filesystem::path& path) {
  std::vector<TensorToWrite> tensors;
  const ParameterInventory inventory = run.step().model.parameters();
  for (const Parameter& parameter : inventory.parameters()) {
    TensorToWrite tensor{.name = parameter.name, .shape = parameter.shape};
    const auto fill = [&run, which, name = parameter.name](auto values) { run.read_tensor(which, name, values); };
    if (run.step().type == DType::f64) {
      tensor.fill = std::function<void(std::span<double>)>(fill);
    } else {
      tensor.fill = std::function<void(std::span<float>)>(fill);
    }
    tensors.push_back(std::move(tensor));
  }
  write_safetensors(path, tensors);
}

}  // namespace

void save_model(const StepRun& run, const std::string& folder) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed) throw Error(ErrorKind::config, str("'", folder, "': cannot make the folder: ", failed.message()));
  write_tensors(run, StepRun::Which::value, std::filesystem::path(folder) / "model.safetensors");
  // A user's own model has no config.json of a known kind.
  const Model& model       = run.step().model;
  const std::string config = model.config.empty() ? str("{\"model_type\": \"", model.kind, "\"}\n") : model.config;
  write_text(std::filesystem::path(folder) / "config.json", config);
}

void save_gradients(const StepRun& run, const std::string& path) { write_tensors(run, StepRun::Which::gradient, path); }

}  // namespace stepgraph
