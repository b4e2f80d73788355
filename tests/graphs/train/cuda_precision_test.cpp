// Mixed precision on a GPU with a model of realistic size. Hidden, because it takes a minute on a large GPU.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>

#include "graphs/models/gpt2.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/paths.hpp"

namespace sg = stepgraph;

namespace {

// The training data: the sources of this project, byte by byte.
std::vector<std::int32_t> source_bytes() {
  std::vector<std::filesystem::path> files;
  for (const char* folder : {"engine", "graphs", "ops", "tests"}) {
    for (const auto& file : std::filesystem::recursive_directory_iterator(sg::testing::source_path() + "/" + folder)) {
      if (file.path().extension() == ".cpp" || file.path().extension() == ".hpp") files.push_back(file.path());
    }
  }
  std::sort(files.begin(), files.end());
  std::vector<std::int32_t> tokens;
  for (const auto& path : files) {
    std::ifstream in(path, std::ios::binary);
    std::transform(std::istreambuf_iterator<char>(in), {}, std::back_inserter(tokens),
                   [](char byte) { return static_cast<std::int32_t>(static_cast<unsigned char>(byte)); });
  }
  return tokens;
}

std::vector<double> losses(sg::DType type, const std::vector<std::int32_t>& data, int steps) {
  const sg::BatchSpec batch{.global = 8, .micro = 8, .seq = 1024};
  const sg::Model model = sg::gpt2({.layers = 12, .width = 768, .heads = 12, .context = 1024, .vocab = 50304});
  const auto world      = sg::testing::device_world();
  sg::Trainer trainer(model, {.precision = {.param = type}}, batch, *world);
  const std::size_t per_step = static_cast<std::size_t>(batch.global * batch.seq);
  std::vector<double> all;
  for (int step = 0; step < steps; ++step) {
    trainer.set_rate(6e-4 * (step + 1) / 700);  // the usual warm-up of GPT-2
    const std::size_t begin = static_cast<std::size_t>(step) * per_step % (data.size() - per_step - 1);
    all.push_back(trainer.step(std::span(data).subspan(begin, per_step + 1)).loss);
  }
  return all;
}

}  // namespace

TEST_CASE("GPT-2 124M in bf16 follows fp32 within 1% over 200 steps", "[graphs][cuda][precision][.slow]") {
  sg::testing::need_device();
  constexpr int steps = 200;
  const auto data     = source_bytes();
  const auto wide = losses(sg::DType::f32, data, steps), narrow = losses(sg::DType::bf16, data, steps);
  double most = 0;
  std::cout << "step: loss in fp32, in bf16, relative difference\n";
  for (std::size_t i = 0; i < wide.size(); ++i) {
    const double apart = std::abs(narrow[i] / wide[i] - 1);
    if (i % 20 == 0 || i + 1 == wide.size() || apart > most)
      std::cout << i << ": " << wide[i] << ", " << narrow[i] << ", " << apart << '\n';
    most = std::max(most, apart);
  }
  CHECK(wide.back() < wide.front() / 2);  // the model has learned
  CHECK(most < 0.01);
}
