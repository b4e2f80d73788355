#pragma once
#include <span>
#include <vector>

#include "engine/run/threads/affinity.hpp"
#include "engine/run/threads/numa_nodes.hpp"

// Which threads and which ranks belong to which NUMA node: internal to engine/.
namespace stepgraph {

// Neighbouring NUMA nodes.
struct NodeRange {
  int first = 0, count = 1;
  [[nodiscard]] int end() const noexcept { return first + count; }
  [[nodiscard]] bool contains(int node) const noexcept { return node >= first && node < end(); }
  [[nodiscard]] NodeRange together(const NodeRange& other) const noexcept;  // with the nodes between them
  friend bool operator==(const NodeRange&, const NodeRange&) = default;
};

// Neighbouring NUMA nodes, and the threads that compute there. Threads are numbered by node, as permits to compute.
struct NumaRange {
  NodeRange nodes;
  int first_thread = 0, num_threads = 1;
};

// How many of `count` threads or ranks each node gets: by its number of processors, and at least one. `count` is at
// least the number of nodes.
[[nodiscard]] std::vector<int> deal(int count, std::span<const NumaNode> nodes);

// The nodes of the i-th of `num_ranks` ranks of this process. Neighbouring ranks have the same node or neighbouring
// nodes. With fewer ranks than nodes each rank has several.
[[nodiscard]] NodeRange nodes_of_rank(int i, int num_ranks, std::span<const NumaNode> nodes);

// The threads of an executor by NUMA node. Without nodes, and with fewer threads than nodes, all threads are on one
// node, and none of them is bound to processors.
class NumaPlaces {
 public:
  explicit NumaPlaces(int num_threads, std::vector<NumaNode> nodes = {});

  [[nodiscard]] bool binds() const noexcept { return !nodes_.empty(); }
  [[nodiscard]] int num_nodes() const noexcept { return static_cast<int>(first_thread_.size()) - 1; }
  [[nodiscard]] int num_threads() const noexcept { return first_thread_.back(); }
  [[nodiscard]] const NumaRange& all() const noexcept { return all_; }
  [[nodiscard]] NumaRange range(NodeRange nodes) const noexcept;
  [[nodiscard]] NumaRange node(int node) const noexcept { return range({node, 1}); }
  [[nodiscard]] int node_of_thread(int thread) const noexcept;
  [[nodiscard]] NodeRange nodes_of_rank(int i, int num_ranks) const;

  // Binds this thread to the processors of a node. Does nothing if it is bound to them already, if binds() is false, or
  // if the system refuses: then the thread runs where it did.
  void bind_thread(int node) const noexcept;
  // Binds this thread to one of the nodes, unless it is bound to one of them already, or unless these are all nodes.
  void bind_thread_to_any(NodeRange nodes) const noexcept;
  // The node of these to which this thread is bound. Of none of them: the first.
  [[nodiscard]] static int node_of_this_thread(NodeRange nodes) noexcept;

  // For threads of TBB: binds this thread, and lets it go again.
  void lend_thread(int node) const noexcept;
  void return_thread() const noexcept;
  [[nodiscard]] const Affinity& unbound() const noexcept { return unbound_; }

 private:
  std::vector<NumaNode> nodes_;
  std::vector<Affinity> affinities_;  // by node
  std::vector<int> first_thread_;     // by node; then the number of threads
  NumaRange all_;
  Affinity unbound_;
};

}  // namespace stepgraph
