// Reads and writes the weights of a run.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/output_folder.hpp"
#include "graphs/files/safetensors.hpp"
#include "graphs/models/fresh_weights.hpp"
#include "graphs/models/model_folder.hpp"
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

void set_weights(StepRun& run, const ModelFolder& folder) {
  check_tensors(folder, run.step().model.parameters().parameters());
  run.set_weights([&](const std::string& name, const TensorShape& shape, const Init&, std::span<double> values) {
    load_tensor(folder, name, shape, values);
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

// The tensors of a run, read in the order of the model. Each reading is collective.
class TensorReads {
 public:
  TensorReads(const StepRun& run, StepRun::Which which)
      : run_(run), which_(which), parameters_(run.step().model.parameters()) {}

  // In process 0.
  void write(const std::filesystem::path& path) {
    std::vector<TensorToWrite> tensors;
    for (const Parameter& parameter : parameters_.parameters()) {
      TensorToWrite tensor{.name = parameter.name, .shape = parameter.shape};
      const auto fill = [this, &parameter]<class T>(std::span<T> values) {
        ++num_read_;
        run_.read_tensor(which_, parameter.name, values);
        if (which_ == StepRun::Which::value) check_finite(parameter.name, std::span<const T>(values));
      };
      if (run_.step().type == DType::f64) {
        tensor.fill = std::function<void(std::span<double>)>(fill);
      } else {
        tensor.fill = std::function<void(std::span<float>)>(fill);
      }
      tensors.push_back(std::move(tensor));
    }
    write_safetensors(path, tensors, {{"format", "pt"}, {"written_by", "stepgraph"}});
  }

  // In other processes, and in process 0 when it could not write all tensors: what is read is thrown away. All tensors
  // are read in spite of errors, so that the calls of all processes stay in step. The first error is kept.
  void read_rest(std::optional<Error>& error) {
    run_.step().type == DType::f64 ? read_rest_as<double>(error) : read_rest_as<float>(error);
  }

 private:
  template <class T>
  void read_rest_as(std::optional<Error>& error) {
    std::vector<T> values;
    while (num_read_ < parameters_.parameters().size()) {
      const Parameter& parameter = parameters_.parameters()[num_read_++];
      values.resize(run_.is_first() ? static_cast<std::size_t>(parameter.num_elements()) : 0);
      try {
        run_.read_tensor(which_, parameter.name, std::span<T>(values));
      } catch (const Error& caught) {
        if (!error) error = caught;
      }
    }
  }

  const StepRun& run_;
  StepRun::Which which_;
  ParameterInventory parameters_;
  std::size_t num_read_ = 0;
};

// Process 0 writes tensors with `write`, the other processes give theirs.
template <class Write>
void write_tensors(const StepRun& run, StepRun::Which which, const Write& write) {
  TensorReads tensors(run, which);
  if (run.peers() == nullptr) return write(tensors);
  std::optional<Error> error;
  try {
    if (run.is_first()) write(tensors);
  } catch (const Error& caught) {
    error = caught;
  } catch (const std::exception& caught) {
    error.emplace(ErrorKind::run, str("not saved: ", caught.what()));
  }
  tensors.read_rest(error);
  try {
    run.peers()->require_success("written tensors", error);
  } catch (const Error&) {
    if (!error) throw;
  }
  if (error) throw *error;
}

}  // namespace

void save_model(const StepRun& run, const std::string& folder) {
  write_tensors(run, StepRun::Which::value, [&](TensorReads& tensors) {
    OutputFolder out(folder);
    const std::filesystem::path made = out.temporary();
    tensors.write(made / "model.safetensors");
    // A user's own model has no config.json of a known kind.
    const Model& model       = run.step().model;
    const std::string config = model.config.empty() ? str("{\"model_type\": \"", model.kind, "\"}\n") : model.config;
    write_text(made / "config.json", config);
    out.keep();
  });
}

void save_gradients(const StepRun& run, const std::string& path) {
  write_tensors(run, StepRun::Which::gradient, [&](TensorReads& tensors) { tensors.write(path); });
}

}  // namespace stepgraph
