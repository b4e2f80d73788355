#include "engine/simulate/sharing.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace stepgraph::simulator {

Sharing::Sharing(const Activities& activities)
    : activities_(activities), slot_of_(activities.size(), none), resources_(activities.capacities.size()) {}

void Sharing::begin(std::uint32_t activity, double cap) {
  if (free_slots_.empty()) {
    free_slots_.push_back(static_cast<std::uint32_t>(flows_.size()));
    flows_.emplace_back();
  }
  const std::uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  Flow flow{.activity = activity, .cap = cap};
  for (const Demand& demand : activities_.demands_of(activity)) {
    flow.most = std::max(flow.most, demand.amount);
    resources_[demand.resource].users.push_back({slot, demand.amount});
  }
  flows_[slot]       = flow;
  slot_of_[activity] = slot;
  changed_flows_.push_back(slot);
}

void Sharing::set_cap(std::uint32_t activity, double cap) {
  Flow& flow = flows_[slot_of_[activity]];
  if (flow.cap == cap) return;
  flow.cap = cap;
  changed_flows_.push_back(slot_of_[activity]);
}

void Sharing::end(std::uint32_t activity) {
  const std::uint32_t slot = slot_of_[activity];
  for (const Demand& demand : activities_.demands_of(activity)) {
    std::vector<User>& users = resources_[demand.resource].users;
    users.erase(std::find_if(users.begin(), users.end(), [&](const User& user) { return user.slot == slot; }));
    changed_resources_.push_back(demand.resource);
  }
  flows_[slot].activity = none;
  slot_of_[activity]    = none;
  free_slots_.push_back(slot);
}

void Sharing::settle(double now_s, std::vector<Forecast>& changed) {
  if (changed_flows_.empty() && changed_resources_.empty()) return;
  collect_component();
  find_rates();
  for (const std::uint32_t slot : component_flows_) {
    Flow& flow = flows_[slot];
    if (flow.new_rate == flow.rate) continue;
    flow.left    = std::max(0.0, flow.left - flow.rate * (now_s - flow.since_s));
    flow.since_s = now_s;
    flow.rate    = flow.new_rate;
    changed.push_back({flow.activity, now_s + flow.left / flow.rate});
  }
}

// Collects all changed components together: components that share no resource do not affect each other's rates.
void Sharing::collect_component() {
  ++visit_;
  component_flows_.clear();
  component_resources_.clear();
  for (const std::uint32_t slot : changed_flows_) visit_flow(slot);
  for (const std::uint32_t resource : changed_resources_) visit_resource(resource);
  changed_flows_.clear();
  changed_resources_.clear();
  std::size_t flow = 0, resource = 0;
  while (flow < component_flows_.size() || resource < component_resources_.size()) {
    if (flow < component_flows_.size()) {
      const std::uint32_t activity = flows_[component_flows_[flow++]].activity;
      for (const Demand& demand : activities_.demands_of(activity)) visit_resource(demand.resource);
    } else {
      for (const User& user : resources_[component_resources_[resource++]].users) visit_flow(user.slot);
    }
  }
}

void Sharing::visit_flow(std::uint32_t slot) {
  Flow& flow = flows_[slot];
  if (flow.activity == none || flow.visited == visit_) return;  // none: the flow changed, then ended
  flow.visited = visit_;
  component_flows_.push_back(slot);
}

void Sharing::visit_resource(std::uint32_t resource) {
  if (resources_[resource].visited == visit_) return;
  resources_[resource].visited = visit_;
  component_resources_.push_back(resource);
}

bool Sharing::later(const Bound& a, const Bound& b) {
  return std::tuple(a.level, a.resource, a.slot) > std::tuple(b.level, b.resource, b.slot);
}

// Progressive filling. The level rises, and flows freeze at each bound. That only raises the remaining bounds, so a
// bound is recomputed when it is reached.
void Sharing::find_rates() {
  bounds_.clear();
  for (const std::uint32_t slot : component_flows_) {
    Flow& flow  = flows_[slot];
    flow.frozen = flow.most == 0;
    if (flow.frozen) flow.new_rate = flow.cap;
    if (!flow.frozen && std::isfinite(flow.cap)) bounds_.push_back({flow.cap * flow.most, none, slot});
  }
  for (const std::uint32_t id : component_resources_) {
    Resource& resource = resources_[id];
    resource.left      = activities_.capacities[id];
    resource.weight    = 0;
    resource.num_open  = resource.users.size();
    for (const User& user : resource.users) resource.weight += user.amount / flows_[user.slot].most;
    if (resource.num_open > 0) bounds_.push_back({resource.left / resource.weight, id, none});
  }
  std::make_heap(bounds_.begin(), bounds_.end(), later);
  while (!bounds_.empty()) {
    std::pop_heap(bounds_.begin(), bounds_.end(), later);
    const Bound bound = bounds_.back();
    bounds_.pop_back();
    if (bound.resource == none) {
      Flow& flow = flows_[bound.slot];
      if (!flow.frozen) freeze(flow, flow.cap);
      continue;
    }
    Resource& resource = resources_[bound.resource];
    if (resource.num_open == 0) continue;
    const double level = std::max(bound.level, resource.left / resource.weight);
    if (level > bound.level && !bounds_.empty() && level > bounds_.front().level) {
      bounds_.push_back({level, bound.resource, none});
      std::push_heap(bounds_.begin(), bounds_.end(), later);
      continue;
    }
    for (const User& user : resource.users) {
      Flow& flow = flows_[user.slot];
      if (!flow.frozen) freeze(flow, level / flow.most);
    }
  }
}

void Sharing::freeze(Flow& flow, double rate) {
  flow.frozen   = true;
  flow.new_rate = rate;
  for (const Demand& demand : activities_.demands_of(flow.activity)) {
    Resource& resource = resources_[demand.resource];
    resource.left -= rate * demand.amount;
    resource.weight -= demand.amount / flow.most;
    --resource.num_open;
  }
}

}  // namespace stepgraph::simulator
