#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/train/trainer.hpp"

// Small models, trained for a few steps on synthetic tokens that can be learned.
namespace stepgraph::testing {

[[nodiscard]] Model small_gpt2(double dropout = 0);   // 4 layers
[[nodiscard]] Model small_llama(double dropout = 0);  // 4 layers, 2 of 4 key and value heads, tied

// global * seq + 1 tokens below `vocab`. noise: two alternating batches of random tokens. chain: always new tokens,
// each determined by the previous one except for two bits.
enum class Tokens : std::uint8_t { noise, chain };
[[nodiscard]] std::vector<std::int32_t> tokens_for(const BatchSpec& batch, int step, std::int64_t vocab,
                                                   Tokens kind = Tokens::noise);

struct History {
  std::vector<double> loss, grad_norm;
  std::uint64_t weights                                  = 0;  // a hash of the bits of all weights after the last step
  friend bool operator==(const History&, const History&) = default;
};
[[nodiscard]] History train(const Model& model, const Plan& plan, const BatchSpec& batch, int steps,
                            const TrainerOptions& options = {.threads = 2, .seed = 7}, Tokens kind = Tokens::noise);

// A hash of the bits of all weights, by tensor: the same in every layout. Throws if copies of a weight differ: those of
// data-parallel ranks, of ranks that hold a tied weight, and of a master and its rounded value.
[[nodiscard]] std::uint64_t hash_weights(const StepRun& run);

// Flushes. The bytes of all weights, masters and moments, and the numbers of updates, on all ranks.
[[nodiscard]] std::vector<std::byte> training_state(const StepRun& run);

// Each bit of `classes` is a class: params, grads, optimizer, activations.
[[nodiscard]] OffloadPlan offload_of(int classes);

// A run with an optional loss scale.
struct ScaledHistory {
  History good;                // of the steps that were not skipped
  std::vector<double> scales;  // of each step; 0: not scaled
  std::vector<bool> skipped;
  friend bool operator==(const ScaledHistory&, const ScaledHistory&) = default;
};
[[nodiscard]] ScaledHistory train_scaled(const Model& model, const Plan& plan, const BatchSpec& batch, int steps,
                                         int threads = 2);

// The largest relative difference of losses, and of norms.
[[nodiscard]] double loss_distance(const History& a, const History& b);
[[nodiscard]] double norm_distance(const History& a, const History& b);

}  // namespace stepgraph::testing
