#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// Does a model fit a layout? Each check throws Error(config) that names the numbers and what would be right. (Whether
// degrees multiply to the world is checked when a Layout is made.)
namespace stepgraph {

enum class LayerSplit : std::uint8_t {
  even,      // the same for every stage; refuses what does not divide
  balanced,  // the first stages get one more where it does not divide
};
[[nodiscard]] std::string_view to_string(LayerSplit split) noexcept;
[[nodiscard]] LayerSplit parse_layer_split(std::string_view text);

// How many layers each stage has.
[[nodiscard]] std::vector<int> split_layers(int layers, int stages, LayerSplit split = LayerSplit::even);
// As given, once it is as long as there are stages and adds up. A stage may have none: one for an embedding alone.
[[nodiscard]] std::vector<int> split_layers(int layers, int stages, std::vector<int> layers_per_stage);

// Sequences of one step, over data-parallel ranks and microbatches.
struct BatchSplit {
  int global = 1;  // of the whole step
  int micro  = 1;  // in one microbatch of one data-parallel rank
  int dp     = 1;
};
[[nodiscard]] int num_microbatches(const BatchSplit& batch);  // global / dp / micro

// What tensor parallelism cuts; 0: there is none of it. Where there are fewer key and value heads than ranks, each is
// held by several.
struct TensorParallelSplit {
  int tp                = 1;
  std::int64_t heads    = 0;
  std::int64_t kv_heads = 0;
  std::int64_t vocab    = 0;
};
void check_tensor_parallel(const TensorParallelSplit& split);

// For messages: the nearest multiples of `by` around a number that is not one, "56 or 64", and the nearest divisors of
// a number around `by`, which is not one, "2 or 4". There may be one of them only. Of numbers from 1 on.
[[nodiscard]] std::string multiples_around(std::int64_t number, std::int64_t by);
[[nodiscard]] std::string divisors_around(std::int64_t number, std::int64_t by);

}  // namespace stepgraph
