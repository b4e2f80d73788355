#include "tools/bench/machine/floors.hpp"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "engine/base/error.hpp"
#include "ops/cpu/instructions.hpp"

namespace stepgraph::bench {
namespace {

// Runs work(thread) on all threads at once, `runs` times; returns the least of the seconds that all of them take. New
// threads can share a core until the system has moved them apart, so the first runs can be slow.
double on_threads(int threads, int runs, const std::function<void(int)>& work) {
  std::vector<double> seconds;
  auto begin = std::chrono::steady_clock::now();
  int phase  = 0;  // even: a run begins; odd: it ends
  std::barrier all(threads, [&]() noexcept {
    const auto now = std::chrono::steady_clock::now();
    if (phase++ % 2 != 0) seconds.push_back(std::chrono::duration<double>(now - begin).count());
    begin = now;
  });
  seconds.reserve(static_cast<std::size_t>(runs));
  std::vector<std::jthread> pool;
  for (int thread = 0; thread < threads; ++thread) {
    pool.emplace_back([&, thread] {
      for (int run = 0; run < runs; ++run) {
        all.arrive_and_wait();
        work(thread);
        all.arrive_and_wait();
      }
    });
  }
  pool.clear();
  return *std::min_element(seconds.begin(), seconds.end());
}

// Enough sums that few additions wait for the one before. AVX2 has 16 registers.
#if defined(__aarch64__)
constexpr int num_sums = 24;
#else
constexpr int num_sums = 12;
#endif
typedef float FourLanes __attribute__((vector_size(16)));     // NOLINT
typedef float EightLanes __attribute__((vector_size(32)));    // NOLINT
typedef float SixteenLanes __attribute__((vector_size(64)));  // NOLINT
template <class Vector>
[[gnu::always_inline]] inline float multiply_and_add(std::int64_t times) {
  Vector sum[num_sums], a = Vector{} + 0.5f, b = Vector{} + 0x1p-40f;  // too small to change a sum
  for (Vector& each : sum) each = a;
  for (std::int64_t i = 0; i < times; ++i) {
    // As if they changed: their product is computed for each sum.
#if defined(__aarch64__)
    asm volatile("" : "+w"(a), "+w"(b));
#elif defined(__x86_64__)  // Clang takes "x" only for vectors that the template's own target has; GCC uses registers
    asm volatile("" : "+mx"(a), "+mx"(b));
#endif
#pragma GCC unroll 24
    for (Vector& each : sum) each += a * b;
  }
  float out = 0;
  for (const Vector& each : sum) out += each[0];
  return out;
}

float sums_of_build(std::int64_t times) { return multiply_and_add<FourLanes>(times); }
#ifdef __x86_64__
[[gnu::target("avx2,fma")]] float sums_avx2(std::int64_t times) { return multiply_and_add<EightLanes>(times); }
[[gnu::target("avx512f,avx2,fma")]] float sums_avx512(std::int64_t times) {
  return multiply_and_add<SixteenLanes>(times);
}
#endif

#ifdef __aarch64__
// By hand, because this file is compiled for processors without SVE: 24 sums, and their first lanes together. Vectors
// 24 and 25 are the factors.
float sums_sve(std::int64_t times) {
  float out = 0;
  // clang-format off
#define STEPGRAPH_ALL(each) each(0) each(1) each(2) each(3) each(4) each(5) each(6) each(7) each(8) each(9) each(10)   \
  each(11) each(12) each(13) each(14) each(15) each(16) each(17) each(18) each(19) each(20) each(21) each(22) each(23)
#define STEPGRAPH_SET(sum) "mov z" #sum ".d, z24.d\n"
#define STEPGRAPH_MULTIPLY(sum) "fmla z" #sum ".s, p0/m, z24.s, z25.s\n"
#define STEPGRAPH_SUM(sum) "fadd %s[out], %s[out], s" #sum "\n"
  asm volatile(".arch_extension sve\n"
      "ptrue p0.s\n fmov z24.s, #0.5\n mov z25.s, %w[small]\n" STEPGRAPH_ALL(STEPGRAPH_SET)
      ".p2align 5\n 1:\n" STEPGRAPH_ALL(STEPGRAPH_MULTIPLY) "subs %[times], %[times], #1\n b.gt 1b\n"
      STEPGRAPH_ALL(STEPGRAPH_SUM)
      : [times] "+r"(times), [out] "+w"(out)
      : [small] "r"(0x2b800000)  // the bits of 2^-40
      : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16",
        "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "p0", "cc");
#undef STEPGRAPH_ALL
#undef STEPGRAPH_SET
#undef STEPGRAPH_MULTIPLY
#undef STEPGRAPH_SUM
  // clang-format on
  return out;
}
int lanes_sve() {
  std::int64_t lanes = 0;
  asm volatile(".arch_extension sve\n cntw %0\n" : "=r"(lanes));
  return static_cast<int>(lanes);
}
#endif

struct Loop {
  float (*run)(std::int64_t times);
  int lanes;
};
Loop best_loop() {
#ifdef __x86_64__
  if (cpu::best_instructions() == cpu::Instructions::avx512) return {sums_avx512, 16};
  if (cpu::best_instructions() == cpu::Instructions::avx2) return {sums_avx2, 8};
#elif defined(__aarch64__)
  if (cpu::product_instructions() == cpu::Instructions::sve) return {sums_sve, lanes_sve()};
#endif
  return {sums_of_build, 4};
}

double fma_gflops(int threads, int runs, std::int64_t times) {
  const Loop loop = best_loop();
  std::vector<float> out(static_cast<std::size_t>(threads) * 16);  // a cache line each
  const double seconds =
      on_threads(threads, runs, [&](int thread) { out[static_cast<std::size_t>(thread) * 16] = loop.run(times); });
  for (int i = 0; i < threads; ++i) {
    if (const float sum = out[static_cast<std::size_t>(i) * 16]; sum != num_sums * 0.5f)
      throw Error(ErrorKind::run, str("loop of multiply-adds: ", sum, " (", num_sums * 0.5f, ")"));
  }
  return 2.0 * num_sums * loop.lanes * static_cast<double>(times) * threads / seconds / 1e9;
}

// The same thread writes an element first and computes it later.
double triad_gbps(int threads, int runs, std::int64_t elements) {
  const auto new_array = [&] { return std::unique_ptr<float[]>(new float[static_cast<std::size_t>(elements)]); };
  const std::unique_ptr<float[]> a = new_array(), b = new_array(), c = new_array();
  const auto begin_of = [&](int thread) { return elements * thread / threads; };
  const auto fill     = [&](int thread) {
    const std::int64_t begin = begin_of(thread), count = begin_of(thread + 1) - begin;
    std::fill_n(a.get() + begin, count, 0.0f);
    std::fill_n(b.get() + begin, count, 1.0f);
    std::fill_n(c.get() + begin, count, 2.0f);
  };
  on_threads(threads, 1, fill);
  const double seconds = on_threads(threads, runs, [&](int thread) {
    const std::int64_t begin = begin_of(thread);
    triad(a.get() + begin, b.get() + begin, c.get() + begin, begin_of(thread + 1) - begin);
  });
  if (!std::all_of(a.get(), a.get() + elements, [](float sum) { return sum == 7.0f; }))
    throw Error(ErrorKind::run, "triad: 1 + 3 * 2 is not 7");
  return 12 * static_cast<double>(elements) / seconds / 1e9;
}

}  // namespace

double Floors::seconds(double flops, double bytes) const noexcept {
  return std::max(flops / (1e9 * fma_gflops), bytes / (1e9 * triad_gbps));
}

Floors measure_floors(int threads, bool dry_run) {
  if (dry_run) return {fma_gflops(threads, 1, 1000), triad_gbps(threads, 1, 10'000)};
  return {fma_gflops(threads, 40, 2'000'000), triad_gbps(threads, 10, std::int64_t{24} << 20)};
}

double measure_fma_gflops(int threads, bool dry_run) {
  return dry_run ? fma_gflops(threads, 1, 1000) : fma_gflops(threads, 5, 2'000'000);
}

}  // namespace stepgraph::bench
