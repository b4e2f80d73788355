// The forward kernel of attention for AVX-512 on other machines: the compiler emulates its vectors of 16 lanes.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <vector>

#include "ops/cpu/attention/attention.hpp"
#if !defined(__x86_64__)
#define STEPGRAPH_AVX512
#include "ops/cpu/attention/attention_forward.cpp"

namespace sg  = stepgraph;
namespace cpu = stepgraph::cpu;

TEST_CASE("attention with vectors of 16 lanes gives the results of the machine's vectors", "[ops][attention]") {
  const std::int64_t seq = GENERATE(1, 20, 131, 300), size = GENERATE(4, 20, 64);
  const bool drops = seq % 2 == 1;
  CAPTURE(seq, size);
  const sg::AttentionShape shape{.seq = seq, .heads = 2, .kv_heads = 1, .head_size = size, .scale = 0.7};
  std::vector<float> qkv(static_cast<std::size_t>(seq * shape.qkv_row()));
  for (std::size_t i = 0; i < qkv.size(); ++i) qkv[i] = std::sin(static_cast<float>(i * i % 1009));
  std::optional<cpu::AttentionDropout> dropout;
  if (drops)
    dropout = cpu::AttentionDropout{.mask = {.key = 77, .dropped = 1U << 30, .scale = 4.0 / 3}, .all_heads = 2};

  std::vector<float> outs[2], log_sums[2];
  for (const bool wide : {false, true}) {
    outs[wide].resize(static_cast<std::size_t>(seq * shape.out_row()));
    log_sums[wide].resize(static_cast<std::size_t>(seq * shape.heads));
    const cpu::AttentionForward<float> attention{shape, qkv.data(), outs[wide].data(), log_sums[wide].data(), dropout};
    std::vector<float> workspace(
        static_cast<std::size_t>(wide ? cpu::attention_kernels::avx512::forward_workspace<float>(shape)
                                      : cpu::attention_forward_workspace<float>(shape)),
        1e3F);
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      if (wide) {
        cpu::attention_kernels::avx512::forward(attention, {0, head, 0, seq}, workspace.data());
      } else {
        cpu::attention_forward(attention, 0, head, workspace.data());
      }
    }
  }
  double furthest = 0;
  for (std::size_t i = 0; i < outs[0].size(); ++i) furthest = std::fmax(furthest, std::fabs(outs[0][i] - outs[1][i]));
  for (std::size_t i = 0; i < log_sums[0].size(); ++i)
    furthest = std::fmax(furthest, std::fabs(log_sums[0][i] - log_sums[1][i]) / 8);
  CHECK(furthest < 1e-5);
}
#endif
