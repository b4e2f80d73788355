#pragma once
#include <cstdint>
#include <vector>

#include "engine/simulate/activities.hpp"

// Resources that many use at once: internal to the simulator.
namespace stepgraph::simulator {

// When an activity's work will be done, unless something changes before.
struct Forecast {
  std::uint32_t activity;
  double end_s;
};

// The work under way, as fluid: an activity progresses at one rate, and moves its demands over their resources in
// proportion. Rates are max-min fair: the bandwidth of every activity on the resource of its largest demand grows
// equally, until one of its resources is full or the activity is as fast as its own work allows.
//
// A change concerns only those that share a resource with it, directly or through others.
class Sharing {
 public:
  explicit Sharing(const Activities& activities);

  // Work begins; alone it would take 1 / cap seconds. `cap` may be infinite if there are demands.
  void begin(std::uint32_t activity, double cap);
  void set_cap(std::uint32_t activity, double cap);
  void end(std::uint32_t activity);
  [[nodiscard]] bool has(std::uint32_t activity) const { return slot_of_[activity] != none; }

  // Brings all rates up to date after changes at one time; appends what is to be expected of activities whose rate
  // changed.
  void settle(double now_s, std::vector<Forecast>& changed);

 private:
  struct Flow {
    std::uint32_t activity = none;
    double left            = 1;  // of its work, at since_s
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
    double left           = 0;  // while rates are found: capacity that frozen users leave
    double weight         = 0;  // by how much the others' bandwidth here grows with the level
    std::size_t num_open  = 0;  // the others
    std::uint64_t visited = 0;
  };
  struct Bound {  // at this level a resource is full, or a flow is as fast as it can be
    double level;
    std::uint32_t resource;  // none: the flow
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
