#include "engine/run/threads/numa_places.hpp"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <utility>

namespace stepgraph {
namespace {

// The node to which this thread is bound; -1: it is not bound. Threads of TBB serve one executor after another.
constinit thread_local int bound_node = -1;

}  // namespace

NodeRange NodeRange::together(const NodeRange& other) const noexcept {
  const int least = std::min(first, other.first);
  return {least, std::max(end(), other.end()) - least};
}

std::vector<int> deal(int count, std::span<const NumaNode> nodes) {
  assert(count >= std::ssize(nodes));
  const std::int64_t total = num_processors(nodes);
  std::int64_t sum         = 0;
  std::vector<int> parts;
  int begin = 0;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    sum += std::ssize(nodes[i].processors);
    const int left = static_cast<int>(nodes.size() - i) - 1;  // nodes after this one
    const int end  = std::clamp(static_cast<int>((2 * count * sum + total) / (2 * total)), begin + 1, count - left);
    parts.push_back(end - begin);
    begin = end;
  }
  return parts;
}

NodeRange nodes_of_rank(int i, int num_ranks, std::span<const NumaNode> nodes) {
  const int num_nodes = static_cast<int>(nodes.size());
  if (num_ranks < num_nodes) {
    const int first = i * num_nodes / num_ranks;
    return {first, (i + 1) * num_nodes / num_ranks - first};
  }
  const std::vector<int> ranks = deal(num_ranks, nodes);
  int node                     = 0;
  for (int before = ranks[0]; before <= i; before += ranks[static_cast<std::size_t>(node)]) ++node;
  return {node, 1};
}

NumaPlaces::NumaPlaces(int num_threads, std::vector<NumaNode> nodes)
    : nodes_(std::move(nodes)), first_thread_{0}, unbound_(std::span<const int>()) {
  if (std::ssize(nodes_) > num_threads) nodes_.clear();
  if (nodes_.empty()) {
    first_thread_.push_back(num_threads);
  } else {
    for (const int threads : deal(num_threads, nodes_)) first_thread_.push_back(first_thread_.back() + threads);
    for (const NumaNode& node : nodes_) affinities_.emplace_back(node.processors);
    unbound_ = Affinity(allowed_processors());
  }
  all_ = range({0, num_nodes()});
}

NumaRange NumaPlaces::range(NodeRange nodes) const noexcept {
  const int first = first_thread_[static_cast<std::size_t>(nodes.first)];
  return {nodes, first, first_thread_[static_cast<std::size_t>(nodes.end())] - first};
}

int NumaPlaces::node_of_thread(int thread) const noexcept {
  const auto next = std::upper_bound(first_thread_.begin(), first_thread_.end(), thread);
  return static_cast<int>(next - first_thread_.begin()) - 1;
}

NodeRange NumaPlaces::nodes_of_rank(int i, int num_ranks) const {
  return binds() ? stepgraph::nodes_of_rank(i, num_ranks, nodes_) : NodeRange{};
}

void NumaPlaces::bind_thread(int node) const noexcept {
  if (!binds() || bound_node == node) return;
  if (affinities_[static_cast<std::size_t>(node)].apply_to(0)) bound_node = node;
}

void NumaPlaces::bind_thread_to_any(NodeRange nodes) const noexcept {
  if (!nodes.contains(bound_node) && nodes.count < num_nodes()) bind_thread(nodes.first);
}

int NumaPlaces::node_of_this_thread(NodeRange nodes) noexcept {
  return nodes.contains(bound_node) ? bound_node : nodes.first;
}

// Always applied: another executor can have left its own nodes behind.
void NumaPlaces::lend_thread(int node) const noexcept {
  if (affinities_[static_cast<std::size_t>(node)].apply_to(0)) bound_node = node;
}

void NumaPlaces::return_thread() const noexcept {
  unbound_.apply_to(0);
  bound_node = -1;
}

}  // namespace stepgraph
