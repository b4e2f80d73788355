#include "engine/look/summary.hpp"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <ostream>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"

namespace stepgraph {
namespace {

constexpr std::size_t most_rows = 8;  // ranks or workers listed individually
constexpr std::size_t most_ops  = 5;

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f%%", 100 * share);
  return text;
}

// Right-aligned columns, each as wide as its widest cell.
class Table {
 public:
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  [[nodiscard]] std::string text() const {
    std::vector<std::size_t> widths;
    for (const auto& row : rows_) {
      widths.resize(std::max(widths.size(), row.size()));
      for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    std::string out;
    for (const auto& row : rows_) {
      for (std::size_t i = 0; i < row.size(); ++i) {
        out.append(widths[i] - row[i].size() + (i > 0 ? 2 : 0), ' ');
        out += row[i];
      }
      out += '\n';
    }
    return out;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

// One value per rank, and its format.
struct Column {
  std::string title;
  std::vector<double> values;  // by place; negative: no value
  std::function<std::string(double)> text;
};

std::vector<Column> columns(const Summary& summary) {
  std::vector<Column> out;
  const auto place = [&](Rank rank) {
    return static_cast<std::size_t>(std::lower_bound(summary.ranks.begin(), summary.ranks.end(), rank) -
                                    summary.ranks.begin());
  };
  const auto column = [&](const std::string& title, const std::function<std::string(double)>& text) -> Column& {
    const auto found = std::find_if(out.begin(), out.end(), [&](const Column& one) { return one.title == title; });
    if (found != out.end()) return *found;
    return out.emplace_back(Column{title, std::vector<double>(summary.ranks.size(), -1), text});
  };
  for (std::size_t kind = 0; kind <= num_lane_kinds; ++kind) {  // in lane order; the last: no lane
    for (const LaneBusy& lane : summary.lanes) {
      if ((lane.lane ? static_cast<std::size_t>(*lane.lane) : num_lane_kinds) != kind) continue;
      const std::string title(lane.lane ? to_string(*lane.lane) : "no lane");
      column(title, percent).values[place(lane.rank)] = lane.share;
    }
  }
  if (summary.hidden_in_all.communicate_s > 0) {
    for (std::size_t i = 0; i < summary.ranks.size(); ++i) {
      column("communicates", seconds_text).values[i] = summary.hidden[i].communicate_s;
      column("hidden", percent).values[i] = summary.hidden[i].communicate_s > 0 ? summary.hidden[i].share() : -1;
    }
  }
  for (const Space space : {Space::device, Space::pinned, Space::disk}) {
    for (const MemoryUse& use : summary.memory) {
      if (use.space != space || use.peak == 0) continue;
      column(str(to_string(space), " peak"), bytes_text).values[place(use.rank)] = static_cast<double>(use.peak);
    }
  }
  return out;
}

std::string rank_table(const Summary& summary) {
  const std::vector<Column> figures = columns(summary);
  if (figures.empty()) return {};
  Table table;
  std::vector<std::string> titles{"rank"};
  for (const Column& figure : figures) titles.push_back(figure.title);
  table.row(titles);
  if (summary.ranks.size() <= most_rows) {
    for (std::size_t i = 0; i < summary.ranks.size(); ++i) {
      std::vector<std::string> cells{str(summary.ranks[i])};
      for (const Column& figure : figures) cells.push_back(figure.values[i] < 0 ? "-" : figure.text(figure.values[i]));
      table.row(std::move(cells));
    }
    return table.text();
  }
  for (const auto& [name, share] : {std::pair{"min", 0.0}, std::pair{"median", 0.5}, std::pair{"max", 1.0}}) {
    std::vector<std::string> cells{name};
    for (const Column& figure : figures) {
      std::vector<double> values;
      std::copy_if(figure.values.begin(), figure.values.end(), std::back_inserter(values),
                   [](double value) { return value >= 0; });
      std::sort(values.begin(), values.end());
      cells.push_back(
          values.empty()
              ? "-"
              : figure.text(values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))]));
    }
    table.row(std::move(cells));
  }
  return table.text();
}

std::string worker_line(const std::vector<WorkerBusy>& workers) {
  if (workers.empty()) return {};
  std::string out = "workers busy   ";
  if (workers.size() <= most_rows) {
    for (const WorkerBusy& one : workers)
      out += str(&one == &workers.front() ? "" : ", ", one.worker, ": ", percent(one.share));
  } else {
    std::vector<double> shares;
    for (const WorkerBusy& one : workers) shares.push_back(one.share);
    std::sort(shares.begin(), shares.end());
    out += str(workers.size(), " of them, ", percent(shares.front()), " to ", percent(shares.back()), ", median ",
               percent(shares[(shares.size() - 1) / 2]));
  }
  return out + '\n';
}

std::string path_lines(const Summary& summary) {
  if (summary.critical_path.empty()) return {};
  const double total = summary.makespan_s > 0 ? summary.makespan_s : 1;
  std::string out    = str("critical path  ", summary.critical_path.size(), " nodes: ");
  for (std::size_t kind = 0; kind < summary.path_s.size(); ++kind) {
    if (summary.path_s[kind] > 0)
      out += str(to_string(static_cast<NodeKind>(kind)), ' ', percent(summary.path_s[kind] / total), ", ");
  }
  out += str("waiting ", percent(summary.path_waiting_s / total), "\n");
  for (std::size_t i = 0; i < std::min(summary.path_ops.size(), most_ops); ++i) {
    const Summary::OpTime& op = summary.path_ops[i];
    const std::string share   = percent(op.seconds / total);
    out += str(std::string(15 + 6 - std::min<std::size_t>(6, share.size()), ' '), share, "  ", op.op, " (",
               seconds_text(op.seconds), " in ", op.num_nodes, op.num_nodes == 1 ? " node)\n" : " nodes)\n");
  }
  return out;
}

}  // namespace

Summary summarize(const OrderedGraph& ordered, const Timeline& timeline) {
  const Graph& graph = ordered.graph;
  Summary out{.makespan_s = timeline.makespan_s, .num_nodes = graph.num_nodes()};
  for (const Rank rank : graph.ranks()) out.ranks.push_back(rank);
  out.critical_path = critical_path(ordered, timeline);
  out.lanes         = busy_lanes(graph, timeline);
  out.workers       = busy_workers(timeline);
  out.hidden        = hidden_communication(graph, timeline);
  out.memory        = memory_use(graph, timeline);
  for (const NodeTime& time : timeline.nodes) out.num_ran += time.ran();
  for (const HiddenCommunication& rank : out.hidden) {
    out.hidden_in_all.communicate_s += rank.communicate_s;
    out.hidden_in_all.hidden_s += rank.hidden_s;
  }
  for (const HiddenTransfers& rank : hidden_transfers(graph, timeline)) {
    out.transfers_in_all.transfer_s += rank.transfer_s;
    out.transfers_in_all.hidden_s += rank.hidden_s;
  }
  std::map<std::tuple<std::string_view, NodeKind>, Summary::OpTime> ops;
  for (const PathStep& step : out.critical_path) {
    const NodeTime& time = timeline.nodes[step.node.id];
    const NodeKind kind  = graph.kind(step.node);
    const double seconds = time.end_s - time.begin_s;
    out.path_waiting_s += step.wait_s;
    out.path_s[static_cast<std::size_t>(kind)] += seconds;
    std::string_view op = graph.has_part(step.node) ? to_string(graph.part(step.node).op) : graph.op(step.node);
    if (op.empty()) op = graph.name(step.node);
    if (op.empty()) op = "unnamed";
    Summary::OpTime& sum = ops.try_emplace({op, kind}, Summary::OpTime{std::string(op), kind, 0, 0}).first->second;
    ++sum.num_nodes;
    sum.seconds += seconds;
  }
  for (auto& [key, sum] : ops) out.path_ops.push_back(std::move(sum));
  std::stable_sort(out.path_ops.begin(), out.path_ops.end(),
                   [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return out;
}

std::string to_string(const Summary& summary) {
  std::string out = str("step           ", seconds_text(summary.makespan_s), ", ", summary.num_nodes, " nodes on ",
                        summary.ranks.size(), summary.ranks.size() == 1 ? " rank" : " ranks");
  if (summary.num_ran < summary.num_nodes) out += str(", of which ", summary.num_ran, " ran");
  out += '\n';
  out += worker_line(summary.workers);
  out += path_lines(summary);
  if (summary.hidden_in_all.communicate_s > 0) {
    out += str("communication  ", percent(summary.hidden_in_all.share()),
               " of its time hidden behind compute of the same rank\n");
  }
  if (summary.transfers_in_all.transfer_s > 0) {
    out += str("transfers      ", percent(summary.transfers_in_all.hidden_s / summary.transfers_in_all.transfer_s),
               " of their time hidden behind compute of the same rank\n");
  }
  if (const std::string table = rank_table(summary); !table.empty()) {
    out += str("busy share of each lane, and peak memory:\n", table);
  }
  return out;
}

std::ostream& operator<<(std::ostream& out, const Summary& summary) { return out << to_string(summary); }

}  // namespace stepgraph
