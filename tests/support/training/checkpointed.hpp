#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "backends/loopback/world.hpp"
#include "graphs/train/checkpoint.hpp"

// For tests of checkpoints: small runs on loopback.
namespace stepgraph::testing {

inline const BatchSpec checkpoint_batch{.global = 16, .micro = 2, .seq = 4};

// A trainer with its world. The model must outlive it.
struct Training {
  LoopbackWorld world;
  Trainer trainer;
  const Model& model;
  BatchSpec spec;
  Training(const Model& of, const Plan& plan, const BatchSpec& batch = checkpoint_batch, std::uint64_t seed = 7);

  std::vector<double> train(int end);  // steps up to number `end`; returns their losses
  [[nodiscard]] std::uint64_t weights();
};

// Saves a checkpoint and returns its path. Checkpoints in the folder count as those of the same run.
std::string save_checkpoint(Trainer& trainer, const std::filesystem::path& folder, bool async = true);

using States = std::map<std::pair<std::string, StateKind>, std::vector<double>>;
[[nodiscard]] States states_of(const CheckpointReader& reader);

// Where files are not synced to a disk.
[[nodiscard]] std::filesystem::path fast_folder();

}  // namespace stepgraph::testing
