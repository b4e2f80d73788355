#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/run/world.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/train/trainer.hpp"

// Training steps of known models in known layouts, for benchmarks.
namespace stepgraph::bench {

[[nodiscard]] std::vector<std::string> known_models();
// "2x1x1": data, tensor and pipeline parallel. Throws Error(config) for anything else.
[[nodiscard]] LayoutSpec parse_degrees(const std::string& text);

// A model in a layout, with its batch. Data-parallel ranks share the model's batch, so the work is the same as on one
// rank. Layouts with tensor or pipeline parallel ranks get eight microbatches of that size, because a pipeline needs
// several.
struct TrainingCase {
  std::string model;
  std::string layout;
  Gpt2Spec spec;
  Plan plan;
  BatchSpec batch;

  [[nodiscard]] double flops_per_token() const;  // 6 (12 L d^2 + V d) + 12 L T d
  [[nodiscard]] std::int64_t tokens() const { return std::int64_t{batch.global} * batch.seq; }
  // The same sequences and microbatches on one rank.
  [[nodiscard]] TrainingCase on_one_rank() const;
  [[nodiscard]] TrainingCase not_sharded() const;
};
[[nodiscard]] TrainingCase training_case(const std::string& model, const std::string& layout,
                                         Shard strategy = Shard::none);

// A trainer on synthetic tokens, ready to run steps.
class Training {
 public:
  // `devices`: of backend cuda, at most as many as ranks; empty: all.
  Training(const TrainingCase& what, int threads, const std::string& backend = "loopback",
           const std::vector<int>& devices = {0});
  Training(const TrainingCase& what, int threads, World& world);  // which outlives it
  double step(Recorder* recorder = nullptr);  // seconds; throws Error(run) if the loss is not finite
  [[nodiscard]] StepRun& run() { return trainer_.run(); }
  [[nodiscard]] World& world() { return world_; }

 private:
  std::unique_ptr<World> own_world_;  // null: another's
  World& world_;
  Trainer trainer_;
  std::vector<std::int32_t> tokens_;
};

}  // namespace stepgraph::bench
