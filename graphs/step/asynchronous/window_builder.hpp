#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/error.hpp"
#include "graphs/step/asynchronous/version_store.hpp"
#include "graphs/step/step_graph.hpp"

// Builds an asynchronous window: internal to graphs/. Unrolls the step of one rank, for each rank and each step.
namespace stepgraph {

class WindowBuilder {
 public:
  WindowBuilder(const Model& model, const Plan& plan, const BatchSpec& batch, const StepOptions& options);
  StepGraph build();

 private:
  enum class Place : std::uint8_t { of_rank, of_step, nowhere };
  struct Owned {  // a weight whose versions and states this rank has
    std::size_t weight           = 0;
    std::vector<Buffer> versions = {};
    Buffer first = {}, second = {}, master = {};
  };
  struct RankState {
    Rank rank                  = {};
    Graph step                 = Graph(1);
    std::vector<Buffer> kept   = {};  // by buffer of `step`: the buffer of all steps of the window
    std::vector<Owned> owned   = {};
    std::vector<Buffer> done   = {};  // tokens, by step: its gradient is given
    std::optional<Buffer> open = {};  // token: the gate of the next step
    Buffer ready               = {};  // token
  };

  [[nodiscard]] BatchSpec share_of(BatchSpec batch) const {
    batch.global /= dp_;
    return batch;
  }
  [[nodiscard]] StepOptions options_of(std::int64_t first_sequence) const {
    return {.seed = options_.seed, .first_sequence = first_sequence, .join_tied_first = options_.join_tied_first};
  }
  [[nodiscard]] RankList all_ranks() const { return RankList::mesh(Rank{0}, {{dp_, 1}}); }
  [[nodiscard]] const StepRank& alone() const { return alone_.ranks.front(); }
  [[nodiscard]] bool scales() const { return plan_.precision.scales(); }
  // Names of a window of one step are those of a step.
  [[nodiscard]] std::string named(std::string_view name, int step) const {
    return options_.window == 1 ? std::string(name) : str(name, " s", step);
  }

  Buffer make(BufferSpec spec, MemoryRole role);
  Buffer token(const RankState& state, std::string name);
  // A buffer like one of the step of one rank.
  Buffer like(const RankState& state, Buffer buffer, std::string name);
  Buffer like(const RankState& state, Buffer buffer) { return like(state, buffer, alone_.graph.spec(buffer).name); }

  void find_weights();
  void find_places();
  void choose_owners();
  void declare(RankState& state);
  void declare_owned(RankState& state, std::size_t i);
  void add_step(RankState& state, int step);
  std::vector<Buffer> declare_step(RankState& state, int step, StepRank& rank);
  void keep_first(const RankState& state, const StepRank& from, const std::vector<Buffer>& here);
  void add_node(const RankState& state, int step, Node node, const std::vector<Buffer>& here);

  // In window_nodes.cpp.
  void open(RankState& state);
  void meet(const std::string& name);
  void add_gate(int step, int receiver);
  void add_take(RankState& state, int step, const StepRank& rank);
  void add_give(RankState& state, int step, const StepRank& rank, const std::vector<Buffer>& here);
  void finish(RankState& state);
  void close(const RankState& state);
  [[nodiscard]] Access value(const RankState& state, std::size_t i) const;
  [[nodiscard]] AccessList all_values(const RankState& state) const;
  [[nodiscard]] static AccessList states_of(const Owned& owned);
  [[nodiscard]] double value_bytes() const;

  Plan plan_;
  StepOptions options_;
  int dp_, bound_;
  StepGraph alone_;  // of rank 0
  StepGraph made_;
  std::vector<std::size_t> shared_;    // into the weights of a rank: those that are updated
  std::vector<SharedWeight> weights_;  // the same
  std::vector<int> owner_;             // of each of them
  std::vector<Place> places_;          // by buffer of alone_
  std::shared_ptr<VersionStore> store_;
  std::vector<RankState> ranks_;
  std::vector<Group> gates_;  // by receiver: a communicator is a queue, and gates must not wait for each other
  Group together_;
};

}  // namespace stepgraph
