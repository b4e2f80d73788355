#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/ordered_graph.hpp"
#include "engine/graph/timeline.hpp"

// Analyses of a timeline. They use only a graph, its edges and the times, so they work alike on measured and simulated
// steps. Nodes that did not run are left out. Each takes about as long as sorting the nodes, and throws Error(config)
// when the timeline is of another graph.
namespace stepgraph {

// One node of a critical path, and how long it waited after the node before it on the path had ended (the first: after
// the step had begun).
struct PathStep {
  Node node;
  double wait_s                                            = 0;
  friend bool operator==(const PathStep&, const PathStep&) = default;
};

// The nodes that decide how long the step takes, in the order of time. The path is followed backwards from the node
// that ended last. The node before it on the path is the last to end among the predecessors of the node (of all parts
// of its communication) and the node that ran before it on its worker.
[[nodiscard]] std::vector<PathStep> critical_path(const OrderedGraph& graph, const Timeline& timeline);

// How long a lane was busy: a moment counts once, also when several nodes run in it.
struct LaneBusy {
  Rank rank{};
  std::optional<LaneKind> lane = {};  // none: the rank's nodes without a lane, together
  std::uint32_t num_nodes      = 0;
  double busy_s                = 0;
  double share                 = 0;  // of the makespan
};
[[nodiscard]] std::vector<LaneBusy> busy_lanes(const Graph& graph, const Timeline& timeline);  // lanes that have nodes

struct WorkerBusy {
  std::int32_t worker     = 0;
  std::uint32_t num_nodes = 0;
  double busy_s           = 0;
  double share            = 0;
};
[[nodiscard]] std::vector<WorkerBusy> busy_workers(const Timeline& timeline);  // workers that ran nodes

// Element k: for how long exactly k lanes were busy at the same time; element 0 is the rest of the makespan. There is
// one more element than lanes that have nodes.
[[nodiscard]] std::vector<double> lanes_at_once(const Graph& graph, const Timeline& timeline);

// How long a rank communicates, and for how much of that time it also computes. One entry for each place, that is for
// each rank that the graph holds, in the order of graph.ranks().
struct HiddenCommunication {
  double communicate_s = 0;
  double hidden_s      = 0;
  [[nodiscard]] double share() const noexcept { return communicate_s > 0 ? hidden_s / communicate_s : 0; }
};
[[nodiscard]] std::vector<HiddenCommunication> hidden_communication(const Graph& graph, const Timeline& timeline);

// How long a rank moves bytes between device, host memory and disk, and for how much of that time it also computes. A
// transfer is a node that reads buffers in one space and writes buffers in another, or that is on one of the lanes h2d,
// d2h, disk and host: work of the host on such bytes counts too. One entry for each place.
struct HiddenTransfers {
  double transfer_s = 0;
  double hidden_s   = 0;
  [[nodiscard]] double exposed_s() const noexcept { return transfer_s - hidden_s; }
};
[[nodiscard]] std::vector<HiddenTransfers> hidden_transfers(const Graph& graph, const Timeline& timeline);
[[nodiscard]] bool is_transfer(const Graph& graph, Node node);

// Bytes alive on one rank in one space: persistent buffers always, a step buffer from the begin of its first access to
// the end of its last; tokens have none. A buffer that lives for no time does not show.
struct MemoryUse {
  struct Sample {
    double time_s                                        = 0;
    std::int64_t bytes                                   = 0;  // from here to the next sample
    friend bool operator==(const Sample&, const Sample&) = default;
  };
  Rank rank{};
  Space space                 = Space::device;
  std::int64_t persistent     = 0;
  std::int64_t peak           = 0;
  std::vector<Sample> samples = {};  // the first at 0
};
[[nodiscard]] std::vector<MemoryUse> memory_use(const Graph& graph, const Timeline& timeline);  // by rank, then space

}  // namespace stepgraph
