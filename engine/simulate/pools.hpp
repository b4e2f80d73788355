#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <queue>
#include <span>
#include <vector>

#include "engine/simulate/activities.hpp"

// Assigns workers to activities. Internal to the simulator.
namespace stepgraph::simulator {

// The workers of all pools, numbered consecutively. There is no preemption: an activity takes its worker when it starts
// and gives it back when it ends.
//
// An activity of several pools waits in each of them and keeps the workers it gets until it has all. Such activities
// queue in the same order in every pool, so the oldest one gets its workers as others end. This avoids deadlock and
// starvation.
class Pools {
 public:
  Pools(const Machine& machine, const Activities& activities);

  // Queues a ready activity. `after` is the activity whose end made it ready (and which still has its workers), or
  // none.
  void enqueue(std::uint32_t activity, std::uint32_t after);
  void release(std::uint32_t activity);
  // Gives waiting activities to idle workers. Appends the activities that now have all their workers and can start.
  void dispatch(std::vector<std::uint32_t>& started);

  // Idle workers join the work of helped activities, in equal shares, and leave it when they get a node.
  void begin_helping(std::uint32_t activity);
  void end_helping(std::uint32_t activity);
  struct Speed {
    std::uint32_t activity;
    double helpers;  // idle workers that help it
  };
  void share_helpers(std::vector<Speed>& changed);

  // One worker per pool, in the order of pools_of(). Valid once the activity has started.
  [[nodiscard]] std::span<const std::int32_t> workers_of(std::uint32_t activity) const;

 private:
  static constexpr std::int32_t no_worker = -1;

  struct Waiting {
    std::uint32_t activity;
    std::uint64_t ticket;
  };
  // Models Taskflow's worker: the task it runs next, its own queue (newest at the back), and its last victim for
  // stealing.
  struct Worker {
    std::uint32_t next  = none;
    std::int32_t victim = no_worker;  // no_worker: steal from the shared queue
    std::deque<std::uint32_t> queue;
  };
  struct Pool {
    PoolOrder order           = PoolOrder::first_ready;
    std::int32_t first_worker = 0;
    std::int32_t num_workers  = 0;
    std::priority_queue<std::int32_t, std::vector<std::int32_t>, std::greater<>> idle;
    std::vector<std::int32_t> freed;  // since the last dispatch, in the order their activities ended
    std::deque<Waiting> shared;       // not on any worker's queue: first in, first out
    std::deque<Waiting> claims;       // activities of several pools
    std::size_t num_queued = 0;       // on workers' own queues
    std::vector<std::uint32_t> helped;
    bool touched = false;
  };

  void touch(std::int32_t pool);
  void admit();
  void dispatch_first_ready(Pool& pool);
  void dispatch_work_stealing(Pool& pool);
  [[nodiscard]] std::uint32_t steal(Pool& pool, std::int32_t thief);
  void give(std::int32_t worker, std::uint32_t activity);
  void grant_claim(Pool& pool, std::int32_t worker);
  [[nodiscard]] std::int32_t worker_in(std::uint32_t activity, std::int32_t pool) const;
  [[nodiscard]] double share(const Pool& pool) const;

  const Activities& activities_;
  std::vector<Pool> pools_;
  std::vector<Worker> workers_;
  std::vector<std::int32_t> worker_of_;     // by activity of one pool
  std::vector<std::int32_t> workers_of_;    // parallel to Activities::pools
  std::vector<std::uint32_t> num_granted_;  // by row of Activities::pools_begin
  std::vector<std::uint32_t> arrived_;      // for shared queues and claims, since the last dispatch
  std::vector<std::int32_t> touched_;       // pools to dispatch
  std::vector<std::uint32_t>* started_ = nullptr;
  std::uint64_t next_ticket_           = 0;
};

}  // namespace stepgraph::simulator
