#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu/attention/attention.hpp"
#include "tests/x86/checks.hpp"

namespace stepgraph::testing::x86 {
namespace {

// One head at a time: the workspaces of the heads differ, so nothing of one head may be left for the next.
template <class T>
Result run(const AttentionShape& shape, std::int64_t sequences, bool drops, const char* type, double tolerance) {
  using W           = Wide<T>;
  const auto rows   = sequences * shape.seq;
  const auto qkv    = numbers<T>(rows * shape.qkv_row(), 1);
  const auto d_out  = numbers<T>(rows * shape.out_row(), 2);
  const auto before = numbers<T>(rows * shape.qkv_row(), 3);
  const std::optional<cpu::AttentionDropout> dropout =
      drops ? std::optional(cpu::AttentionDropout{.mask           = {.key = 77, .dropped = 1u << 30, .scale = 4.0 / 3},
                                                  .first_sequence = 2,
                                                  .first_head     = 1,
                                                  .all_heads      = shape.heads + 1})
            : std::nullopt;
  Result result{.name = std::string("attention ") + type + ' ' + std::to_string(shape.seq) + 'x' +
                        std::to_string(shape.head_size) + (drops ? " with dropout" : ""),
                .tolerance = tolerance,
                .values    = {}};
  std::vector<T> out(d_out.size()), d_qkv(qkv.size());
  std::vector<W> log_sums(static_cast<std::size_t>(rows * shape.heads)), products = log_sums;
  const auto compute = [&](bool reversed, bool in_place, float rest) {
    std::vector<W> workspace(static_cast<std::size_t>(
        std::max(cpu::attention_forward_workspace<T>(shape), cpu::attention_backward_workspace<T>(shape))));
    const auto for_heads = [&](std::int64_t heads, const auto& call) {
      for (std::int64_t i = 0; i < sequences * heads; ++i) {
        const std::int64_t at = reversed ? sequences * heads - 1 - i : i;
        std::fill(workspace.begin(), workspace.end(), W(rest));
        call(at / heads, at % heads);
      }
    };
    const cpu::AttentionForward<T> forward{shape, qkv.data(), out.data(), log_sums.data(), dropout};
    for_heads(shape.heads, [&](std::int64_t sequence, std::int64_t head) {
      cpu::attention_forward(forward, sequence, head, workspace.data());
    });
    if (in_place) d_qkv = before;
    const Into<T> into{d_qkv.data(), in_place ? d_qkv.data() : before.data(), static_cast<std::int64_t>(d_qkv.size())};
    const cpu::AttentionBackward<T> backward{shape,        qkv.data(),      out.data(), log_sums.data(),
                                             d_out.data(), products.data(), dropout};
    for_heads(shape.kv_heads, [&](std::int64_t sequence, std::int64_t head) {
      cpu::attention_backward(backward, into, sequence, head, workspace.data());
    });
    std::vector<double> values;
    for (const T each : out) values.push_back(static_cast<double>(wide(each)));
    for (const W each : log_sums) values.push_back(static_cast<double>(each));
    for (const T each : d_qkv) values.push_back(static_cast<double>(wide(each)));
    return values;
  };
  result.values    = compute(false, false, 0);
  result.cut_right = result.values == compute(true, true, 1e3f);
  return result;
}

}  // namespace

std::vector<Result> attention_results() {
  std::vector<Result> all;
  for (const std::int64_t seq : {1, 9, 64, 131}) {
    for (const std::int64_t size : {4, 20, 32, 64}) {
      const AttentionShape shape{.seq = seq, .heads = 4, .kv_heads = 2, .head_size = size, .scale = 0.7};
      const bool drops = seq % 2 == 1;
      all.push_back(run<float>(shape, 2, drops, "f32", 1e-5));
      all.push_back(run<double>(shape, 2, drops, "f64", 1e-13));
      all.push_back(run<bf16>(shape, 2, drops, "bf16", 0x1p-8));
      all.push_back(run<f16>(shape, 2, drops, "f16", 0x1p-10));
    }
  }
  return all;
}

}  // namespace stepgraph::testing::x86
