#include "graphs/layout/divisibility.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

constexpr std::array<std::string_view, 2> split_names{"even", "balanced"};

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::config, why); }

void check_positive(std::string_view subject, std::string_view name, std::int64_t value) {
  if (value < 1) refuse(str(subject, ": ", name, " is ", value, " (at least 1)"));
}

void check_layers(int layers, int stages) {
  check_positive("pipeline", "layers", layers);
  check_positive("pipeline", "stages", stages);
}

std::string list_text(const std::vector<int>& list) {
  return join_text(list, ", ", [](int count) { return str(count); });
}

}  // namespace

std::string multiples_around(std::int64_t number, std::int64_t by) {
  const std::int64_t below = number / by * by;
  return below == 0 ? str(by) : str(below, " or ", below + by);
}

std::string divisors_around(std::int64_t number, std::int64_t by) {
  std::int64_t below = 1, above = number;
  for (std::int64_t small = 1; small <= number / small; ++small) {
    if (number % small != 0) continue;
    for (const std::int64_t divisor : {small, number / small}) {
      if (divisor <= by) below = std::max(below, divisor);
      if (divisor >= by) above = std::min(above, divisor);
    }
  }
  return above < by ? str(below) : str(below, " or ", above);
}

std::string_view to_string(LayerSplit split) noexcept { return split_names[static_cast<std::size_t>(split)]; }

LayerSplit parse_layer_split(std::string_view text) {
  for (std::size_t i = 0; i < split_names.size(); ++i) {
    if (text == split_names[i]) return static_cast<LayerSplit>(i);
  }
  refuse(str("pipeline: unknown split of layers '", text, "' (known: even, balanced)"));
}

std::vector<int> split_layers(int layers, int stages, LayerSplit split) {
  check_layers(layers, stages);
  if (layers < stages)
    refuse(str("pipeline: ", layers, " layers over ", stages, " stages leave stages without layers (at most ", layers,
               " stages, or an explicit list)"));
  std::vector<int> counts(static_cast<std::size_t>(stages), layers / stages);
  const int rest = layers % stages;
  if (rest != 0 && split == LayerSplit::even)
    refuse(str("pipeline: ", layers, " layers do not divide over ", stages, " stages (",
               multiples_around(layers, stages), " layers, ", divisors_around(layers, stages),
               " stages, a balanced split, or an explicit list)"));
  std::for_each(counts.begin(), counts.begin() + rest, [](int& count) { ++count; });
  return counts;
}

std::vector<int> split_layers(int layers, int stages, std::vector<int> layers_per_stage) {
  check_layers(layers, stages);
  if (layers_per_stage.size() != static_cast<std::size_t>(stages))
    refuse(str("pipeline: the list of layers (", list_text(layers_per_stage), ") has ", layers_per_stage.size(),
               " entries, but there are ", stages, " stages (one entry for each stage)"));
  std::int64_t sum = 0;
  for (const int count : layers_per_stage) {
    if (count < 0)
      refuse(str("pipeline: the list of layers (", list_text(layers_per_stage), ") has ", count, " (0 or more)"));
    sum += count;
  }
  if (sum != layers)
    refuse(str("pipeline: the list of layers (", list_text(layers_per_stage), ") adds up to ", sum,
               ", but the model has ", layers));
  return layers_per_stage;
}

int num_microbatches(const BatchSplit& batch) {
  check_positive("batch", "global", batch.global);
  check_positive("batch", "micro", batch.micro);
  check_positive("batch", "dp", batch.dp);
  const std::int64_t round = std::int64_t{batch.dp} * batch.micro;
  if (batch.global % batch.dp != 0) {
    const std::string other =
        batch.global % batch.micro == 0 ? str(", or dp ", divisors_around(batch.global / batch.micro, batch.dp)) : "";
    refuse(str("batch: global ", batch.global, " does not divide over dp ", batch.dp, " (global ",
               multiples_around(batch.global, round), other, ")"));
  }
  if (batch.global % round != 0)
    refuse(str("batch: the ", batch.global / batch.dp, " sequences of a data-parallel rank (global ", batch.global,
               " / dp ", batch.dp, ") do not divide into microbatches of ", batch.micro, " (global ",
               multiples_around(batch.global, round), ", or micro ",
               divisors_around(batch.global / batch.dp, batch.micro), ")"));
  return batch.global / batch.dp / batch.micro;
}

void check_tensor_parallel(const TensorParallelSplit& split) {
  check_positive("tensor parallel", "tp", split.tp);
  const std::int64_t common = std::gcd(std::gcd(split.heads, split.kv_heads), split.vocab);  // with 0: the other
  const auto check          = [&](std::string_view name, std::int64_t number) {
    if (number < 0) refuse(str("tensor parallel: ", name, " is ", number, " (0 or more)"));
    if (number % split.tp != 0)
      refuse(str("tensor parallel: ", name, " ", number, " is not divisible by tp ", split.tp, " (", name, " ",
                          multiples_around(number, split.tp), ", or tp ", divisors_around(common, split.tp), ")"));
  };
  check("heads", split.heads);
  // Fewer of them than ranks are held by several ranks each.
  const bool shared = split.kv_heads > 0 && split.kv_heads < split.tp;
  if (shared && split.tp % split.kv_heads != 0)
    refuse(str("tensor parallel: tp ", split.tp, " is not divisible by kv_heads ", split.kv_heads,
               " (kv_heads that divides tp or is a multiple of tp)"));
  if (!shared) check("kv_heads", split.kv_heads);
  if (split.kv_heads > 0 && split.heads % split.kv_heads != 0)
    refuse(str("tensor parallel: heads ", split.heads, " is not divisible by kv_heads ", split.kv_heads, " (heads ",
               multiples_around(split.heads, split.kv_heads), ")"));
  check("vocab", split.vocab);
}

}  // namespace stepgraph
