// Runs all kernels with each kind of instructions that this machine has, each in a process of its own, and compares
// them with those of the build. Prints what it has checked; exits with 1 if a kernel is wrong.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ops/cpu/instructions.hpp"
#include "tests/x86/checks.hpp"

namespace {

using stepgraph::cpu::Instructions;
using stepgraph::testing::x86::Result;

std::string name(Instructions instructions) { return std::string(to_string(instructions)); }

std::vector<Result> all_results() {
  std::vector<Result> all = stepgraph::testing::x86::layer_results();
  for (Result& each : stepgraph::testing::x86::attention_results()) all.push_back(std::move(each));
  return all;
}

// Runs them in a child process, which reads the environment anew. It returns the values through shared memory.
constexpr std::size_t room = std::size_t{64} << 20;
bool run_with(Instructions instructions, double* values) {
  const pid_t child = fork();
  if (child == 0) {
    setenv("STEPGRAPH_INSTRUCTIONS", name(instructions).c_str(), 1);
    bool right              = stepgraph::cpu::product_instructions() == instructions;
    const double* const end = values + room / sizeof(double);
    for (const Result& each : all_results()) {
      if (each.values.size() > static_cast<std::size_t>(end - values)) std::abort();
      if (!each.cut_right) std::printf("%s: its bits depend on how it is cut\n", each.name.c_str());
      right = right && each.cut_right;
      std::copy(each.values.begin(), each.values.end(), values);
      values += each.values.size();
    }
    std::fflush(stdout);
    _exit(right ? 0 : 1);
  }
  int status = 1;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

double* shared() {
  void* const made = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) std::abort();
  return static_cast<double*>(made);
}

bool agrees(const Result& kernel, const double* found, const double* expected) {
  const std::size_t count = kernel.values.size();
  if (kernel.tolerance == 0) return std::memcmp(found, expected, count * sizeof(double)) == 0;
  double difference = 0, all = 0;
  for (std::size_t i = 0; i < count; ++i) {
    difference += (found[i] - expected[i]) * (found[i] - expected[i]);
    all += expected[i] * expected[i];
  }
  return std::sqrt(difference) <= kernel.tolerance * std::sqrt(all);  // false for NaN
}

}  // namespace

int main() {
  // First the children: this process chooses its instructions once, and they would inherit the choice.
  struct Found {
    Instructions instructions;
    double* values;
  };
  std::vector<Found> found;
  bool right = true;
  for (const Instructions each : stepgraph::cpu::all_instructions) {
    if (!has(each)) continue;
    found.push_back({each, shared()});
    right = run_with(each, found.back().values) && right;
  }
  const std::vector<Result> kernels = all_results();
  for (const auto& [instructions, values] : found) {
    std::size_t at = 0;
    for (const Result& each : kernels) {
      if (!agrees(each, values + at, found.front().values + at)) {
        std::printf("%s with %s differs from the one of the build\n", each.name.c_str(), name(instructions).c_str());
        right = false;
      }
      at += each.values.size();
    }
    std::printf("%s: %zu cases, %zu values\n", name(instructions).c_str(), kernels.size(), at);
  }
  if (!has(Instructions::avx2)) std::printf("this processor has no AVX2\n");
  right = stepgraph::testing::x86::check_products() && right;
  right = stepgraph::testing::x86::check_bf16_products() && right;
  return right ? 0 : 1;
}
