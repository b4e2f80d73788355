#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/step/builder/setup.hpp"

// Which ranks of a layout are alike, so that what is planned or chosen for one of them holds for all. Internal to
// graphs/.
namespace stepgraph {

// Ranks with equal likeness need the same memory. That includes what a world needs for parts (WorkspaceNeeds::part):
// backends/nccl/calls.hpp takes the same workspace at every place of a group. Planning every rank instead would take a
// minute for 256 ranks of a large model.
struct Likeness {
  int pp = 0;
  std::vector<TensorShape> weights;
  std::vector<std::int64_t> kept;  // elements of weights that are sharded by rows: members can have different numbers
  friend auto operator<=>(const Likeness&, const Likeness&) = default;
};

class RankKinds {
 public:
  // `resolved`: see graphs/step/builder/resolve.hpp.
  RankKinds(const Model& model, const Plan& resolved, const BatchSpec& batch, bool trains);

  // Data-parallel ranks run the same nodes and have equal shards of every flat. So do tensor-parallel ranks, where
  // weights are cut evenly.
  [[nodiscard]] Likeness of(Rank rank);

  // The rank that chooses for this one: of data-parallel ranks the first, which has the largest shards, and of
  // tensor-parallel ranks the first that is like it. The same in all processes.
  [[nodiscard]] Rank first_like(Rank rank);

 private:
  StepSetup setup_;
  std::map<int, std::vector<ShardUnit>> units_;  // by tensor-parallel index
};

}  // namespace stepgraph
