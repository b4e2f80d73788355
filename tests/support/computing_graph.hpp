#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/run/memory.hpp"
#include "engine/run/world.hpp"

namespace stepgraph::testing {

// Overwrites the bytes of every step buffer as soon as the last node that touches it is done, inside that node: whoever
// reads them later, or runs before its turn, computes nonsense.
class Poisoner {
 public:
  // From here on, for one run of `graph` on `memory`.
  void arm(const Graph& graph, Memory& memory);
  // Called at the end of every node, by whoever runs it.
  void done(Node node);
  [[nodiscard]] int num_poisoned() const { return num_poisoned_; }

 private:
  struct Uses {
    std::atomic<int> left{0};
  };
  const Graph* graph_ = nullptr;
  Memory* memory_     = nullptr;
  std::vector<Uses> uses_;
  std::atomic<int> num_poisoned_{0};
};

// Does what another world does, then tells the poisoner.
class PoisoningWorld final : public World {
 public:
  PoisoningWorld(World& inner, Poisoner& poisoner) : inner_(inner), poisoner_(poisoner) {}
  [[nodiscard]] int num_ranks() const override { return inner_.num_ranks(); }
  [[nodiscard]] bool is_local(Rank rank) const override { return inner_.is_local(rank); }
  [[nodiscard]] bool waits(LaneKind kind) const override { return inner_.waits(kind); }
  [[nodiscard]] IssueOrder issue_order() const override { return inner_.issue_order(); }
  void begin_step() override { inner_.begin_step(); }
  void communicate(const Context& context, const Exchange& exchange) override;
  void abort(std::string_view why) noexcept override { inner_.abort(why); }

 private:
  World& inner_;
  Poisoner& poisoner_;
};

struct ComputingGraphOptions {
  int ranks            = 2;
  int nodes_per_rank   = 60;
  int lanes            = 3;   // of each rank; one node in eight has none
  int window           = 12;  // how many of a rank's latest buffers a node may read
  int max_buffer_bytes = 8192;
  bool messages        = true;
};

// Nodes with bodies: each mixes what it reads into a buffer of its own, so that one wrong byte anywhere changes the
// results; some send theirs to another rank. `results` are persistent. Bodies tell `poisoner` when they are done.
struct ComputingGraph {
  Graph graph;
  std::vector<Buffer> results;
  std::shared_ptr<Poisoner> poisoner;
};
[[nodiscard]] ComputingGraph computing_graph(std::uint64_t seed, const ComputingGraphOptions& options = {});

}  // namespace stepgraph::testing
