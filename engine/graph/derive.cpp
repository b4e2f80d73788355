#include <algorithm>

#include "engine/graph/atoms.hpp"
#include "engine/graph/edges.hpp"
#include "engine/graph/graph_data.hpp"

namespace stepgraph {
namespace {

// The last accesses of an atom so far. Readers are linked lists in one pool. They are never freed, because the readers
// before the first write (`prefix`) are needed again for the edges into the next run.
struct AtomHistory {
  std::uint32_t writer       = no_node;  // last
  std::uint32_t readers      = no_node;  // since then
  std::uint32_t first_writer = no_node;
  std::uint32_t prefix       = no_node;  // readers before the first write
};

struct Reader {
  std::uint32_t node;
  std::uint32_t next;
};

// Removes candidate predecessors that follow from other candidates: `a` is removed when the clock of another candidate
// includes a's position on its lane.
class Pruner {
 public:
  explicit Pruner(const GraphData& data) : data_(data) {}

  // `clocks` begins with those of the candidates, in their order; further clocks can only make candidates redundant.
  void prune(std::vector<std::uint32_t>& candidates, const std::vector<const LaneClock*>& clocks) {
    best_.fill(0);
    second_.fill(0);
    for (std::size_t i = 0; i < clocks.size(); ++i) {
      for (std::size_t lane = 0; lane < num_lane_kinds; ++lane) {
        const std::uint32_t seen = (*clocks[i])[lane];
        if (seen > best_[lane]) {
          second_[lane] = best_[lane];
          best_[lane]   = seen;
          owner_[lane]  = i;
        } else if (seen > second_[lane]) {
          second_[lane] = seen;
        }
      }
    }
    std::size_t kept = 0;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const NodeRecord& node = data_.nodes[candidates[i]];
      if (node.lane >= 0) {
        const auto lane            = static_cast<std::size_t>(node.lane);
        const std::uint32_t others = owner_[lane] == i ? second_[lane] : best_[lane];
        if (others > node.lane_position) continue;
      }
      candidates[kept++] = candidates[i];
    }
    candidates.resize(kept);
  }

 private:
  const GraphData& data_;
  LaneClock best_{}, second_{};
  std::array<std::size_t, num_lane_kinds> owner_{};
};

void advance(LaneClock& clock, const LaneClock& other) {
  for (std::size_t lane = 0; lane < num_lane_kinds; ++lane) clock[lane] = std::max(clock[lane], other[lane]);
}

class Deriver {
 public:
  explicit Deriver(const GraphData& data)
      : data_(data),
        atoms_(data),
        history_(atoms_.size()),
        seen_(data.nodes.size(), no_node),
        last_on_lane_(data.num_lanes(), no_node),
        first_on_lane_(data.num_lanes(), no_node),
        pruner_(data),
        has_lanes_(std::any_of(data.lane_sizes.begin(), data.lane_sizes.end(), [](auto size) { return size > 0; })) {
    readers_.reserve(data.accesses.size());
  }

  Edges derive() {
    const auto num_nodes = static_cast<std::uint32_t>(data_.nodes.size());
    edges_.pred_begin.reserve(num_nodes + 1);
    edges_.pred_begin.push_back(0);
    edges_.preds.reserve(data_.accesses.size());
    if (has_lanes_) edges_.clocks.resize(num_nodes);
    for (std::uint32_t node = 0; node < num_nodes; ++node) {
      candidates_.clear();
      collect(node);
      if (has_lanes_) settle_clock(node);
      std::sort(candidates_.begin(), candidates_.end());
      edges_.preds.insert(edges_.preds.end(), candidates_.begin(), candidates_.end());
      edges_.pred_begin.push_back(static_cast<std::uint32_t>(edges_.preds.size()));
    }
    derive_loop();
    return std::move(edges_);
  }

 private:
  void candidate(std::uint32_t before, std::uint32_t node) {
    if (before == no_node || before == node || seen_[before] == node) return;
    seen_[before] = node;
    candidates_.push_back(before);
  }

  // The predecessors of a node, byte by byte: a read follows the last write; a write follows the reads since then, or
  // the last write when there are none. This depends on the order of conflicting accesses only.
  void collect(std::uint32_t node) {
    const std::uint32_t begin = data_.nodes[node].access_begin, end = data_.access_end(node);
    for (std::uint32_t i = begin; i < end; ++i) {
      if (data_.accesses[i].mode() != AccessMode::read) continue;
      atoms_.of(data_.accesses[i], [&](std::uint32_t first, std::uint32_t count) {
        for (std::uint32_t atom = first; atom < first + count; ++atom) read(node, history_[atom]);
      });
    }
    for (std::uint32_t i = begin; i < end; ++i) {
      if (data_.accesses[i].mode() == AccessMode::read) continue;
      atoms_.of(data_.accesses[i], [&](std::uint32_t first, std::uint32_t count) {
        for (std::uint32_t atom = first; atom < first + count; ++atom) write(node, history_[atom]);
      });
    }
    const NodeRecord& record = data_.nodes[node];
    if (record.lane >= 0) {
      const std::size_t lane = GraphData::lane_index(record);
      candidate(last_on_lane_[lane], node);
      last_on_lane_[lane] = node;
      if (first_on_lane_[lane] == no_node) first_on_lane_[lane] = node;
    }
  }

  void read(std::uint32_t node, AtomHistory& atom) {
    candidate(atom.writer, node);
    // A later reader on the same lane replaces an earlier one. Not before the first write: loop edges need all readers.
    if (atom.writer != no_node && atom.readers != no_node) {
      Reader& latest = readers_[atom.readers];
      if (latest.node == node) return;
      const std::int32_t lane = data_.nodes[node].lane;
      if (lane >= 0 && data_.nodes[latest.node].lane == lane) {
        latest.node = node;
        return;
      }
    }
    readers_.push_back({node, atom.readers});
    atom.readers = static_cast<std::uint32_t>(readers_.size() - 1);
  }

  void write(std::uint32_t node, AtomHistory& atom) {
    if (atom.writer == node) return;
    bool read_by_others = false;
    for (std::uint32_t i = atom.readers; i != no_node; i = readers_[i].next) {
      read_by_others |= readers_[i].node != node;
      candidate(readers_[i].node, node);
    }
    if (!read_by_others) candidate(atom.writer, node);
    if (atom.first_writer == no_node) {
      atom.first_writer = node;
      atom.prefix       = atom.readers;
    }
    atom.writer  = node;
    atom.readers = no_node;
  }

  void settle_clock(std::uint32_t node) {
    LaneClock& clock = edges_.clocks[node];
    clock.fill(0);
    clocks_.clear();
    for (const std::uint32_t before : candidates_) clocks_.push_back(&edges_.clocks[before]);
    for (const LaneClock* other : clocks_) advance(clock, *other);
    if (clocks_.size() > 1) pruner_.prune(candidates_, clocks_);
    const NodeRecord& record = data_.nodes[node];
    if (record.lane >= 0) clock[static_cast<std::size_t>(record.lane)] = record.lane_position + 1;
  }

  // The edges into the next run: from the last accesses of an atom in this run to the first accesses in the next run.
  void derive_loop() {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs;  // (node of the next run, node of this run)
    pairs.reserve(history_.size());
    for (const AtomHistory& atom : history_) {
      if (atom.writer == no_node) continue;
      for (std::uint32_t i = atom.prefix; i != no_node; i = readers_[i].next)
        pairs.emplace_back(readers_[i].node, atom.writer);
      for (std::uint32_t i = atom.readers; i != no_node; i = readers_[i].next) {
        pairs.emplace_back(atom.first_writer, readers_[i].node);
      }
      if (atom.readers == no_node && atom.prefix == no_node) pairs.emplace_back(atom.first_writer, atom.writer);
    }
    for (std::size_t lane = 0; lane < first_on_lane_.size(); ++lane) {
      if (first_on_lane_[lane] != no_node) pairs.emplace_back(first_on_lane_[lane], last_on_lane_[lane]);
    }

    const auto num_nodes = static_cast<std::uint32_t>(data_.nodes.size());
    std::vector<std::uint32_t> begin(num_nodes + 1, 0), sources(pairs.size());
    for (const auto& [node, source] : pairs) ++begin[node + 1];
    for (std::uint32_t node = 0; node < num_nodes; ++node) begin[node + 1] += begin[node];
    std::vector<std::uint32_t> next(begin.begin(), begin.end() - 1);
    for (const auto& [node, source] : pairs) sources[next[node]++] = source;

    std::vector<LaneClock> seen(has_lanes_ ? num_nodes : 0);  // positions of the previous run that come before a node
    edges_.loop_begin.reserve(num_nodes + 1);
    edges_.loop_begin.push_back(0);
    edges_.loop_preds.reserve(pairs.size());
    for (std::uint32_t node = 0; node < num_nodes; ++node) {
      candidates_.assign(sources.begin() + begin[node], sources.begin() + begin[node + 1]);
      std::sort(candidates_.begin(), candidates_.end());
      candidates_.erase(std::unique(candidates_.begin(), candidates_.end()), candidates_.end());
      if (has_lanes_) {
        clocks_.clear();
        for (const std::uint32_t source : candidates_) clocks_.push_back(&edges_.clocks[source]);
        for (const std::uint32_t before : edges_.before({node})) clocks_.push_back(&seen[before]);
        seen[node].fill(0);
        for (const LaneClock* other : clocks_) advance(seen[node], *other);
        if (!candidates_.empty()) pruner_.prune(candidates_, clocks_);
      }
      edges_.loop_preds.insert(edges_.loop_preds.end(), candidates_.begin(), candidates_.end());
      edges_.loop_begin.push_back(static_cast<std::uint32_t>(edges_.loop_preds.size()));
    }
  }

  const GraphData& data_;
  Atoms atoms_;
  std::vector<AtomHistory> history_;
  std::vector<Reader> readers_;
  std::vector<std::uint32_t> seen_;  // the last node that a node became a candidate of
  std::vector<std::uint32_t> last_on_lane_, first_on_lane_;
  Pruner pruner_;
  bool has_lanes_;
  std::vector<std::uint32_t> candidates_;
  std::vector<const LaneClock*> clocks_;
  Edges edges_;
};

}  // namespace

std::span<const std::uint32_t> Edges::before(Node node) const {
  return std::span(preds).subspan(pred_begin[node.id], pred_begin[node.id + 1] - pred_begin[node.id]);
}

std::span<const std::uint32_t> Edges::before_loop(Node node) const {
  return std::span(loop_preds).subspan(loop_begin[node.id], loop_begin[node.id + 1] - loop_begin[node.id]);
}

Edges derive(const Graph& graph) { return Deriver(graph.data()).derive(); }

bool reaches(const Graph& graph, Node a, Node b) {
  const GraphData& data = graph.data();
  if (data.nodes[a.id].rank != data.nodes[b.id].rank || a.id >= b.id) return false;
  const Edges& edges = graph.edges();
  if (data.nodes[a.id].lane >= 0) {
    return edges.clocks[b.id][static_cast<std::size_t>(data.nodes[a.id].lane)] > data.nodes[a.id].lane_position;
  }
  // Edges lead from earlier to later nodes, so the search stays between the two.
  std::vector<std::uint32_t> stack{b.id};
  std::vector<bool> visited(b.id - a.id + 1, false);
  while (!stack.empty()) {
    const std::uint32_t node = stack.back();
    stack.pop_back();
    for (const std::uint32_t before : edges.before({node})) {
      if (before == a.id) return true;
      if (before < a.id || visited[before - a.id]) continue;
      visited[before - a.id] = true;
      stack.push_back(before);
    }
  }
  return false;
}

}  // namespace stepgraph
