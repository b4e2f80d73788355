#include "engine/simulate/pools.hpp"

#include <algorithm>

namespace stepgraph::simulator {

Pools::Pools(const Machine& machine, const Activities& activities)
    : activities_(activities),
      worker_of_(machine.pools().empty() ? 0 : activities.size(), no_worker),
      workers_of_(activities.pools.size(), no_worker),
      num_granted_(activities.pools_begin.size() - 1, 0) {
  std::int32_t first = 0;
  for (const PoolSpec& spec : machine.pools()) {
    Pool& pool        = pools_.emplace_back();
    pool.order        = spec.order;
    pool.first_worker = first;
    pool.num_workers  = spec.workers;
    for (std::int32_t i = 0; i < spec.workers; ++i) pool.idle.push(first + i);
    first += spec.workers;
  }
  workers_.resize(static_cast<std::size_t>(first));
}

std::span<const std::int32_t> Pools::workers_of(std::uint32_t activity) const {
  if (activities_.pool[activity] == -1) return {};
  if (!activities_.takes_several_pools(activity)) return std::span(&worker_of_[activity], 1);
  const auto row            = static_cast<std::size_t>(-2 - activities_.pool[activity]);
  const std::uint32_t begin = activities_.pools_begin[row];
  return std::span(workers_of_).subspan(begin, activities_.pools_begin[row + 1] - begin);
}

std::int32_t Pools::worker_in(std::uint32_t activity, std::int32_t pool) const {
  const auto pools   = activities_.pools_of(activity);
  const auto workers = workers_of(activity);
  for (std::size_t i = 0; i < pools.size(); ++i) {
    if (pools[i] == pool) return workers[i];
  }
  return no_worker;
}

void Pools::touch(std::int32_t pool) {
  if (pools_[static_cast<std::size_t>(pool)].touched) return;
  pools_[static_cast<std::size_t>(pool)].touched = true;
  touched_.push_back(pool);
}

// Follows Taskflow's Executor::_invoke and _update_cache: when a task ends, its worker continues with the last
// successor that became ready, and pushes the earlier ones on its own queue.
void Pools::enqueue(std::uint32_t activity, std::uint32_t after) {
  const std::int32_t id = activities_.pool[activity];
  if (after != none && id >= 0 && pools_[static_cast<std::size_t>(id)].order == PoolOrder::work_stealing) {
    const std::int32_t here = worker_in(after, id);
    if (here != no_worker) {
      Worker& worker = workers_[static_cast<std::size_t>(here)];
      if (worker.next != none) {
        worker.queue.push_back(worker.next);
        ++pools_[static_cast<std::size_t>(id)].num_queued;
      }
      worker.next = activity;
      return;  // its worker is about to be released, which touches the pool
    }
  }
  arrived_.push_back(activity);
}

void Pools::release(std::uint32_t activity) {
  const auto pools   = activities_.pools_of(activity);
  const auto workers = workers_of(activity);
  for (std::size_t i = 0; i < pools.size(); ++i) {
    pools_[static_cast<std::size_t>(pools[i])].freed.push_back(workers[i]);
    touch(pools[i]);
  }
}

// Activities that become ready at the same time queue by number, independent of the order in which ends are processed.
void Pools::admit() {
  std::sort(arrived_.begin(), arrived_.end());
  for (const std::uint32_t activity : arrived_) {
    const bool several = activities_.takes_several_pools(activity);
    for (const std::int32_t id : activities_.pools_of(activity)) {
      Pool& pool = pools_[static_cast<std::size_t>(id)];
      (several ? pool.claims : pool.shared).push_back({activity, next_ticket_});
      touch(id);
    }
    ++next_ticket_;
  }
  arrived_.clear();
}

void Pools::dispatch(std::vector<std::uint32_t>& started) {
  started_ = &started;
  admit();
  for (const std::int32_t id : touched_) {
    Pool& pool = pools_[static_cast<std::size_t>(id)];
    pool.order == PoolOrder::first_ready ? dispatch_first_ready(pool) : dispatch_work_stealing(pool);
  }
}

void Pools::give(std::int32_t worker, std::uint32_t activity) {
  worker_of_[activity] = worker;
  started_->push_back(activity);
}

void Pools::grant_claim(Pool& pool, std::int32_t worker) {
  const std::uint32_t activity = pool.claims.front().activity;
  pool.claims.pop_front();
  const auto row       = static_cast<std::size_t>(-2 - activities_.pool[activity]);
  const auto pools     = activities_.pools_of(activity);
  const auto this_pool = static_cast<std::int32_t>(&pool - pools_.data());
  const auto place     = static_cast<std::size_t>(std::find(pools.begin(), pools.end(), this_pool) - pools.begin());
  workers_of_[activities_.pools_begin[row] + place] = worker;
  if (++num_granted_[row] == pools.size()) started_->push_back(activity);
}

void Pools::dispatch_first_ready(Pool& pool) {
  for (const std::int32_t worker : pool.freed) pool.idle.push(worker);
  pool.freed.clear();
  while (!pool.idle.empty() && (!pool.shared.empty() || !pool.claims.empty())) {
    const std::int32_t worker = pool.idle.top();
    pool.idle.pop();
    if (pool.shared.empty() || (!pool.claims.empty() && pool.claims.front().ticket < pool.shared.front().ticket)) {
      grant_claim(pool, worker);
    } else {
      give(worker, pool.shared.front().activity);
      pool.shared.pop_front();
    }
  }
}

// Claims come first: a worker that always has tasks of its own might never look at the shared queue.
void Pools::dispatch_work_stealing(Pool& pool) {
  for (const std::int32_t id : pool.freed) {
    Worker& worker = workers_[static_cast<std::size_t>(id)];
    if (!pool.claims.empty()) {
      if (worker.next != none) {
        worker.queue.push_back(worker.next);
        ++pool.num_queued;
      }
      grant_claim(pool, id);
    } else if (worker.next != none) {
      give(id, worker.next);
    } else if (!worker.queue.empty()) {
      give(id, worker.queue.back());
      worker.queue.pop_back();
      --pool.num_queued;
    } else {
      pool.idle.push(id);
    }
    worker.next = none;
  }
  pool.freed.clear();
  while (!pool.idle.empty() && (!pool.claims.empty() || !pool.shared.empty() || pool.num_queued > 0)) {
    const std::int32_t id = pool.idle.top();
    pool.idle.pop();
    if (!pool.claims.empty()) {
      grant_claim(pool, id);
    } else {
      give(id, steal(pool, id));
    }
  }
}

// Takes the oldest task of the last victim, else of the shared queue (where Taskflow puts the source tasks of a run),
// else of the next worker that has one. Taskflow picks the next victim at random; a simulation must be deterministic.
std::uint32_t Pools::steal(Pool& pool, std::int32_t thief) {
  Worker& worker        = workers_[static_cast<std::size_t>(thief)];
  const auto has_queued = [&](std::int32_t id) { return !workers_[static_cast<std::size_t>(id)].queue.empty(); };
  if (worker.victim == no_worker || !has_queued(worker.victim)) {
    worker.victim = no_worker;
    for (std::int32_t i = 1; pool.shared.empty() && i <= pool.num_workers && worker.victim == no_worker; ++i) {
      const std::int32_t id = pool.first_worker + (thief - pool.first_worker + i) % pool.num_workers;
      if (has_queued(id)) worker.victim = id;
    }
  }
  std::uint32_t activity = none;
  if (worker.victim == no_worker) {
    activity = pool.shared.front().activity;
    pool.shared.pop_front();
  } else {
    std::deque<std::uint32_t>& queue = workers_[static_cast<std::size_t>(worker.victim)].queue;
    activity                         = queue.front();
    queue.pop_front();
    --pool.num_queued;
  }
  return activity;
}

void Pools::begin_helping(std::uint32_t activity) {
  for (const std::int32_t id : activities_.pools_of(activity)) {
    pools_[static_cast<std::size_t>(id)].helped.push_back(activity);
    touch(id);
  }
}

void Pools::end_helping(std::uint32_t activity) {
  for (const std::int32_t id : activities_.pools_of(activity)) {
    std::vector<std::uint32_t>& helped = pools_[static_cast<std::size_t>(id)].helped;
    helped.erase(std::find(helped.begin(), helped.end(), activity));
    touch(id);
  }
}

double Pools::share(const Pool& pool) const {
  return static_cast<double>(pool.idle.size()) / static_cast<double>(pool.helped.size());
}

void Pools::share_helpers(std::vector<Speed>& changed) {
  for (const std::int32_t id : touched_) {
    Pool& pool   = pools_[static_cast<std::size_t>(id)];
    pool.touched = false;
    for (const std::uint32_t activity : pool.helped) {
      double helpers = 0;
      for (const std::int32_t other : activities_.pools_of(activity))
        helpers += share(pools_[static_cast<std::size_t>(other)]);
      changed.push_back({activity, helpers});
    }
  }
  touched_.clear();
}

}  // namespace stepgraph::simulator
