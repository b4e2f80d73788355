#include "tests/support/worlds/stream_log_world.hpp"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "engine/base/error.hpp"

namespace stepgraph::testing {

std::uint32_t HappensBefore::add(const std::vector<std::uint32_t>& after) {
  const std::uint32_t step = size();
  std::vector<std::uint64_t> row(step / 64 + 1, 0);
  for (const std::uint32_t each : after) {
    if (each == StreamLog::none) continue;
    for (std::size_t i = 0; i < before_[each].size(); ++i) row[i] |= before_[each][i];
  }
  row[step / 64] |= std::uint64_t{1} << step % 64;
  before_.push_back(std::move(row));
  return step;
}

bool HappensBefore::ordered(std::uint32_t a, std::uint32_t b) const {
  return a <= b && (before_[b][a / 64] >> a % 64 & 1) != 0;
}

StreamLog::StreamLog(const Graph& graph, StreamPlan plan, IssueOrder issue_order)
    : graph_(graph),
      plan_(std::move(plan)),
      issue_order_(issue_order),
      stream_last_(graph.ranks().size() * num_lane_kinds, none),
      event_(graph.num_nodes(), none) {}

void StreamLog::begin_run() {
  const std::lock_guard lock(mutex_);
  runs_.emplace_back(graph_.num_nodes());
}

// Host threads are taken to follow each other in the order in which they were seen. A host node ends only when the
// other threads have stopped (wait_until_quiet). So a thread that does not wait for the node comes before the node's
// end.
std::uint32_t StreamLog::on_host(std::vector<std::uint32_t> after) {
  after.push_back(host_);
  return host_ = steps_.add(after);
}

void StreamLog::wait_until_quiet() {
  for (std::uint32_t seen = none, now = 0; seen != now;) {
    seen = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::lock_guard lock(mutex_);
    now = steps_.size();
  }
}

void StreamLog::enter(Node node) {
  const std::uint32_t stream = plan_.stream[node.id];
  {
    const std::lock_guard lock(mutex_);
    std::vector<std::uint32_t> waits;
    for (const std::uint32_t other : plan_.waits_of(node)) waits.push_back(event_[other]);
    for (const std::uint32_t other : plan_.loop_waits_of(node)) waits.push_back(event_[other]);
    if (stream != StreamPlan::none) {
      waits.push_back(stream_last_[stream]);
      waits.push_back(on_host());  // enqueues the waits
      stream_last_[stream] = steps_.add(waits);
      return;
    }
    // Not on_host(): other threads do not follow the begin of a host node, and so not the events that it waits for.
    waits.push_back(host_);
    runs_.back()[node.id].begin = steps_.add(waits);
  }
  wait_until_quiet();
}

void StreamLog::work(const std::vector<Node>& nodes) {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> after{on_host()};
  for (const Node node : nodes) after.push_back(stream_last_[plan_.stream[node.id]]);
  const std::uint32_t step = steps_.add(after);
  for (const Node node : nodes) {
    stream_last_[plan_.stream[node.id]] = step;
    runs_.back()[node.id]               = {step, step};
  }
}

void StreamLog::leave(Node node) {
  const std::lock_guard lock(mutex_);
  if (plan_.stream[node.id] == StreamPlan::none) {
    Span& span = runs_.back()[node.id];
    span.end   = on_host({span.begin});
  } else {
    event_[node.id] = stream_last_[plan_.stream[node.id]];
  }
}

bool StreamLog::ordered(Node a, std::size_t run_of_a, Node b, std::size_t run_of_b) const {
  const Span &first = runs_[run_of_a][a.id], &second = runs_[run_of_b][b.id];
  return first.end != second.begin && steps_.ordered(first.end, second.begin);
}

std::string StreamLog::find_unordered(const MemoryPlan& memory, int* num_pairs) const {
  enum class Need { nothing, in_order, some_order };
  const auto same_bytes = [&](Node a, Node b) {
    bool shares = false;
    for (std::size_t i = 0; i < graph_.num_accesses(a); ++i) {
      for (std::size_t k = 0; k < graph_.num_accesses(b); ++k) {
        const Graph::AccessView x = graph_.access(a, i), y = graph_.access(b, k);
        if (x.region.length == 0 || y.region.length == 0) continue;
        if (x.buffer == y.buffer) {
          if ((writes(x.mode) || writes(y.mode)) && overlap(x.region, y.region)) return Need::in_order;
          continue;
        }
        const BufferSpec &p = graph_.spec(x.buffer), &q = graph_.spec(y.buffer);
        const std::int64_t at_p = memory.offsets[x.buffer.id], at_q = memory.offsets[y.buffer.id];
        shares = shares || (!p.token && !q.token && p.space == q.space && at_p < at_q + q.size_bytes &&
                            at_q < at_p + p.size_bytes);
      }
    }
    return shares ? Need::some_order : Need::nothing;
  };
  const auto issued_before = [&](Node a, Node b) {
    return issue_order_ == IssueOrder::per_rank && graph_.has_part(a) && graph_.has_part(b) &&
           graph_.part(a).issue < graph_.part(b).issue;
  };
  const auto describe = [&](Node a, Node b, const char* where) {
    return str(graph_.describe(a), " and ", graph_.describe(b), " ", where);
  };
  const std::lock_guard lock(mutex_);
  for (std::uint32_t i = 0; i < graph_.num_nodes(); ++i) {
    for (std::uint32_t k = 0; k < graph_.num_nodes(); ++k) {
      const Node a{i}, b{k};
      if (graph_.rank(a) != graph_.rank(b)) continue;
      const Need need  = same_bytes(a, b);
      const bool lane  = graph_.lane(a) && graph_.lane(a) == graph_.lane(b);
      const bool issue = issued_before(a, b);
      if (num_pairs != nullptr) *num_pairs += need != Need::nothing || lane || issue ? 1 : 0;
      for (std::size_t run = 0; run < runs_.size(); ++run) {
        const bool there = i < k && ordered(a, run, b, run), back = i < k && ordered(b, run, a, run);
        if (i < k && (lane || need == Need::in_order) && !there) return describe(a, b, "of one run");
        if (i < k && need == Need::some_order && !there && !back)
          return describe(a, b, "of one run, which share memory");
        if (issue && !ordered(a, run, b, run)) return describe(a, b, "of one run, which are issued in this order");
        if (run > 0 && need != Need::nothing && !ordered(a, run - 1, b, run))
          return describe(a, b, "of the run before and the next");
      }
    }
  }
  return {};
}

struct StreamLogWorld::LogDevice final : Device {
  // Memory that no one uses.
  struct Bytes final : DeviceMemory {
    [[nodiscard]] std::byte* allocate(Rank, Space, std::size_t size) override {
      return static_cast<std::byte*>(std::calloc(size, 1));
    }
    void release(Rank, Space, std::byte* bytes) noexcept override { std::free(bytes); }
    [[nodiscard]] bool host_sees(Space) const noexcept override { return false; }
    void read(const std::byte* from, std::span<std::byte> to) override { std::memcpy(to.data(), from, to.size()); }
    void write(std::byte* to, std::span<const std::byte> from) override { std::memcpy(to, from.data(), from.size()); }
  };
  struct Streams final : DeviceStreams {
    Streams(std::shared_ptr<StreamLog> writes_to, const Graph& of) : log(std::move(writes_to)), graph(of) {}
    [[nodiscard]] bool vacant() override { return true; }
    [[nodiscard]] bool replay() override { return false; }
    [[nodiscard]] bool ready(Node) override { return true; }
    void begin(bool) override { log->begin_run(); }
    [[nodiscard]] const DeviceQueue* before(Node node) override {
      log->enter(node);
      if (graph.kind(node) == NodeKind::host) return nullptr;
      if (!graph.has_part(node)) log->work({node});
      return &queue;
    }
    void after(Node node) override { log->leave(node); }
    void end(bool) override {}
    [[nodiscard]] bool done() override { return true; }
    [[nodiscard]] std::vector<NodeTime> times() override { return {}; }
    [[nodiscard]] std::optional<std::uint64_t> num_done() override { return std::nullopt; }
    [[nodiscard]] std::vector<Lane> unfinished() override { return {}; }
    void abandon(std::shared_ptr<void>) noexcept override {}
    std::shared_ptr<StreamLog> log;
    Graph graph;
    DeviceQueue queue;
  };

  [[nodiscard]] DeviceMemory& memory() override { return bytes; }
  [[nodiscard]] std::unique_ptr<DeviceStreams> lower(const Graph& graph, StreamPlan plan) override {
    if (change) change(plan);
    log = std::make_shared<StreamLog>(graph, std::move(plan), issue_order);
    return std::make_unique<Streams>(log, graph);
  }
  Bytes bytes;
  std::function<void(StreamPlan&)> change;
  IssueOrder issue_order = IssueOrder::any;
  std::shared_ptr<StreamLog> log;
};

StreamLogWorld::StreamLogWorld(int num_ranks, StreamLogOptions options)
    : num_ranks_(num_ranks), rank_(options.rank), device_(std::make_unique<LogDevice>()) {
  device_->change      = std::move(options.change);
  device_->issue_order = options.issue_order;
}
StreamLogWorld::~StreamLogWorld() = default;

IssueOrder StreamLogWorld::issue_order() const { return device_->issue_order; }
Device* StreamLogWorld::device() const { return device_.get(); }
const StreamLog& StreamLogWorld::log() const { return *device_->log; }

void StreamLogWorld::communicate(const Context&, const Exchange& exchange) {
  std::vector<Node> nodes;
  for (const LocalPart& part : exchange.parts) nodes.push_back(part.node);
  device_->log->work(nodes);
}

}  // namespace stepgraph::testing
