#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/run/memory.hpp"
#include "engine/run/world.hpp"

namespace stepgraph::testing {

// Overwrites the bytes of every step buffer when the last node that accesses it ends, inside that node. A node that
// reads them later, or runs too early, then computes wrong results.
class Poisoner {
 public:
  // Active from here on, for one run of `graph` on `memory`.
  void arm(const Graph& graph, Memory& memory);
  // Called at the end of every node, on the thread that runs it.
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

// Forwards to another world, then notifies the poisoner.
class PoisoningWorld final : public World {
 public:
  PoisoningWorld(World& inner, Poisoner& poisoner) : inner_(inner), poisoner_(poisoner) {}
  [[nodiscard]] int num_ranks() const override { return inner_.num_ranks(); }
  [[nodiscard]] RankSet local_ranks() const override { return inner_.local_ranks(); }
  [[nodiscard]] bool waits(LaneKind kind) const override { return inner_.waits(kind); }
  [[nodiscard]] IssueOrder issue_order() const override { return inner_.issue_order(); }
  void begin_step(std::shared_ptr<const RunView> run) override { inner_.begin_step(std::move(run)); }
  void end_step() noexcept override { inner_.end_step(); }
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
  int window           = 12;  // number of a rank's latest buffers that a node may read
  int max_buffer_bytes = 8192;
  bool messages        = true;
};

// Nodes with bodies. Each mixes the bytes it reads into its own buffer, so that one wrong byte anywhere changes the
// results. Some send their buffer to another rank. `results` are persistent. Bodies notify `poisoner` when they end.
struct ComputingGraph {
  Graph graph;
  std::vector<Buffer> results;
  std::shared_ptr<Poisoner> poisoner;
};
[[nodiscard]] ComputingGraph computing_graph(std::uint64_t seed, const ComputingGraphOptions& options = {});

}  // namespace stepgraph::testing
