#pragma once
#include <cstdint>
#include <vector>

#include "engine/simulate/activities.hpp"

// Resources that several activities use at once. Internal to the simulator.
namespace stepgraph::simulator {

// When an activity's work will end if nothing changes before.
struct Forecast {
  std::uint32_t activity;
  double end_s;
};

// The work in progress, as a fluid model: an activity progresses at one rate and moves its demands over their resources
// in proportion. Rates are max-min fair: the bandwidth of every activity, on the resource of its largest demand, grows
// equally until one of its resources is full or the activity reaches the speed of its own work.
//
// A change affects only activities that share a resource with it, directly or through others.
class Sharing {
 public:
  explicit Sharing(const Activities& activities);

  // Begins an activity's work, which would take 1 / cap seconds alone. `cap` may be infinite if there are demands.
  void begin(std::uint32_t activity, double cap);
  void set_cap(std::uint32_t activity, double cap);
  void end(std::uint32_t activity);
  [[nodiscard]] bool has(std::uint32_t activity) const { return slot_of_[activity] != none; }

  // Updates all rates after the changes of one point in time. Appends forecasts for the activities whose rate changed.
  void settle(double now_s, std::vector<Forecast>& changed);

 private:
  struct Flow {
    std::uint32_t activity = none;
    double left            = 1;  // share of its work left at since_s
    double since_s         = 0;
    double rate            = 0;
    double new_rate        = 0;
    double cap             = 0;
    double most            = 0;  // the largest demand
    std::uint64_t visited  = 0;
    bool frozen            = false;  // new_rate is final
  };
  struct User {
    std::uint32_t slot;
    double amount;
  };
  struct Resource {
    std::vector<User> users;    // in order of arrival
    double left           = 0;  // while rates are computed: capacity left by frozen flows
    double weight         = 0;  // growth of the open flows' total bandwidth here per unit of level
    std::size_t num_open  = 0;  // flows that are not frozen
    std::uint64_t visited = 0;
  };
  struct Bound {  // the level at which a resource is full, or a flow reaches its cap
    double level;
    std::uint32_t resource;  // none: the bound is the flow's
    std::uint32_t slot;
  };
  static bool later(const Bound& a, const Bound& b);

  void collect_component();
  void visit_flow(std::uint32_t slot);
  void visit_resource(std::uint32_t resource);
  void find_rates();
  void freeze(Flow& flow, double rate);

  const Activities& activities_;
  std::vector<Flow> flows_;
  std::vector<std::uint32_t> free_slots_;
  std::vector<std::uint32_t> slot_of_;  // by activity
  std::vector<Resource> resources_;
  std::vector<std::uint32_t> changed_flows_, changed_resources_;
  std::uint64_t visit_ = 0;
  std::vector<std::uint32_t> component_flows_, component_resources_;
  std::vector<Bound> bounds_;  // a heap
};

}  // namespace stepgraph::simulator
