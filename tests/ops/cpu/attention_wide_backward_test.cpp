// The backward kernel of attention for AVX-512 on other machines: the compiler emulates its vectors of 16 lanes.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <vector>

#include "ops/cpu/attention/attention.hpp"
#if !defined(__x86_64__)
#define STEPGRAPH_AVX512
#include "ops/cpu/attention/attention_backward.cpp"

namespace sg  = stepgraph;
namespace cpu = stepgraph::cpu;

TEST_CASE("gradients of attention with vectors of 16 lanes are those of the machine's vectors",
          "[ops][attention][gradient]") {
  const std::int64_t seq = GENERATE(1, 20, 131, 300), size = GENERATE(4, 20, 64);
  const bool drops = seq % 2 == 1, adds = size == 64;
  CAPTURE(seq, size);
  const sg::AttentionShape shape{.seq = seq, .heads = 2, .kv_heads = 1, .head_size = size, .scale = 0.7};
  const auto numbers = [](std::int64_t count, std::size_t of) {
    std::vector<float> made(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < made.size(); ++i) made[i] = std::sin(static_cast<float>((i + of) * i % 1009));
    return made;
  };
  const auto qkv = numbers(seq * shape.qkv_row(), 1), d_out = numbers(seq * shape.out_row(), 2),
             before = numbers(seq * shape.qkv_row(), 3);
  std::optional<cpu::AttentionDropout> dropout;
  if (drops)
    dropout = cpu::AttentionDropout{.mask = {.key = 77, .dropped = 1U << 30, .scale = 4.0 / 3}, .all_heads = 2};

  std::vector<float> out = d_out, log_sums(static_cast<std::size_t>(seq * shape.heads)), products = log_sums;
  std::vector<float> room(static_cast<std::size_t>(cpu::attention_forward_workspace<float>(shape)));
  for (std::int64_t head = 0; head < shape.heads; ++head) {
    cpu::attention_forward<float>({shape, qkv.data(), out.data(), log_sums.data(), dropout}, 0, head, room.data());
  }
  const cpu::AttentionBackward<float> attention{shape,        qkv.data(),      out.data(), log_sums.data(),
                                                d_out.data(), products.data(), dropout};
  std::vector<float> found[2];
  for (const bool wide : {false, true}) {
    std::vector<float> workspace(
        static_cast<std::size_t>(wide ? cpu::attention_kernels::avx512::backward_workspace<float>(shape)
                                      : cpu::attention_backward_workspace<float>(shape)),
        1e3F);
    found[wide] = std::vector<float>(qkv.size(), 1e3F);
    const sg::Into<float> into{found[wide].data(), adds ? before.data() : nullptr,
                               static_cast<std::int64_t>(qkv.size())};
    if (wide) {
      cpu::attention_kernels::avx512::backward(attention, into, 0, 0, workspace.data());
    } else {
      cpu::attention_backward(attention, into, 0, 0, workspace.data());
    }
  }
  double furthest = 0, largest = 1;
  for (std::size_t i = 0; i < qkv.size(); ++i) {
    furthest = std::fmax(furthest, std::fabs(found[0][i] - found[1][i]));
    largest  = std::fmax(largest, std::fabs(found[0][i]));
  }
  CHECK(furthest < 1e-5 * largest);
}
#endif
