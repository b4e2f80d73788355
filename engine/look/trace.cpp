#include "engine/look/trace.hpp"

#include <algorithm>
#include <cmath>
#include <ostream>
#include <queue>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/json_text.hpp"
#include "engine/base/output_file.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/graph/matching.hpp"
#include "engine/look/analysis.hpp"

namespace stepgraph {
namespace {

// A node's interval in whole nanoseconds. Rounding keeps the order, so slices of one row do not overlap.
struct Slice {
  std::int64_t begin, end;
  std::uint32_t node;
  // Where arrows attach: inside the slice and, if it is long enough, not at a time that a neighbour shares.
  [[nodiscard]] std::int64_t first_moment() const { return end - begin >= 2 ? begin + 1 : begin; }
  [[nodiscard]] std::int64_t last_moment() const { return std::max(begin, end - 1); }
};

std::int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

// One step: its slices sorted by begin, and the row of each node.
struct Layout {
  std::int64_t length             = 0;  // nanoseconds
  std::vector<Slice> slices       = {};
  std::vector<std::uint32_t> rows = {};  // by node: its lane, or num_lane_kinds and up without a lane
};

// Reuses free rows from the top, so there are never more rows than concurrent nodes.
class Rows {
 public:
  std::uint32_t take(const Slice& slice) {
    while (!busy_.empty() && busy_.top().first <= slice.begin) {
      free_.insert(busy_.top().second);
      busy_.pop();
    }
    std::uint32_t row = count_;
    if (free_.empty()) {
      ++count_;
    } else {
      row = *free_.begin();
      free_.erase(free_.begin());
    }
    busy_.emplace(slice.end, row);
    return row;
  }

 private:
  using End = std::pair<std::int64_t, std::uint32_t>;
  std::priority_queue<End, std::vector<End>, std::greater<>> busy_;
  std::set<std::uint32_t> free_;
  std::uint32_t count_ = 0;
};

Layout lay_out(const GraphData& data, const Timeline& timeline) {
  if (timeline.nodes.size() != data.nodes.size()) {
    throw Error(ErrorKind::config, str("trace: a timeline has ", timeline.nodes.size(), " nodes, but the graph has ",
                                       data.nodes.size(), " (take timelines of this graph)"));
  }
  Layout step{.length = nanoseconds(timeline.makespan_s)};
  for (std::uint32_t node = 0; node < data.nodes.size(); ++node) {
    const NodeTime& time = timeline.nodes[node];
    if (!time.ran()) continue;
    step.slices.push_back({nanoseconds(time.begin_s), nanoseconds(std::max(time.begin_s, time.end_s)), node});
    step.length = std::max(step.length, step.slices.back().end);
  }
  std::sort(step.slices.begin(), step.slices.end(), [](const Slice& a, const Slice& b) {
    return std::tuple(a.begin, a.end, a.node) < std::tuple(b.begin, b.end, b.node);
  });
  std::vector<Rows> laneless(data.ranks.size());
  std::vector<std::int64_t> lane_until(laneless.size() * num_lane_kinds);
  step.rows.resize(data.nodes.size());
  for (Slice& slice : step.slices) {
    const NodeRecord& node = data.nodes[slice.node];
    const std::size_t rank = node.place;
    if (node.lane < 0) {
      step.rows[slice.node] = static_cast<std::uint32_t>(num_lane_kinds) + laneless[rank].take(slice);
      continue;
    }
    step.rows[slice.node] = static_cast<std::uint32_t>(node.lane);
    // A lane is a chain. If clocks disagree slightly, slices are still shifted so that they do not overlap: viewers
    // need that.
    std::int64_t& until = lane_until[GraphData::lane_index(node)];
    slice.begin         = std::max(slice.begin, until);
    slice.end = until = std::max(slice.begin, slice.end);
  }
  return step;
}

void open_trace(JsonText& json, const std::string& title, std::int64_t num_ranks, std::int64_t num_nodes,
                std::size_t num_steps) {
  json.open('{');
  json.field("displayTimeUnit", "ms");
  json.key("otherData");
  json.open('{');
  json.field("title", title);
  json.field("written_by", "stepgraph");
  json.field("ranks", num_ranks);
  json.field("nodes", num_nodes);
  json.field("steps", static_cast<std::int64_t>(num_steps));
  json.close('}');
  json.key("traceEvents");
  json.open('[');
}

void close_trace(JsonText& json) {
  json.close(']');
  json.close('}');
  json.flush();
}

class Writer {
 public:
  Writer(const OrderedGraph& graph, std::span<const Timeline> timelines, std::ostream& out, const TraceOptions& options)
      : graph_(graph.graph),
        data_(graph_.data()),
        edges_(graph.edges),
        timelines_(timelines),
        options_(options),
        json_(out) {
    for (const Timeline& timeline : timelines) steps_.push_back(lay_out(data_, timeline));
  }

  void write() {
    open_trace(json_, options_.title, data_.num_ranks, static_cast<std::int64_t>(data_.nodes.size()), steps_.size());
    write_events(0);
    close_trace(json_);
  }

  // As part of a trace. Rows keep their numbers apart however many of them the other processes have.
  void write_part(int process, double offset_s) {
    process_ = process;
    stride_  = 100'000;
    write_events(nanoseconds(offset_s));
    json_.flush();
  }

 private:
  [[nodiscard]] bool is_part() const { return process_ >= 0; }

  void write_events(std::int64_t start) {
    write_names();
    const Matching matching = options_.flows ? match_parts(graph_) : Matching{};
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      if (steps_.size() > 1) write_step(i, start);
      for (const Slice& slice : steps_[i].slices) write_slice(steps_[i], slice, start);
      if (options_.flows) write_flows(steps_[i], matching, start);
      if (options_.counters) write_counters(timelines_[i], start);
      start += steps_[i].length;
    }
  }

  // Row numbers are unique over all processes and never equal a process number: viewers would take such a row for the
  // main thread of the process.
  [[nodiscard]] std::int64_t tid(std::int64_t process, std::uint32_t row) const { return process * stride_ + row + 1; }
  [[nodiscard]] std::int64_t tid(const Layout& step, std::uint32_t node) const {
    return tid(data_.nodes[node].rank, step.rows[node]);
  }
  [[nodiscard]] std::int64_t steps_process() const { return data_.num_ranks; }

  void open_event(const char* phase, std::int64_t process) {
    json_.next();
    json_.open('{');
    json_.field("ph", std::string_view(phase));
    json_.field("pid", process);
  }
  void time(const char* name, std::int64_t ns) {
    json_.key(name);
    json_.microseconds(ns);
  }
  template <class T>
  void metadata(const char* name, std::int64_t process, std::int64_t thread, const char* key, const T& what) {
    open_event("M", process);
    if (thread >= 0) json_.field("tid", thread);
    json_.field("name", std::string_view(name));
    json_.key("args");
    json_.open('{');
    json_.field(key, what);
    json_.close('}');
    json_.close('}');
  }

  void write_names() {
    std::vector<std::vector<bool>> rows(data_.ranks.size());  // [place][row]: the row has slices
    std::vector<bool> shown(rows.size());
    for (const Layout& step : steps_) {
      for (const Slice& slice : step.slices) {
        auto& own      = rows[data_.nodes[slice.node].place];
        const auto row = static_cast<std::size_t>(step.rows[slice.node]);
        if (own.size() <= row) own.resize(row + 1);
        own[row] = true;
      }
    }
    for (const BufferSpec& buffer : data_.buffers) {
      if (options_.counters && !buffer.token) shown[*data_.ranks.place(buffer.rank)] = true;
    }
    for (const auto& own : rows) {
      while (stride_ <= static_cast<std::int64_t>(own.size())) stride_ *= 10;
    }
    if (steps_.size() > 1) {
      metadata("process_name", steps_process(), -1, "name", std::string_view("steps"));
      metadata("process_sort_index", steps_process(), -1, "sort_index", std::int64_t{-1});
      metadata("thread_name", steps_process(), tid(steps_process(), 0), "name", std::string_view("step"));
      metadata("thread_sort_index", steps_process(), tid(steps_process(), 0), "sort_index", std::int64_t{0});
    }
    for (std::size_t place = 0; place < rows.size(); ++place) {
      if (rows[place].empty() && !shown[place]) continue;
      const std::int64_t process = index(data_.ranks[place]);
      metadata("process_name", process, -1, "name", str("rank ", process));
      metadata("process_sort_index", process, -1, "sort_index", process);
      for (std::uint32_t row = 0; row < rows[place].size(); ++row) {
        if (!rows[place][row]) continue;
        const std::string name = row < num_lane_kinds ? std::string(to_string(static_cast<LaneKind>(row)))
                                                      : str("other ", row - num_lane_kinds + 1);
        metadata("thread_name", process, tid(process, row), "name", name);
        metadata("thread_sort_index", process, tid(process, row), "sort_index", std::int64_t{row});
      }
    }
  }

  void write_step(std::size_t number, std::int64_t start) {
    open_event("X", steps_process());
    json_.field("tid", tid(steps_process(), 0));
    json_.field("name", str("step ", number));
    json_.field("cat", std::string_view("step"));
    time("ts", start);
    time("dur", steps_[number].length);
    json_.close('}');
  }

  [[nodiscard]] std::string_view operation(const NodeRecord& node) const {
    return node.part >= 0 ? to_string(data_.parts[static_cast<std::size_t>(node.part)].op) : data_.strings[node.op];
  }

  void write_slice(const Layout& step, const Slice& slice, std::int64_t start) {
    const NodeRecord& node      = data_.nodes[slice.node];
    const std::string_view name = data_.name(slice.node), op = operation(node);
    open_event("X", node.rank);
    json_.field("tid", tid(step, slice.node));
    json_.key("name");
    if (!name.empty() || !op.empty()) {
      json_.value(name.empty() ? op : name);
    } else {
      json_.value(str("node ", slice.node));
    }
    json_.field("cat", to_string(node.kind));
    time("ts", start + slice.begin);
    time("dur", slice.end - slice.begin);
    json_.key("args");
    json_.open('{');
    write_arguments(node, op, slice.node);
    json_.close('}');
    json_.close('}');
  }

  void write_arguments(const NodeRecord& node, std::string_view op, std::uint32_t id) {
    const auto amount = [&](const char* name, double value) {
      if (value > 0 && std::isfinite(value)) json_.field(name, value);
    };
    const auto label = [&](const char* name, int value) {
      if (value >= 0) json_.field(name, std::int64_t{value});
    };
    if (!op.empty()) json_.field("op", op);
    label("stage", node.stage);
    label("microbatch", node.microbatch);
    label("layer", node.layer);
    if (node.phase != 0) json_.field("phase", data_.strings[node.phase]);
    if (node.part >= 0) {
      const PartRecord& part = data_.parts[static_cast<std::size_t>(node.part)];
      json_.field("group", std::string_view(data_.groups[part.group].name));
      if (point_to_point(part.op)) json_.field("peer", std::int64_t{index(part.peer)});
      if (part.message != 0) json_.field("message", data_.strings[part.message]);
      amount("bytes", static_cast<double>(std::max(part.bytes_read, part.bytes_written)));
    } else {
      amount("bytes", node.cost.bytes_moved);
    }
    amount("bytes_sent", node.cost.bytes_sent);
    amount("flops", node.cost.flops);
    json_.field("node", std::int64_t{id});
  }

  template <class Id>
  void arrow_end(const char* what, const char* phase, const Id& id, std::int64_t process, std::int64_t thread,
                 std::int64_t ns) {
    open_event(phase, process);
    json_.field("tid", thread);
    json_.field("name", std::string_view(what));
    json_.field("cat", std::string_view("flow"));
    json_.field("id", id);
    time("ts", ns);
    if (phase[0] == 'f') json_.field("bp", std::string_view("e"));
    json_.close('}');
  }

  void arrow(const char* what, std::int64_t from_process, std::int64_t from, std::int64_t from_ns,
             std::int64_t to_process, std::int64_t to, std::int64_t to_ns) {
    if (from_ns > to_ns) return;  // clocks disagree
    const std::int64_t number = next_arrow_++;
    const auto both           = [&](const auto& id) {
      arrow_end(what, "s", id, from_process, from, from_ns);
      arrow_end(what, "f", id, to_process, to, to_ns);
    };
    is_part() ? both(std::string_view(str("p", process_, ".", number))) : both(number);
  }

  // One half of the arrow of a message whose other end is in another process, which writes the other half.
  void half_arrow(const Layout& step, const Slice& slice, std::uint32_t turn, std::int64_t start) {
    const NodeRecord& node = data_.nodes[slice.node];
    const PartRecord& part = data_.parts[static_cast<std::size_t>(node.part)];
    const bool sends       = part.op == PartOp::send;
    const std::int64_t own = node.rank, other = index(part.peer);
    const std::string id =
        str(data_.groups[part.group].name, " ", sends ? own : other, ">", sends ? other : own, " ", turn);
    arrow_end("message", sends ? "s" : "f", std::string_view(id), own, tid(step, slice.node),
              start + (sends ? slice.first_moment() : slice.last_moment()));
  }

  void write_flows(const Layout& step, const Matching& matching, std::int64_t start) {
    std::vector<std::uint32_t> slice_of(data_.nodes.size(), no_node);
    for (std::uint32_t i = 0; i < step.slices.size(); ++i) slice_of[step.slices[i].node] = i;
    for (const Slice& slice : step.slices) {
      const NodeRecord& node = data_.nodes[slice.node];
      for (const std::uint32_t before : edges_.before({slice.node})) {
        const NodeRecord& other = data_.nodes[before];
        if (slice_of[before] == no_node || (node.lane >= 0 && node.lane == other.lane && node.rank == other.rank))
          continue;  // the order within a row needs no arrow
        arrow("edge", other.rank, tid(step, before), start + step.slices[slice_of[before]].last_moment(), node.rank,
              tid(step, slice.node), start + slice.first_moment());
      }
      if (node.part < 0) continue;
      const PartRecord& part      = data_.parts[static_cast<std::size_t>(node.part)];
      const std::uint32_t meeting = matching.of_node[slice.node];
      if (is_part() && point_to_point(part.op) && !graph_.holds(part.peer))
        half_arrow(step, slice, matching.turn[meeting], start);
      if (part.op != PartOp::send) continue;
      const auto ends = matching.meeting(meeting);
      if (ends.size() != 2 || slice_of[ends[1]] == no_node) continue;
      // Sender and receiver run at the same time: the arrow leads from the begin of one to the end of the other.
      arrow("message", node.rank, tid(step, slice.node), start + slice.first_moment(), data_.nodes[ends[1]].rank,
            tid(step, ends[1]), start + step.slices[slice_of[ends[1]]].last_moment());
    }
  }

  void write_counters(const Timeline& timeline, std::int64_t start) {
    for (const MemoryUse& use : memory_use(graph_, timeline)) {
      if (use.peak == 0) continue;
      const std::string name = str(to_string(use.space), " memory");
      for (const MemoryUse::Sample& sample : use.samples) {
        open_event("C", index(use.rank));
        json_.field("name", std::string_view(name));
        time("ts", start + nanoseconds(sample.time_s));
        json_.key("args");
        json_.open('{');
        json_.field("bytes", sample.bytes);
        json_.close('}');
        json_.close('}');
      }
    }
  }

  const Graph& graph_;
  const GraphData& data_;
  const Edges& edges_;
  std::span<const Timeline> timelines_;
  const TraceOptions& options_;
  JsonText json_;
  std::vector<Layout> steps_;
  std::int64_t stride_     = 100;  // between the row numbers of two processes
  std::int64_t next_arrow_ = 1;
  int process_             = -1;  // of a part
};

}  // namespace

void write_trace(const OrderedGraph& graph, std::span<const Timeline> timelines, std::ostream& out,
                 const TraceOptions& options) {
  Writer(graph, timelines, out, options).write();
}

void write_trace(const OrderedGraph& graph, std::span<const Timeline> timelines, const std::string& path,
                 const TraceOptions& options) {
  write_stream(path, [&](std::ostream& out) { write_trace(graph, timelines, out, options); });
}

TracePart trace_part(const OrderedGraph& graph, const Timeline& timeline, int process, double offset_s,
                     const TraceOptions& options) {
  std::ostringstream out;
  Writer(graph, std::span(&timeline, 1), out, options).write_part(process, offset_s);
  return {std::move(out).str(), static_cast<std::int64_t>(graph.graph.num_nodes())};
}

void join_trace(std::span<const TracePart> parts, int num_ranks, const std::string& path, const TraceOptions& options) {
  std::int64_t num_nodes = 0;
  for (const TracePart& part : parts) num_nodes += part.num_nodes;
  write_stream(path, [&](std::ostream& out) {
    JsonText json(out);
    open_trace(json, options.title, num_ranks, num_nodes, 1);
    bool first = true;
    for (const TracePart& part : parts) {
      if (part.events.empty()) continue;
      if (!std::exchange(first, false)) json.raw(",");
      json.raw(part.events);
      json.flush();
    }
    close_trace(json);
  });
}

void write_trace(const OrderedGraph& graph, const Timeline& timeline, std::ostream& out, const TraceOptions& options) {
  write_trace(graph, std::span(&timeline, 1), out, options);
}

void write_trace(const OrderedGraph& graph, const Timeline& timeline, const std::string& path,
                 const TraceOptions& options) {
  write_trace(graph, std::span(&timeline, 1), path, options);
}

}  // namespace stepgraph
