#include "engine/run/threads/host_lanes.hpp"

#include <algorithm>
#include <map>

#include "engine/base/error.hpp"

namespace stepgraph {

HostLanes::HostLanes(const OrderedGraph& ordered, std::span<const std::uint32_t> issue_order)
    : place_(ordered.graph.num_nodes()) {
  const Graph& graph = ordered.graph;
  const Edges& edges = ordered.edges;
  std::map<std::pair<Rank, LaneKind>, std::vector<std::uint32_t>> found;
  for (const std::uint32_t node : issue_order) {
    const auto lane = graph.lane(Node{node});
    if (graph.kind(Node{node}) == NodeKind::host && lane) found[{graph.rank(Node{node}), lane->kind}].push_back(node);
  }
  queues_              = std::vector<Queue>(found.size());
  std::uint32_t number = 0;
  for (auto& [where, nodes] : found) {
    for (std::uint32_t i = 0; i < nodes.size(); ++i) place_[nodes[i]] = {number, i};
    queues_[number].lane  = {where.first, where.second};
    queues_[number].nodes = std::move(nodes);
    ++number;
  }
  first_.push_back(0);
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    for (const std::uint32_t before : edges.before(Node{node})) {
      if (place_[before].queue != none && place_[before].queue != place_[node].queue) followed_.push_back(before);
    }
    first_.push_back(static_cast<std::uint32_t>(followed_.size()));
  }
}

std::vector<Lane> HostLanes::lanes() const {
  std::vector<Lane> lanes;
  for (const Queue& queue : queues_) lanes.push_back(queue.lane);
  return lanes;
}

void HostLanes::begin() noexcept {
  for (Queue& queue : queues_) {
    queue.handed.store(0);
    queue.done.store(0);
  }
}

void HostLanes::stop() noexcept {
  for (Queue& queue : queues_) {
    for (std::atomic<std::uint32_t>* const count : {&queue.handed, &queue.done}) {
      count->fetch_or(stopped);
      count->notify_all();
    }
  }
}

bool HostLanes::hand_over(std::uint32_t node) noexcept {
  if (place_[node].queue == none) return false;
  Queue& queue = queues_[place_[node].queue];
  queue.handed.fetch_add(1);
  queue.handed.notify_all();
  return true;
}

// stop() sets the highest bit, which makes a count larger than any wanted number.
void HostLanes::wait_for(const std::atomic<std::uint32_t>& count, std::uint32_t wanted) noexcept {
  for (std::uint32_t seen; (seen = count.load()) < wanted;) count.wait(seen);
}

void HostLanes::wait_for_all() const noexcept {
  for (const Queue& queue : queues_) wait_for(queue.done, static_cast<std::uint32_t>(queue.nodes.size()));
}

void HostLanes::wait_until_handed(std::size_t lane, std::size_t i) const noexcept {
  wait_for(queues_[lane].handed, static_cast<std::uint32_t>(i) + 1);
}

void HostLanes::set_done(std::size_t lane) noexcept {
  queues_[lane].done.fetch_add(1);
  queues_[lane].done.notify_all();
}

void HostLanes::wait_before(std::uint32_t node, bool device_waits) const noexcept {
  for (std::uint32_t i = first_[node]; i < first_[node + 1]; ++i) {
    const Place& place = place_[followed_[i]];
    if (device_waits && queues_[place.queue].lane.kind == LaneKind::host) continue;
    wait_for(queues_[place.queue].done, place.number + 1);
  }
}

}  // namespace stepgraph
