#include "engine/plan/reuse_edges.hpp"

#include <algorithm>
#include <numeric>

namespace stepgraph {
namespace {

// A possible edge into a node.
struct Candidate {
  std::uint32_t before;
  std::uint32_t succession;
};

void advance(LaneClock& clock, const LaneClock& other) {
  for (std::size_t lane = 0; lane < num_lane_kinds; ++lane) clock[lane] = std::max(clock[lane], other[lane]);
}

class ReuseEdges {
 public:
  ReuseEdges(const Graph& graph, Edges old, const std::vector<std::uint32_t>& turns, const std::vector<Tenant>& tenants,
             const std::vector<Succession>& successions)
      : data_(graph.data()),
        old_(std::move(old)),
        turns_(turns),
        tenants_(tenants),
        successions_(successions),
        size_(static_cast<std::uint32_t>(data_.nodes.size())),
        order_(size_),
        clocks_(old_.clocks) {
    std::iota(order_.begin(), order_.end(), 0u);
    std::stable_sort(order_.begin(), order_.end(), [&](auto a, auto b) { return turns_[a] < turns_[b]; });
  }

  std::vector<ReuseEdge> add(Edges& out) {
    std::vector<std::vector<std::uint32_t>> preds(size_), loop_preds(size_);
    for (std::uint32_t node = 0; node < size_; ++node) {
      preds[node].assign(old_.before({node}).begin(), old_.before({node}).end());
      loop_preds[node].assign(old_.before_loop({node}).begin(), old_.before_loop({node}).end());
    }
    add_inside(preds);
    add_loop(preds, loop_preds);
    pack(preds, out.pred_begin, out.preds);
    pack(loop_preds, out.loop_begin, out.loop_preds);
    out.clocks = std::move(clocks_);
    return std::move(added_);
  }

 private:
  using Rows = std::vector<std::vector<std::uint32_t>>;

  // The candidate edges into each node, latest source first: an earlier source never implies a later one.
  [[nodiscard]] std::vector<std::vector<Candidate>> candidates(bool loop) const {
    std::vector<std::vector<Candidate>> out(size_);
    for (std::uint32_t i = 0; i < successions_.size(); ++i) {
      if (successions_[i].loop != loop) continue;
      for (const std::uint32_t in : tenants_[successions_[i].new_tenant].move_in) {
        for (const std::uint32_t before : tenants_[successions_[i].old_tenant].move_out) out[in].push_back({before, i});
      }
    }
    for (std::vector<Candidate>& row : out) {
      std::stable_sort(row.begin(), row.end(), [&](const Candidate& a, const Candidate& b) {
        return turns_[a.before] != turns_[b.before] ? turns_[a.before] > turns_[b.before] : a.before > b.before;
      });
    }
    return out;
  }

  void add_inside(Rows& preds) {
    const auto wanted = candidates(false);
    for (const std::uint32_t node : order_) {
      LaneClock clock{};
      if (!clocks_.empty()) {
        for (const std::uint32_t before : preds[node]) advance(clock, clocks_[before]);
      }
      for (const Candidate& candidate : wanted[node]) {
        const NodeRecord& before = data_.nodes[candidate.before];
        if (before.lane >= 0 ? clock[static_cast<std::size_t>(before.lane)] > before.lane_position
                             : near(preds, candidate.before, node)) {
          continue;
        }
        preds[node].push_back(candidate.before);
        if (!clocks_.empty()) advance(clock, clocks_[candidate.before]);
        note(candidate, node, false);
      }
      if (clocks_.empty()) continue;
      const NodeRecord& record = data_.nodes[node];
      if (record.lane >= 0) clock[static_cast<std::size_t>(record.lane)] = record.lane_position + 1;
      clocks_[node] = clock;
    }
  }

  // The same for the next run, with clocks that count nodes of this run.
  void add_loop(const Rows& preds, Rows& loop_preds) {
    const auto wanted = candidates(true);
    std::vector<LaneClock> seen(clocks_.empty() ? 0 : size_);
    for (const std::uint32_t node : order_) {
      LaneClock clock{};
      if (!clocks_.empty()) {
        for (const std::uint32_t before : preds[node]) advance(clock, seen[before]);
        for (const std::uint32_t before : loop_preds[node]) advance(clock, clocks_[before]);
      }
      for (const Candidate& candidate : wanted[node]) {
        const NodeRecord& before = data_.nodes[candidate.before];
        const bool implied = before.lane >= 0 ? clock[static_cast<std::size_t>(before.lane)] > before.lane_position
                                              : std::find(loop_preds[node].begin(), loop_preds[node].end(),
                                                          candidate.before) != loop_preds[node].end();
        if (implied) continue;
        loop_preds[node].push_back(candidate.before);
        if (!clocks_.empty()) advance(clock, clocks_[candidate.before]);
        note(candidate, node, true);
      }
      if (!clocks_.empty()) seen[node] = clock;
    }
  }

  void note(const Candidate& candidate, std::uint32_t node, bool loop) {
    const Succession& why = successions_[candidate.succession];
    added_.push_back({.before     = {candidate.before},
                      .after      = {node},
                      .old_tenant = {tenants_[why.old_tenant].buffer},
                      .new_tenant = {tenants_[why.new_tenant].buffer},
                      .loop       = loop});
  }

  // Whether a short backward search from `node` finds `before`, which has no lane. A miss only costs a redundant edge.
  bool near(const Rows& preds, std::uint32_t before, std::uint32_t node) {
    constexpr std::size_t most_visited = 64;
    queue_.assign(1, node);
    for (std::size_t next = 0; next < queue_.size() && queue_.size() < most_visited; ++next) {
      for (const std::uint32_t at : preds[queue_[next]]) {
        if (at == before) return true;
        if (turns_[at] <= turns_[before]) continue;
        if (std::find(queue_.begin(), queue_.end(), at) == queue_.end()) queue_.push_back(at);
      }
    }
    return false;
  }

  static void pack(Rows& rows, std::vector<std::uint32_t>& begin, std::vector<std::uint32_t>& items) {
    begin.assign(1, 0);
    items.clear();
    for (std::vector<std::uint32_t>& row : rows) {
      std::sort(row.begin(), row.end());
      items.insert(items.end(), row.begin(), row.end());
      begin.push_back(static_cast<std::uint32_t>(items.size()));
    }
  }

  const GraphData& data_;
  const Edges old_;
  const std::vector<std::uint32_t>& turns_;
  const std::vector<Tenant>& tenants_;
  const std::vector<Succession>& successions_;
  std::uint32_t size_;
  std::vector<std::uint32_t> order_;  // nodes by turn
  std::vector<LaneClock> clocks_;     // include the edges added so far; empty if the graph has no lanes
  std::vector<std::uint32_t> queue_;
  std::vector<ReuseEdge> added_;
};

}  // namespace

std::vector<ReuseEdge> add_reuse_edges(const Graph& graph, const std::vector<std::uint32_t>& turns,
                                       const std::vector<Tenant>& tenants, const std::vector<Succession>& successions,
                                       Edges& edges) {
  return ReuseEdges(graph, std::move(edges), turns, tenants, successions).add(edges);
}

}  // namespace stepgraph
