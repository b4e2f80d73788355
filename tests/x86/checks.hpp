#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Checks of the kernels of x86-64, without a test framework: a program of its own, which is cross-compiled on other
// machines and run under an emulator.
namespace stepgraph::testing::x86 {

// From -1 to 1.
inline float number(std::uint64_t i) {
  i = (i + 1) * 0x9e3779b97f4a7c15U;
  i = (i ^ i >> 29) * 0xbf58476d1ce4e5b9U;
  return static_cast<float>(static_cast<double>(i >> 40) * 0x1p-23 - 1);
}
template <class T>
std::vector<T> numbers(std::int64_t count, std::uint64_t seed) {
  std::vector<T> made;
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(count); ++i) made.push_back(T(number(seed * 1'000'003 + i)));
  return made;
}

// The results of a kernel with the instructions that this process has chosen.
struct Result {
  std::string name;
  double tolerance = 0;     // 0: the same bits with all instructions; else the relative distance, in Euclidean norms
  bool cut_right   = true;  // the bits do not depend on how the work is cut
  std::vector<double> values;
};
[[nodiscard]] std::vector<Result> attention_results();
[[nodiscard]] std::vector<Result> layer_results();  // norms, residuals, activations, rotations, conversions, updates

// Compares all products with plain loops, bit by bit. Prints their number, and what is wrong.
[[nodiscard]] bool check_products();
// The same for products of bf16: with their instructions emulated, and with the real ones where the processor has them.
[[nodiscard]] bool check_bf16_products();

}  // namespace stepgraph::testing::x86
