#include "tests/support/training/golden.hpp"

#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <fstream>

#include "backends/loopback/world.hpp"
#include "backends/storage/spill_file.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/files/token_data.hpp"
#include "graphs/models/huggingface.hpp"
#include "graphs/models/model_folder.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/command_run.hpp"

namespace stepgraph::testing {
namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::map<std::string, std::vector<double>> read_tensors(const std::string& path) {
  std::map<std::string, std::vector<double>> tensors;
  const Safetensors file(path);
  for (const std::string& tensor : file.names()) {
    auto& values = tensors[tensor];
    values.resize(static_cast<std::size_t>(num_elements(file.info(tensor).shape)));
    file.read(tensor, std::span<double>(values));
  }
  return tensors;
}

Golden read(const std::string& name) {
  Golden golden;
  golden.folder       = source_path() + "/tests/data/golden/" + name;
  const auto expected = parse_json(text_of(golden.folder + "/expected.json"));
  golden.model        = model_from_config(text_of(golden.folder + "/config.json"), golden.folder + "/config.json");
  const auto count    = [&](const char* key) { return static_cast<int>(expected.at(key).as_integer()); };
  golden.batch        = {.global = count("batch"), .micro = 1, .seq = count("seq")};
  const auto setting  = [&](const char* key) { return expected.at("optimizer").at(key).as_real(); };
  golden.optimizer    = {.lr           = setting("lr"),
                         .beta1        = setting("beta1"),
                         .beta2        = setting("beta2"),
                         .eps          = setting("eps"),
                         .weight_decay = setting("weight_decay"),
                         .clip         = setting("clip_grad_norm")};
  for (const JsonValue& loss : expected.at("loss").items) golden.loss.push_back(loss.as_real());
  for (const JsonValue& norm : expected.at("grad_norm").items) golden.grad_norm.push_back(norm.as_real());
  const TokenData data(TokenFiles{{golden.folder + "/tokens.u16"}}, golden.model.vocab);
  golden.tokens.resize(static_cast<std::size_t>(*data.num_tokens()));
  data.read(0, golden.tokens);
  golden.gradients = read_tensors(golden.folder + "/grads_step0.safetensors");
  return golden;
}

// The larger one; NaN counts as the largest.
double worse(double a, double b) { return b <= a ? a : b; }

double largest_error(const std::vector<double>& got, const std::vector<double>& expected) {
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) worst = worse(worst, std::abs(got[i] - expected[i]) / expected[i]);
  return worst;
}

double norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

}  // namespace

std::span<const std::int32_t> Golden::tokens_of(int step) const {
  const auto size = static_cast<std::size_t>(batch.global) * static_cast<std::size_t>(batch.seq);
  return std::span(tokens).subspan(static_cast<std::size_t>(step) * size, size + 1);
}

const Golden& golden(const std::string& name) {
  static std::map<std::string, Golden> known;
  const auto found = known.find(name);
  return found != known.end() ? found->second : known.emplace(name, read(name)).first->second;
}

std::string golden_config(const std::string& name) {
  const Golden& what = golden(name);
  return json_line({{"model", {{"load", what.folder}}},
                    {"data", {{"tokens", what.folder + "/tokens.u16"}}},
                    {"batch", {{"global", what.batch.global}, {"micro", 1}, {"seq", what.batch.seq}}},
                    {"optimizer", {{"clip", what.optimizer.clip}}},
                    {"threads", 1}});
}

Trained trained_by_command(const std::string& out, const std::string& gradients) {
  Trained trained;
  for (const JsonValue& line : json_lines(out)) {
    if (line.at("type") != "step") continue;
    trained.loss.push_back(line.at("loss").as_real());
    trained.grad_norm.push_back(line.at("grad_norm").as_real());
  }
  trained.gradients = read_tensors(gradients);
  return trained;
}

Trained train(const Golden& golden, const Plan& plan, int micro, int steps, int threads) {
  LoopbackWorld world(Layout(plan.layout).num_ranks());
  return train(golden, plan, micro, steps, world, threads);
}

Trained train(const Golden& golden, const Plan& given, int micro, int steps, World& world, int threads) {
  Plan plan       = given;
  plan.optimizer  = golden.optimizer;
  BatchSpec batch = golden.batch;
  batch.micro     = micro;
  Trainer trainer(golden.model, plan, batch, world,
                  {.threads        = threads,
                   .step_timeout   = std::chrono::minutes(5),
                   .keep_gradients = true,
                   .storage        = plan.offload.disk.empty() ? MakeStorage{} : spill_files(plan.offload.disk)});
  set_weights(trainer.run(), ModelFolder(golden.folder));
  Trained trained;
  for (int step = 0; step < steps; ++step) {
    const StepResult result = trainer.step(golden.tokens_of(step));
    trained.loss.push_back(result.loss);
    trained.grad_norm.push_back(result.grad_norm);
    if (step > 0) continue;
    for (const std::string& name : golden.model.parameters().names()) {
      auto& values = trained.gradients[name];  // in process 0
      if (trainer.run().is_first())
        values.resize(static_cast<std::size_t>(golden.model.parameters().find(name).num_elements()));
      trainer.run().read_tensor(StepRun::Which::gradient, name, std::span<double>(values));
    }
  }
  return trained;
}

GoldenErrors golden_errors(const Golden& golden, const Trained& trained, int steps) {
  REQUIRE(trained.loss.size() == static_cast<std::size_t>(steps));
  REQUIRE(trained.grad_norm.size() == static_cast<std::size_t>(steps));
  REQUIRE(trained.gradients.size() == golden.gradients.size());
  GoldenErrors found{.loss = largest_error(trained.loss, golden.loss),
                     .norm = largest_error(trained.grad_norm, golden.grad_norm)};
  for (const auto& [name, values] : golden.gradients) {
    CAPTURE(name);
    std::vector<double> difference = trained.gradients.at(name);
    REQUIRE(difference.size() == values.size());
    for (std::size_t i = 0; i < difference.size(); ++i) difference[i] -= values[i];
    found.gradient = worse(found.gradient, norm(difference) / norm(values));
  }
  return found;
}

GoldenErrors check_golden_bounds(const Golden& golden, const Trained& trained, int steps) {
  const GoldenErrors found = golden_errors(golden, trained, steps);
  CHECK(found.loss < 2e-6);
  CHECK(found.norm < 5e-5);
  CHECK(found.gradient < 1e-5);
  return found;
}

}  // namespace stepgraph::testing
