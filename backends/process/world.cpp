#include "backends/process/world.hpp"

#include <algorithm>
#include <exception>
#include <iostream>
#include <map>
#include <utility>

#include "backends/process/flight.hpp"
#include "backends/process/message.hpp"
#include "backends/process/transport.hpp"
#include "backends/process/watchdog.hpp"
#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "engine/run/device.hpp"

namespace stepgraph {
namespace {

constexpr std::size_t most_waits  = 8;                  // in a heartbeat
constexpr std::uint64_t ended_run = ~std::uint64_t{0};  // of a process that begins no other run
constexpr auto explain_time       = std::chrono::seconds(5);
constexpr auto agreement_time = std::chrono::minutes(30);  // a peer that lives, but does not come to a collective call

}  // namespace

std::string_view program_version() noexcept { return STEPGRAPH_VERSION; }

ProcessWorld::ProcessWorld(const ProcessPlace& place, int num_ranks, RankSet ranks, ProcessWorldOptions options,
                           const MakeLinks& make_links)
    : process_(place.rank),
      num_processes_(place.size),
      num_ranks_(num_ranks),
      ranks_(std::move(ranks)),
      options_(std::move(options)),
      num_exceptions_(std::uncaught_exceptions()) {
  JobOptions job{.version = options_.version.empty() ? std::string(program_version()) : options_.version};
  job.control.timeout    = options_.timeout;
  job.control.progress   = [this] { return progress(); };
  job.control.on_verdict = [this](const Verdict& verdict, const std::string& line) { take_verdict(verdict, line); };
  job.control.on_note    = [this](int rank, const std::string& note) { take_note(rank, note); };
  job.control.on_signal  = [this](const Progress& then) { take_signal(then); };
  job.control.on_overdue = options_.on_overdue ? options_.on_overdue : [] { end_process(3); };
  job_                   = std::make_unique<Job>(place, std::move(job));
  {
    const std::lock_guard lock(mutex_);
    job_id_   = job_->id();
    live_job_ = job_.get();
  }
  try {
    links_ =
        make_links(*job_, {.explain = [this](Rank peer, const std::string& problem) { return explain(peer, problem); },
                           .is_idle = [this] { return is_idle(); },
                           .abort_reason = [this] { return abort_reason(); }});
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
  const std::lock_guard lock(mutex_);
  live_links_ = links_.get();
  if (!verdict_.empty()) live_links_->interrupt(Links::Interruption::failed, verdict_);
}

ProcessWorld::~ProcessWorld() {
  end();
  const std::lock_guard lock(mutex_);
  live_links_ = nullptr;
  live_job_   = nullptr;
}

bool ProcessWorld::end() noexcept {
  if (ended_) return *ended_;
  ended_ = false;
  try {
    if (ProcessWorld::failure()) return false;
    if (std::uncaught_exceptions() > num_exceptions_) {
      fail("has ended because of an error");
      return false;
    }
    tell_end();
    job_->peers().barrier("the world ends");
    links_->close();
    ended_ = job_->close();
  } catch (const std::exception&) {  // a peer has failed; its name was printed
  }
  return *ended_;
}

bool ProcessWorld::fail(const std::string& text) noexcept {
  try {
    int by = -1;
    {
      // A run that a peer has aborted: the peer is about to say why.
      std::unique_lock lock(mutex_);
      if (good_from_ > generation_ && aborted_by_ != process_) by = aborted_by_;
      if (by >= 0) changed_.wait_for(lock, explain_time, [this] { return !verdict_.empty(); });
    }
    job_->control().fail(text, by);
    const std::optional<Verdict> verdict = job_->control().verdict();
    return !verdict || verdict->rank == process_;
  } catch (const std::exception&) {  // out of memory: the connection closes, which the others notice too
    return true;
  }
}

std::vector<std::uint32_t> ProcessWorld::prepare(const Graph& graph, std::span<const Communicator> groups) {
  Agreed agreed = agreement_.agree(job_->peers(), graph, groups, batches());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (agreed.numbers[i] < std::uint32_t{1} << MessageKey::communicator_bits) continue;
    throw Error(ErrorKind::config, str("group '", groups[i].group.name, "': has number ", agreed.numbers[i],
                                       " (the programs of a world have less than 65536 groups together)"));
  }
  links_->connect(agreed.connections);
  return std::move(agreed.numbers);
}

std::optional<std::string> ProcessWorld::failure() const {
  if (!job_->control().interrupt().raised()) return std::nullopt;
  return job_->control().interrupt().why();
}

std::optional<std::string> ProcessWorld::interruption() const {
  const std::lock_guard lock(mutex_);
  if (!verdict_.empty()) return verdict_;
  if (view_ && is_aborted()) return why_aborted_;
  return std::nullopt;
}

Patience ProcessWorld::patience() const { return {Clock::now() + agreement_time, &job_->control().interrupt()}; }

// --- runs ----------------------------------------------------------------------------------------------------------

void ProcessWorld::begin_step(std::shared_ptr<const RunView> run) {
  if (const auto why = ProcessWorld::failure()) throw Error(ErrorKind::backend, *why);
  bool aborted;
  {
    const std::lock_guard lock(mutex_);
    aborted = is_aborted();
  }
  if (aborted) recover();
  const std::lock_guard lock(mutex_);
  ++run_;
  view_ = std::move(run);
  // A peer that is ahead has aborted this run.
  if (is_aborted()) links_->interrupt(Links::Interruption::aborted, why_aborted_);
}

// Whether the run that is under way here, or the last one, was aborted: not one that only peers have begun. With
// mutex_.
bool ProcessWorld::is_aborted() const { return good_from_ > generation_ && aborted_run_ <= run_; }

// Likewise, or the next run. With mutex_.
bool ProcessWorld::next_is_aborted() const { return good_from_ > generation_ && aborted_run_ <= run_ + 1; }

std::optional<std::string> ProcessWorld::abort_reason() const {
  const std::lock_guard lock(mutex_);
  if (next_is_aborted()) return why_aborted_;
  return std::nullopt;
}

void ProcessWorld::end_step() noexcept {
  const std::lock_guard lock(mutex_);
  view_.reset();
  if (good_from_ > generation_ && aborted_run_ == run_ + 1)  // the next run, by a peer that is ahead
    links_->interrupt(Links::Interruption::aborted, why_aborted_);
}

// Called with the run's mutex locked: sends and returns.
void ProcessWorld::abort(std::string_view why) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (is_aborted() || !verdict_.empty()) return;  // all know
    good_from_   = generation_ + 1;
    aborted_run_ = run_;
    aborted_by_  = process_;
    why_aborted_ = str("the step was aborted here: ", why);
    links_->interrupt(Links::Interruption::aborted, why_aborted_);
    job_->control().tell(str(generation_, ' ', run_, ' ', why));
    changed_.notify_all();
  } catch (const std::exception&) {  // out of memory: time-outs end the run elsewhere
  }
}

// A peer has aborted its run. On the control thread.
void ProcessWorld::take_note(int rank, const std::string& note) {
  const std::vector<std::string_view> words = split_text(note, ' ');
  if (words.size() < 3) return;
  const auto told = to_number<std::uint64_t>(words[0]), run = to_number<std::uint64_t>(words[1]);
  if (!told || !run) return;
  const std::lock_guard lock(mutex_);
  // Known, or of an earlier generation. An abort of an earlier run than the known one counts.
  if (*told < generation_ || *told + 1 < good_from_ || (*told + 1 == good_from_ && *run >= aborted_run_)) return;
  good_from_   = *told + 1;
  aborted_run_ = *run;
  aborted_by_  = rank;
  why_aborted_ = str("the step was aborted by process ", rank, ": ",
                     std::string_view(note).substr(words[0].size() + words[1].size() + 2));
  // If this process is a run behind, that run goes on: the peers that are ahead have ended it well. end_step() then
  // interrupts the network: messages of the aborted run are received before it begins here. If this process has not
  // begun the generation of the note yet, recover() looks at good_from_.
  if (*told == generation_ && (view_ ? is_aborted() : next_is_aborted()) && live_links_ != nullptr)
    live_links_->interrupt(Links::Interruption::aborted, why_aborted_);
  changed_.notify_all();
}

void ProcessWorld::take_verdict(const Verdict& verdict, const std::string& line) {
  if (options_.on_failure) {
    options_.on_failure(verdict, line);
  } else {
    std::cerr << str("stepgraph: ", line, "\n") << std::flush;
  }
  // A process that does not fit has run nothing.
  if (verdict.kind != VerdictKind::misfit) record_flight(line);
  if (options_.after_report) options_.after_report();
  const std::lock_guard lock(mutex_);
  verdict_ = line;
  if (live_links_ != nullptr) live_links_->interrupt(Links::Interruption::failed, line);
  changed_.notify_all();
}

// On the control thread. The process is told to end, and no peer has failed. If it has waited for a peer since then, it
// may not get to the end of its step in time.
void ProcessWorld::take_signal(const Progress& then) {
  const Progress now = progress();
  const bool waits   = !now.waits.empty() && now.num_computing == 0 && now.waits == then.waits && now.run == then.run &&
                     now.nodes_done == then.nodes_done;
  if (waits) {
    const std::string line = str("rank ", process_, " (this process) is told to end while it waits for rank ",
                                 now.waits.front().rank, " in '", now.waits.front().node, "'");
    std::cerr << str("stepgraph: ", line, "\n") << std::flush;
    record_flight(line);
  }
  if (options_.on_signal) options_.on_signal();
}

void ProcessWorld::note_signal() noexcept { job_->control().note_signal(); }

void ProcessWorld::record_flight(const std::string& line) const {
  if (options_.flight_folder.empty()) return;
  try {
    write_flight(line);
  } catch (const std::exception& error) {
    std::cerr << str("stepgraph: no flight file: ", error.what(), "\n") << std::flush;
  }
}

// Before an error of a library is believed, which can be the first to see that a peer is gone.
std::chrono::milliseconds ProcessWorld::grace() const {
  return std::min<std::chrono::milliseconds>(explain_time, options_.timeout / 2);
}

std::string ProcessWorld::explain(Rank peer, const std::string& problem) {
  std::unique_lock lock(mutex_);
  const auto most = peer == Rank{-1} ? grace() : std::chrono::milliseconds(explain_time);
  changed_.wait_for(lock, most, [&] { return !verdict_.empty() || good_from_ > generation_; });
  if (!verdict_.empty()) return verdict_;
  if (good_from_ > generation_) return why_aborted_;
  return peer == Rank{-1} ? problem : str("rank ", peer, ": ", problem);
}

bool ProcessWorld::is_idle() const {
  std::shared_ptr<const RunView> view;
  {
    const std::lock_guard lock(mutex_);
    view = view_;
  }
  return !view || view->num_computing() == 0;
}

// A process that ends takes part in no other recovery: peers that begin another run after an aborted one must not wait
// for it. The note of their abort may come after this.
void ProcessWorld::tell_end() {
  const std::uint64_t next = generation_ + 1;
  const Bytes ended        = MessageWriter().number(ended_run).bytes();
  job_->store().set(str("recovery ", next, " ", process_), ended, patience());
  if (process_ == 0) job_->store().set(str("recovery ", next, " run"), ended, patience());
}

// Processes can have begun different runs: they go on with the highest number.
void ProcessWorld::recover() {
  const std::uint64_t next = generation_ + 1;
  Store& store             = job_->store();
  const std::string prefix = str("recovery ", next, " ");
  const auto number_of     = [](const Bytes& bytes) { return MessageReader(bytes).number<std::uint64_t>(); };
  store.set(str(prefix, job_->rank()), MessageWriter().number(run_).bytes(), patience());
  if (job_->rank() == 0) {
    std::uint64_t most = 0;
    for (int rank = 0; rank < job_->size(); ++rank)
      most = std::max(most, number_of(store.get(str(prefix, rank), patience())));
    store.set(prefix + "run", MessageWriter().number(most).bytes(), patience());
  }
  const std::uint64_t highest = number_of(store.get(prefix + "run", patience()));
  if (highest == ended_run) throw Error(ErrorKind::backend, "another process has ended, and the last run was aborted");
  {
    // From now on notes of the last generation are late, and those of the new one interrupt the links.
    const std::lock_guard lock(mutex_);
    run_        = highest;
    generation_ = next;
  }
  recover_links();
  const std::lock_guard lock(mutex_);
  if (next_is_aborted()) links_->interrupt(Links::Interruption::aborted, why_aborted_);
  if (!verdict_.empty()) links_->interrupt(Links::Interruption::failed, verdict_);
}

// Peers that have recovered do not wait for this process. If one of them has aborted a run already, its links are gone:
// the next run fails here too, and there is another recovery. Any other error is final: no peer would recover again.
void ProcessWorld::recover_links() {
  std::string problem;
  try {
    links_->recover(generation_);
    return;
  } catch (const std::exception& error) {
    problem = error.what();
  }
  {
    const std::lock_guard lock(mutex_);
    if (verdict_.empty() && good_from_ > generation_) {
      links_->interrupt(Links::Interruption::aborted, why_aborted_);
      return;
    }
  }
  fail(problem);
  throw Error(ErrorKind::backend, problem);
}

// --- heartbeats and reports ----------------------------------------------------------------------------------------

Progress ProcessWorld::progress() const {
  Progress progress;
  std::shared_ptr<const RunView> view;
  {
    const std::lock_guard lock(mutex_);
    view         = view_;
    progress.run = run_;
    if (!view && live_job_ != nullptr) {
      if (auto waiting = live_job_->peers().waiting())
        progress.waits.push_back({waiting->process, std::move(waiting->subject)});
    }
  }
  if (!view) return progress;
  const Graph& graph     = view->graph();
  progress.phase         = Phase::run;
  progress.nodes_done    = view->nodes_done();
  progress.num_computing = view->num_computing();
  for (const RunView::Running& each : view->running()) {
    if (each.waits_for && progress.waits.size() < most_waits)
      progress.waits.push_back({index(*each.waits_for), std::string(graph.name(each.node))});
  }
  const std::vector<RunView::Ended> last = view->last_nodes();
  if (!last.empty()) progress.last_node = graph.name(last.back().node);
  add_device_progress(progress, graph);
  return progress;
}

// On a device, bodies have returned long before their work is done. There the parts that the device is in say which
// ranks it waits for.
void ProcessWorld::add_device_progress(Progress& progress, const Graph& graph) const {
  const std::optional<DeviceProgress> now = device_progress(graph);
  if (!now) return;
  progress.nodes_done += now->num_done;
  progress.num_computing = now->computes || now->parts_entered.empty() ? 1 : 0;
  progress.last_node     = now->last_done ? graph.name(*now->last_done) : std::string_view();
  progress.waits.clear();
  for (const Node node : now->parts_entered) {
    const Graph::PartView part = graph.part(node);
    const auto waits_for       = [&](Rank rank) {
      if (rank != Rank{-1} && rank != graph.rank(node) && progress.waits.size() < most_waits)
        progress.waits.push_back({index(rank), std::string(graph.name(node))});
    };
    if (point_to_point(part.op) || part.op == PartOp::permute) {
      waits_for(part.peer);
      waits_for(part.source);
      continue;
    }
    // From the next member on: a group can have more members than a heartbeat has waits, and each is named by some.
    const GroupSpec& group = graph.spec(part.group);
    const auto own         = static_cast<std::size_t>(member_of(group, graph.rank(node)));
    for (std::size_t i = 1; i < group.ranks.size(); ++i) waits_for(group.ranks[(own + i) % group.ranks.size()]);
  }
}

// Without nodes of an earlier run: the device may not have begun this one yet.
std::optional<DeviceProgress> ProcessWorld::device_progress(const Graph& graph) const {
  const std::lock_guard lock(mutex_);
  Device* const device              = live_links_ != nullptr ? live_links_->device() : nullptr;
  std::optional<DeviceProgress> now = device != nullptr ? device->progress() : std::nullopt;
  if (!now) return now;
  std::erase_if(now->parts_entered, [&](Node node) { return node.id >= graph.num_nodes() || !graph.has_part(node); });
  if (now->last_done && now->last_done->id >= graph.num_nodes()) now->last_done = std::nullopt;
  return now;
}

// On the control thread, while the run may still be under way.
void ProcessWorld::write_flight(const std::string& line) const {
  std::shared_ptr<const RunView> view;
  std::string job;
  {
    const std::lock_guard lock(mutex_);
    view = view_;
    job  = job_id_;
  }
  Flight flight{.rank = process_, .size = num_processes_, .job = job, .line = line, .progress = progress()};
  std::map<std::string, FlightLane> lanes;
  if (view) {
    const Graph& graph = view->graph();
    const auto lane_of = [&](Node node) -> FlightLane& {
      const std::optional<Lane> lane = graph.lane(node);
      const std::string name =
          lane ? str("rank ", lane->rank, " ", to_string(lane->kind)) : str("rank ", graph.rank(node), ", no lane");
      FlightLane& made = lanes[name];
      made.lane        = name;
      return made;
    };
    for (const RunView::Ended& each : view->last_nodes())
      lane_of(each.node).last.push_back({std::string(graph.name(each.node)), each.ago_s});
    for (const RunView::Running& each : view->running()) lane_of(each.node).running = graph.name(each.node);
    if (const std::optional<DeviceProgress> now = device_progress(graph)) {
      for (const Node node : now->parts_entered) lane_of(node).running = graph.name(node);
    }
  }
  for (auto& [name, lane] : lanes) flight.lanes.push_back(std::move(lane));
  stepgraph::write_flight(options_.flight_folder, flight);
}

}  // namespace stepgraph
