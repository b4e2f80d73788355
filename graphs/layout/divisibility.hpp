#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// Checks that a model fits a layout. Each throws Error(config) that names the numbers and what would be right. Layout's
// constructor checks that the degrees multiply to the size of the world.
namespace stepgraph {

enum class LayerSplit : std::uint8_t {
  even,      // the same for every stage; refuses what does not divide
  balanced,  // the first stages get one more where it does not divide
};
[[nodiscard]] std::string_view to_string(LayerSplit split) noexcept;
[[nodiscard]] LayerSplit parse_layer_split(std::string_view text);

// How many layers each stage has.
[[nodiscard]] std::vector<int> split_layers(int layers, int stages, LayerSplit split = LayerSplit::even);
// Checks an explicit list: one number for each stage, adding up to the number of layers. A stage can have no layers,
// for example a stage that has the embedding alone.
[[nodiscard]] std::vector<int> split_layers(int layers, int stages, std::vector<int> layers_per_stage);

// Sequences of one step, over data-parallel ranks and microbatches.
struct BatchSplit {
  int global = 1;  // of the whole step
  int micro  = 1;  // in one microbatch of one data-parallel rank
  int dp     = 1;
};
[[nodiscard]] int num_microbatches(const BatchSplit& batch);  // global / dp / micro

// The sizes that tensor parallelism cuts; 0: the model has none. With fewer key and value heads than ranks, several
// ranks hold the same head.
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
