#include "engine/run/program/running_program.hpp"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <thread>
#include <utility>

#include "engine/run/threads/tsan.hpp"

namespace stepgraph {
namespace {

// Holds a permit to compute while it lives, one of `among`. The thread is then bound to the permit's NUMA node.
class PermitGuard {
 public:
  PermitGuard(Pool& pool, Worker& worker, const NumaRange& among)
      : pool_(pool),
        worker_(worker),
        permit_(pool.permits.acquire(preferred(pool.places, worker.index, among), among)) {
    worker_.has_permit = true;
    const int own      = pool_.permits.node(permit_);
    pool_.places.bind_thread(own);
    for (int node = among.nodes.first; node < among.nodes.end(); ++node) {
      if (node != own) pool_.crew.offer(node);  // helpers there had made room for this thread
    }
  }
  ~PermitGuard() {
    worker_.has_permit = false;
    pool_.permits.release(permit_);
    pool_.crew.offer(pool_.permits.node(permit_));
  }
  PermitGuard(const PermitGuard&)            = delete;
  PermitGuard& operator=(const PermitGuard&) = delete;

 private:
  // On the node where the thread is.
  static int preferred(const NumaPlaces& places, int worker, const NumaRange& among) {
    if (among.nodes.count == 1) return worker;
    const NumaRange own = places.node(NumaPlaces::node_of_this_thread(among.nodes));
    return own.first_thread - among.first_thread + worker % own.num_threads;
  }

  Pool& pool_;
  Worker& worker_;
  int permit_;
};

}  // namespace

constinit thread_local Worker* this_worker = nullptr;

void Worker::forget_waiting() {
  said_waiting.store(false, std::memory_order_relaxed);
  const std::lock_guard lock(mutex);
  waiting_for.clear();
}

void RunState::stop(Error why) {
  assert(phase_ == RunPhase::running);
  error_      = std::move(why);
  stopped_at_ = std::chrono::steady_clock::now();
  phase_      = RunPhase::stopping;
}

void RunState::end_tasks() {
  assert(!tasks_ended());
  tasks_ended_at_ = std::chrono::steady_clock::now();
  phase_          = phase_ == RunPhase::running ? RunPhase::issued : RunPhase::stopped;
}

void RunState::fail(Error why) {
  assert(phase_ == RunPhase::issued || phase_ == RunPhase::stopped);
  if (!error_) error_ = std::move(why);
  if (!stopped_at_) stopped_at_ = std::chrono::steady_clock::now();
  phase_ = RunPhase::stopped;
}

void RunState::abandon() {
  assert(phase_ == RunPhase::stopped);
  phase_ = RunPhase::abandoned;
}

void RunState::release() {
  assert(phase_ == RunPhase::issued || phase_ == RunPhase::stopped);
  phase_ = RunPhase::over;
}

Pool::Pool(NumaPlaces on, int num_workers)
    : places(std::move(on)),
      permits(places),
      crew(places, num_workers, permits, threads),
      calls(num_workers),
      threads(places),
      workers(static_cast<std::size_t>(num_workers)) {
  for (int i = 0; i < num_workers; ++i) workers[static_cast<std::size_t>(i)].index = i;
}

void Pool::begin_run() {
  for (Worker& worker : workers) {
    worker.context.num_done_.store(0, std::memory_order_relaxed);
    worker.log->clear();
  }
  num_done_on_device.store(0, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  began_ = Moment::now();
}

std::uint64_t Pool::nodes_done() const noexcept {
  std::uint64_t sum = num_done_on_device.load(std::memory_order_relaxed);
  for (const Worker& worker : workers) sum += worker.context.num_done_.load(std::memory_order_relaxed);
  return sum;
}

Moment Pool::began() const {
  const std::lock_guard lock(mutex_);
  return began_;
}

RunningProgram::RunningProgram(Graph graph, World& world, std::shared_ptr<Memory> memory, std::vector<Match> matches,
                               std::vector<std::uint32_t> match_of_node, std::vector<bool> waits)
    : graph_(std::move(graph)),
      world_(world),
      memory_(std::move(memory)),
      data_(graph_.data()),
      matches_(std::move(matches)),
      match_of_node_(std::move(match_of_node)),
      waits_(std::move(waits)),
      done_(tsan::enabled ? data_.nodes.size() : 0) {
  tasks_.reserve(data_.nodes.size());
  for (std::uint32_t node = 0; node < data_.nodes.size(); ++node)
    tasks_.push_back({data_.bodies[node].closure(), node});
  exchanges_.reserve(matches_.size());
  for (Match& match : matches_) {
    bind(match);
    const Graph::PartView what = graph_.part(match.parts.front().node);
    exchanges_.push_back({what, graph_.spec(what.group), match.communicator, match.turn, match.parts});
  }
}

// The matches that run with a part.
std::span<Match> RunningProgram::batch_of(std::uint32_t node) {
  const std::uint32_t first = match_of_node_[node];
  return std::span(matches_).subspan(first, matches_[first].batch_size);
}

// The NUMA nodes of each rank are those of its memory (engine/run/threads/first_touch.hpp). A communication uses the
// memory of all its ranks.
void RunningProgram::find_places(const std::shared_ptr<Pool>& pool) {
  const NumaPlaces& places = pool->places;
  placed_on_               = pool;
  places_.clear();
  if (!places.binds()) return;
  const RankSet& ranks = graph_.ranks();
  std::vector<NodeRange> of_rank;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    of_rank.push_back(places.nodes_of_rank(static_cast<int>(i), static_cast<int>(ranks.size())));
  const auto nodes_of = [&](Rank rank) { return of_rank[*ranks.place(rank)]; };
  for (std::uint32_t node = 0; node < data_.nodes.size(); ++node) {
    NodeRange nodes = nodes_of(graph_.rank({node}));
    if (data_.nodes[node].part >= 0) {
      for (const Match& match : batch_of(node)) {
        for (const LocalPart& part : match.parts) nodes = nodes.together(nodes_of(part.rank));
      }
    }
    places_.push_back(places.range(nodes));
  }
}

const NumaRange& RunningProgram::place(std::uint32_t node) const {
  return places_.empty() ? pool_->places.all() : places_[node];
}

// Finds the memory of a match's accesses.
void RunningProgram::bind(Match& match) {
  const auto gather = [&](std::uint32_t node, auto&& wanted) {
    const std::size_t before = match.pieces.size();
    for (std::uint32_t i = data_.nodes[node].access_begin; i < data_.access_end(node); ++i) {
      const AccessRecord& access = data_.accesses[i];
      if (!wanted(access.mode()) || data_.buffers[access.buffer()].token) continue;
      Region region         = data_.region(access);
      std::byte* const data = memory_->data({access.buffer()}) + std::exchange(region.offset, 0);
      match.pieces.push_back({data, region});
    }
    return match.pieces.size() - before;
  };
  std::vector<std::size_t> sizes;
  for (const LocalPart& part : match.parts) {
    sizes.push_back(gather(part.node.id, [](AccessMode mode) { return reads(mode); }));
    sizes.push_back(gather(part.node.id, [](AccessMode mode) { return writes(mode); }));
  }
  std::span<const Piece> left(match.pieces);
  for (std::size_t i = 0; i < match.parts.size(); ++i) {
    match.parts[i].in  = left.first(sizes[2 * i]);
    match.parts[i].out = left.subspan(sizes[2 * i], sizes[2 * i + 1]);
    left               = left.subspan(sizes[2 * i] + sizes[2 * i + 1]);
  }
}

void RunningProgram::begin(const std::shared_ptr<Pool>& pool, RunState& run, RunNeeds needs) {
  needs.watched = world_.peers() != nullptr;
  if (placed_on_.lock() != pool) find_places(pool);
  pool_ = pool.get();
  if (!places_.empty()) needs.count_bodies = true;
  run_   = &run;
  needs_ = needs;
  needy_ = needs.count_bodies || needs.recording || needs.watched || device_;
  pool->begin_run();
  world_.begin_step(std::make_shared<const RunView>(graph_, pool));
  if (host_lanes_) host_lanes_->begin();
  for (Worker& worker : pool->workers) {
    worker.context.program_ = this;
    tsan::release(&worker);
  }
}

void RunningProgram::end() noexcept { world_.end_step(); }

// The overhead of a node is mostly the memory that is written around its body, so this writes as little as possible.
[[gnu::always_inline]] inline void RunningProgram::execute(Body::Invoke invoke, const TaskRecord& task,
                                                           Worker& worker) noexcept {
  worker.context.task_.store(&task, std::memory_order_relaxed);
  try {
    if (invoke) {
      invoke(&task.closure, worker.context);
    } else {
      worker.context.program_->communicate(worker.context);
    }
  } catch (...) {
    fail_current();
  }
  Worker& same     = *this_worker;
  Context& context = same.context;
  context.task_.store(nullptr, std::memory_order_relaxed);
  context.num_done_.store(context.num_done_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (same.said_waiting.load(std::memory_order_relaxed)) [[unlikely]]
    same.forget_waiting();
}

// Called in a catch block, for the exception of this worker's node.
void RunningProgram::fail_current() noexcept {
  const Context& context = this_worker->context;
  const auto fail        = [&](ErrorKind kind, const char* cause) {
    RunningProgram& program = *context.program_;
    program.stop(*program.run_, Error(kind, str(program.graph_.describe(context.node()), ": ", cause)),
                        /*name_running=*/false);
  };
  try {
    throw;
  } catch (const Error& e) {
    fail(e.kind() == ErrorKind::config ? ErrorKind::run : e.kind(), e.what());
  } catch (const std::exception& e) {
    fail(ErrorKind::run, e.what());
  } catch (...) {
    fail(ErrorKind::run, "unknown exception");
  }
}

void RunningProgram::communicate(const Context& context) {
  const std::uint32_t node = context.node().id;
  if (data_.nodes[node].part < 0) return;  // a node without a body
  const std::uint32_t first             = match_of_node_[node];
  const std::span<const Exchange> batch = std::span(exchanges_).subspan(first, matches_[first].batch_size);
  batch.size() == 1 ? world_.communicate(context, batch.front()) : world_.communicate_batch(context, batch);
}

void RunningProgram::run(Body::Invoke invoke, const TaskRecord& task) noexcept {
  Worker& worker = *this_worker;
  const tsan::OutsideScheduler outside;
  tsan::acquire(&worker);  // everything before the run
  RunningProgram& program = *worker.context.program_;
  if (program.stopping()) return tsan::release(&program.finished_);
  if constexpr (tsan::enabled) {
    for (const std::uint32_t before : program.task_preds[task.node]) tsan::acquire(&program.done_[before]);
  }
  if (!program.needy_) [[likely]] {
    execute(invoke, task, worker);
  } else {
    program.run_needy(invoke, task, worker);
  }
  if constexpr (tsan::enabled) tsan::release(&program.done_[task.node]);
  tsan::release(&program.finished_);
}

// A thread that helps runs no node of its own, so it is no worker meanwhile.
void RunningProgram::help(int node) noexcept {
  Worker* const worker = std::exchange(this_worker, nullptr);
  {
    const tsan::OutsideScheduler outside;
    tsan::acquire(worker);  // everything before the run
    pool_->crew.help(node, worker->index % pool_->places.node(node).num_threads);
    tsan::release(&finished_);
  }
  this_worker = worker;
}

// When more threads could run bodies than may compute at once: with a permit, unless the node waits. Waiting for the
// permit does not count as time of the node.
void RunningProgram::run_needy(Body::Invoke invoke, const TaskRecord& task, Worker& worker) noexcept {
  if (device_) return run_on_device(invoke, task, worker);
  std::optional<PermitGuard> permit;
  if (needs_.count_bodies && !waits(task.node)) {
    permit.emplace(*pool_, worker, place(task.node));
    if (stopping()) return;  // it may have waited long for the permit
  } else if (!places_.empty()) {
    pool_->places.bind_thread_to_any(places_[task.node].nodes);
  }
  if (needs_.watched) worker.running.store(task.node, std::memory_order_relaxed);
  const std::uint64_t begin = needs_.recording ? read_begin_ticks() : 0;
  execute(invoke, task, worker);
  const std::uint64_t end = read_ticks();
  if (needs_.recording) needs_.recording->add(worker.index, task.node, begin, end);
  if (needs_.watched) leave_node(worker, task.node, end);
}

void RunningProgram::leave_node(Worker& worker, std::uint32_t node, std::uint64_t end) noexcept {
  worker.log->add(node, end);
  worker.running.store(no_node, std::memory_order_relaxed);
  worker.context.waits_for_.store(-1, std::memory_order_relaxed);
}

// Asks until the answer is yes, or the run is stopping.
template <class Ready>
bool RunningProgram::poll(const Ready& ready) const {
  constexpr std::chrono::microseconds nap{20};
  while (!ready()) {
    if (stopping()) return false;
    std::this_thread::sleep_for(nap);
  }
  return true;
}

// The work that a body enqueues runs after the nodes before it, and before the nodes after it: before() and after().
void RunningProgram::run_on_device(Body::Invoke invoke, const TaskRecord& task, Worker& worker) noexcept {
  Context& context = worker.context;
  context.task_.store(&task, std::memory_order_relaxed);
  if (needs_.watched) worker.running.store(task.node, std::memory_order_relaxed);
  try {
    if (data_.nodes[task.node].part >= 0) {
      const std::span<Match> batch = batch_of(task.node);
      for (Match& match : batch) {
        for (LocalPart& part : match.parts) part.queue = device_->before(part.node);
      }
      context.device_ = batch.front().parts.front().queue;
      communicate(context);
      for (const Match& match : batch) {
        for (const LocalPart& part : match.parts) device_->after(part.node);
      }
    } else if (poll([&] { return device_->ready(Node{task.node}); })) {
      context.device_ = device_->before(Node{task.node});
      if (invoke) invoke(&task.closure, context);
      device_->after(Node{task.node});
    }
  } catch (...) {
    fail_current();
  }
  context.device_ = nullptr;
  context.task_.store(nullptr, std::memory_order_relaxed);
  context.num_done_.store(context.num_done_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (needs_.watched) leave_node(worker, task.node, read_ticks());
  if (worker.said_waiting.load(std::memory_order_relaxed)) worker.forget_waiting();
}

void RunningProgram::use_device(std::unique_ptr<DeviceStreams> device, std::vector<std::uint32_t> tasks_in_order,
                                std::unique_ptr<HostLanes> host_lanes) {
  device_         = std::move(device);
  tasks_in_order_ = std::move(tasks_in_order);
  host_lanes_     = std::move(host_lanes);
}

// Each part of a communication can follow host nodes of its own rank.
void RunningProgram::wait_for_host(std::uint32_t node) noexcept {
  const bool device_waits = device_->waits_for_host() && graph_.kind(Node{node}) != NodeKind::host;
  if (data_.nodes[node].part < 0) return host_lanes_->wait_before(node, device_waits);
  for (const Match& match : batch_of(node)) {
    for (const LocalPart& part : match.parts) host_lanes_->wait_before(part.node.id, device_waits);
  }
}

void RunningProgram::issue_nodes() {
  device_->begin(needs_.recording != nullptr);
  for (const std::uint32_t node : tasks_in_order_) {
    if (host_lanes_->hand_over(node)) continue;
    wait_for_host(node);
    run(data_.bodies[node].invoke(), tasks_[node]);
  }
  host_lanes_->wait_for_all();
  device_->end(!stopping());
}

void RunningProgram::issue() noexcept {
  const auto begin = std::chrono::steady_clock::now();
  try {
    if (!poll([&] { return device_->vacant(); })) return;
    if (needs_.recording || host_lanes_->size() > 0 || !device_->replay()) issue_nodes();
  } catch (const Error& error) {
    stop(*run_, error, /*name_running=*/false);
  }
  issue_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void RunningProgram::run_host_lane(std::size_t lane) noexcept {
  const std::vector<std::uint32_t>& nodes = host_lanes_->nodes(lane);
  for (std::size_t i = 0; i < nodes.size() && !stopping(); ++i) {
    host_lanes_->wait_until_handed(lane, i);
    host_lanes_->wait_before(nodes[i]);
    run(data_.bodies[nodes[i]].invoke(), tasks_[nodes[i]]);  // does nothing once the run is stopping
    host_lanes_->set_done(lane);
  }
}

void RunningProgram::stop(RunState& run, const Error& why, bool name_running) {
  // The world is told under the lock. A run needs the lock to end, so this abort cannot affect the next run.
  const std::lock_guard lock(run.mutex);
  const bool drains = run.phase() == RunPhase::issued && device_ && !device_is_done();
  if (run.phase() != RunPhase::running && !drains) return;
  const std::string names = name_running ? running_nodes() : std::string();
  std::string reason      = why.what();
  if (!names.empty()) reason += "; running at that time: " + names;
  if (drains) reason += "; all nodes were issued, but the device was not done";
  if (drains) {
    run.fail(Error(why.kind(), reason));
  } else {
    run.stop(Error(why.kind(), reason));
  }
  if (host_lanes_) host_lanes_->stop();
  if (device_) device_->stop_waiting();
  world_.abort(reason);
}

// A device that has failed is done: the thread that waits for it reports the failure.
bool RunningProgram::device_is_done() const noexcept {
  try {
    return device_->done();
  } catch (const Error&) {
    return true;
  }
}

std::string RunningProgram::running_nodes() const {
  std::string names;
  if (!pool_) return names;
  for (Worker& worker : pool_->workers) {
    const TaskRecord* const task = worker.context.task_.load(std::memory_order_relaxed);
    if (!task) continue;
    const std::uint32_t node = task->node;
    if (!names.empty()) names += "; ";
    names += graph_.describe(Node{node});
    const std::lock_guard lock(worker.mutex);
    if (!worker.waiting_for.empty()) {
      names += str(", waiting for ", worker.waiting_for);
    } else if (data_.nodes[node].part >= 0) {
      const Graph::PartView part = graph_.part({node});
      names += str(", waiting for ", to_string(part.op), " '", part.message, "' on group '",
                   graph_.spec(part.group).name, "'");
      if (point_to_point(part.op)) names += str(" with rank ", part.peer);
      if (part.op == PartOp::permute) names += str(" to rank ", part.peer, ", from rank ", part.source);
    }
  }
  return names;
}

void RunningProgram::waiting_for(std::string_view what) {
  if (!this_worker) return;  // on a helper thread
  Worker& worker = *this_worker;
  const std::lock_guard lock(worker.mutex);
  worker.waiting_for = what;
  worker.said_waiting.store(true, std::memory_order_relaxed);
}

void RunningProgram::parallel_for(Node node, std::int64_t num_tiles, TileCall tile) {
  const NodeRecord& record = data_.nodes[node.id];
  if (!record.parallel && record.part < 0) {
    throw Error(ErrorKind::config, "parallel_for in a node that is not declared parallel (set .parallel = true)");
  }
  // A body on a waiting lane holds no permit; it needs one while it computes. Helper threads, and kernels inside
  // kernels, have one already.
  std::optional<PermitGuard> permit;
  if (this_worker && !this_worker->has_permit) permit.emplace(*pool_, *this_worker, place(node.id));
  pool_->crew.run(num_tiles, tile, place(node.id));
}

}  // namespace stepgraph
