#include "graphs/step/weight_slots.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

constexpr std::uint32_t none = ~std::uint32_t{0};

// A time for which a buffer has memory: from its first node to its last, in the order of the graph.
struct Tenancy {
  std::uint32_t owner = 0;  // into SlotPlan::values or ::gradients
  std::uint32_t first = 0, last = 0;
  std::uint32_t user = 0;  // the first that reads it: a mark may come before
  bool forward       = false;
  Buffer slot        = {};
};

bool is_forward(const Labels& labels) { return labels.phase == "forward"; }

// What one rank does with its slots.
class RankSlots {
 public:
  RankSlots(const Graph& graph, const SlotPlan& slots, const ShardPlan& plan, Rank rank)
      : graph_(graph), slots_(slots), plan_(plan), rank_(rank) {}

  void see(std::uint32_t node) {
    const auto op = graph_.op(Node{node});
    if (op == unshard_mark) marks_[graph_.labels(Node{node}).stage].push_back({node, none});
    if (op == reshard_mark) marks_[graph_.labels(Node{node}).stage].back().second = node;
    std::uint32_t read = none, written = none;
    for (std::size_t i = 0; i < graph_.num_accesses(Node{node}); ++i) {
      const Graph::AccessView access = graph_.access(Node{node}, i);
      if (const auto found = values_.find(access.buffer.id); found != values_.end()) {
        if (read != none && read != found->second) {
          throw Error(ErrorKind::config,
                      str("shard.units: ", graph_.describe(Node{node}), " reads weights of '", slots_.values[read].unit,
                          "' and of '", slots_.values[found->second].unit, "' (of one unit)"));
        }
        read = found->second;
      }
      if (const auto found = gradients_.find(access.buffer.id); found != gradients_.end()) written = found->second;
    }
    if (read != none) use(read, node);
    if (written != none) add_to(written, node);
  }

  void own(std::uint32_t number, const UnitValues& values) { values_.emplace(values.whole.id, number); }
  void own(std::uint32_t number, const UnitGradients& gradients) { gradients_.emplace(gradients.whole.id, number); }

  // When all nodes were seen.
  void assign(Graph& out) {
    if (!plan_.reshard_after_forward) {
      join_microbatches();
    } else if (plan_.keep_between_microbatches) {
      join_marked();
    } else {
      share(out, tenancies_, plan_.slots, slots_.values, "weight slot ");
    }
    share(out, written_, plan_.grad_slots, slots_.gradients, "gradient slot ");
    for (Tenancy& tenancy : tenancies_) {
      const UnitValues& values = slots_.values[tenancy.owner];
      if (tenancy.slot == Buffer{})
        tenancy.slot = slot(out, str("gathered ", values.unit), values.size_bytes, values.type);
      if (!tenancy.forward) gathered_again_.insert(tenancy.owner);
      begins_.emplace(tenancy.first, &tenancy);
      ends_.emplace(tenancy.last, &tenancy);
    }
    for (Tenancy& tenancy : written_) ends_written_.emplace(tenancy.last, &tenancy);
  }

  // The node as it is in the new graph, with what comes before and after it.
  void emit(Graph& out, std::uint32_t node) {
    const auto [first, last] = begins_.equal_range(node);
    for (auto at = first; at != last; ++at) gather(out, *at->second);
    if (graph_.op(Node{node}) == unshard_mark || graph_.op(Node{node}) == reshard_mark) return;
    NodeSpec spec = graph_.spec(Node{node});
    if (spec.part) spec.part->issue = -1;  // as nodes come
    spec.reads = spec.writes = spec.accumulates = {};
    for (std::size_t i = 0; i < graph_.num_accesses(Node{node}); ++i) {
      const Graph::AccessView view = graph_.access(Node{node}, i);
      AccessList& list             = view.mode == AccessMode::read    ? spec.reads
                                     : view.mode == AccessMode::write ? spec.writes
                                                                      : spec.accumulates;
      list.push_back({moved(view.buffer), view.region});
    }
    const auto ending = ends_.find(node);
    if (ending != ends_.end() && (!plan_.forward_prefetch || plan_.prefetch != Prefetch::backward_pre)) {
      done_ = out.token(rank_, str("used ", slots_.values[ending->second->owner].unit));
      spec.writes.push_back(done_);
    }
    out.add(spec, graph_.body(Node{node}));
    if (ending != ends_.end()) keep(out, *ending->second, spec.labels);
    if (const auto reduced = ends_written_.find(node); reduced != ends_written_.end()) {
      const Tenancy& tenancy = *reduced->second;
      AccessList done;
      if (plan_.prefetch == Prefetch::none) {
        done_ = out.token(rank_, str("reduced ", slots_.gradients[tenancy.owner].unit));
        done.push_back(done_);
      }
      slots_.gradients[tenancy.owner].reduce(out, tenancy.slot, done);
    }
  }

 private:
  // Neighbours in time are one use: nothing else is gathered in between.
  void use(std::uint32_t owner, std::uint32_t node) {
    if (!tenancies_.empty() && tenancies_.back().owner == owner) {
      tenancies_.back().last = node;
      return;
    }
    tenancies_.push_back(
        {.owner = owner, .first = node, .last = node, .user = node, .forward = is_forward(graph_.labels({node}))});
  }

  void add_to(std::uint32_t owner, std::uint32_t node) {
    const auto [found, first] = written_by_.try_emplace(owner, written_.size());
    if (first) written_.push_back({.owner = owner, .first = node, .last = node});
    written_[found->second].last = node;
  }

  // Each tenancy in the next slot, the first again after the last. A slot is as large as its largest tenant. Tenants
  // come one after another: those of a slot never meet.
  template <class Units>
  void share(Graph& out, std::vector<Tenancy>& tenancies, int num_slots, const Units& units, std::string_view name) {
    const auto count = std::min(static_cast<std::size_t>(num_slots), tenancies.size());
    for (std::size_t s = 0; s < count; ++s) {
      std::int64_t size = 0;
      for (std::size_t i = s; i < tenancies.size(); i += count)
        size = std::max(size, units[tenancies[i].owner].size_bytes);
      const Buffer shared = slot(out, str(name, s), size, units[tenancies[s].owner].type);
      for (std::size_t i = s; i < tenancies.size(); i += count) {
        tenancies[i].slot = shared;
        if (i < count || tenancies[i - count].last < tenancies[i].first) continue;
        throw Error(ErrorKind::config,
                    str("shard: '", units[tenancies[i].owner].unit, "' and '", units[tenancies[i - count].owner].unit,
                        "' are in use at the same time and would share ", name, s,
                        " (units whose blocks run one after another)"));
      }
    }
  }

  Buffer slot(Graph& out, std::string name, std::int64_t size, DType type) {
    return out.buffer({.name = std::move(name), .rank = rank_, .size_bytes = size, .type = type});
  }

  // Weights stay from a microbatch's forward to its backward, and as long as another's are there.
  void join_microbatches() {
    std::map<std::pair<std::uint32_t, int>, std::pair<std::uint32_t, std::uint32_t>> spans;
    std::map<std::uint32_t, std::vector<std::pair<std::uint32_t, std::uint32_t>>> by_owner;
    for (const auto& [node, owner] : reads()) {
      const auto [at, fresh] = spans.try_emplace({owner, graph_.labels({node}).microbatch}, node, node);
      if (!fresh) at->second.second = std::max(at->second.second, node);
    }
    for (const auto& [key, span] : spans) by_owner[key.first].push_back(span);
    join(std::move(by_owner));
  }

  // Weights of a stage stay from its mark to the next.
  void join_marked() {
    std::map<std::uint32_t, std::vector<std::pair<std::uint32_t, std::uint32_t>>> by_owner;
    for (const auto& [node, owner] : reads()) {
      const auto marks = marks_.find(graph_.labels({node}).stage);
      std::pair<std::uint32_t, std::uint32_t> span{node, node};
      if (marks != marks_.end()) {
        for (const auto& [begin, end] : marks->second) {
          if (begin <= node && node <= end) span = {begin, node};
        }
      }
      by_owner[owner].push_back(span);
    }
    join(std::move(by_owner));
  }

  [[nodiscard]] std::vector<std::pair<std::uint32_t, std::uint32_t>> reads() const {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> found;
    for (const Tenancy& tenancy : tenancies_) {
      for (std::uint32_t node = tenancy.first; node <= tenancy.last; ++node) {
        if (graph_.rank(Node{node}) == rank_ && reads_whole(node, tenancy.owner))
          found.emplace_back(node, tenancy.owner);
      }
    }
    return found;
  }
  [[nodiscard]] bool reads_whole(std::uint32_t node, std::uint32_t owner) const {
    for (std::size_t i = 0; i < graph_.num_accesses(Node{node}); ++i) {
      const auto found = values_.find(graph_.access(Node{node}, i).buffer.id);
      if (found != values_.end() && found->second == owner) return true;
    }
    return false;
  }

  // Spans of one owner that touch become one; they begin and end at nodes that read.
  void join(std::map<std::uint32_t, std::vector<std::pair<std::uint32_t, std::uint32_t>>> by_owner) {
    tenancies_.clear();
    for (auto& [owner, spans] : by_owner) {
      std::sort(spans.begin(), spans.end());
      const std::size_t before = tenancies_.size();
      for (const auto& [first, last] : spans) {
        if (tenancies_.size() > before && first <= tenancies_.back().last) {
          tenancies_.back().last = std::max(tenancies_.back().last, last);
        } else {
          const std::uint32_t user = graph_.op({first}) == unshard_mark ? last : first;
          tenancies_.push_back({.owner   = owner,
                                .first   = first,
                                .last    = last,
                                .user    = user,
                                .forward = is_forward(graph_.labels({user}))});
        }
      }
    }
    std::sort(tenancies_.begin(), tenancies_.end(), [](const Tenancy& a, const Tenancy& b) {
      return std::tie(a.first, a.owner) < std::tie(b.first, b.owner);
    });
  }

  // The memory that a buffer has now.
  [[nodiscard]] Buffer moved(Buffer buffer) const {
    if (const auto found = values_.find(buffer.id); found != values_.end()) return current_.at(found->second);
    if (const auto found = gradients_.find(buffer.id); found != gradients_.end()) {
      return written_[written_by_.at(found->second)].slot;
    }
    return buffer;
  }

  // Whether it is gathered only when the use before it has ended.
  [[nodiscard]] bool waits_for(const Tenancy& tenancy) const {
    return tenancy.forward ? !plan_.forward_prefetch : plan_.prefetch != Prefetch::backward_pre;
  }

  void gather(Graph& out, const Tenancy& tenancy) {
    const UnitValues& values = slots_.values[tenancy.owner];
    AccessList after;
    if (done_ != Buffer{} && waits_for(tenancy)) after.push_back(done_);
    current_[tenancy.owner] = tenancy.slot;
    const Labels labels     = graph_.labels({tenancy.user});
    const auto kept         = kept_.find(tenancy.owner);
    if (tenancy.forward || kept == kept_.end()) {
      values.gather(out, tenancy.slot, labels, after);
    } else {
      values.gather_kept(out, kept->second, tenancy.slot, labels, after);
    }
  }

  // Once a step, and only what is gathered again: a unit whose backward pass follows on its forward pass at once, or
  // reads no weights, would keep it for nobody.
  void keep(Graph& out, const Tenancy& tenancy, const Labels& labels) {
    const UnitValues& values = slots_.values[tenancy.owner];
    if (!values.keep || !tenancy.forward || !gathered_again_.contains(tenancy.owner) || kept_.contains(tenancy.owner))
      return;
    kept_.emplace(tenancy.owner, values.keep(out, tenancy.slot, labels));
  }

  const Graph& graph_;
  const SlotPlan& slots_;
  const ShardPlan& plan_;
  Rank rank_;
  std::map<std::uint32_t, std::uint32_t> values_, gradients_;                  // by buffer
  std::vector<Tenancy> tenancies_, written_;                                   // in their order
  std::map<int, std::vector<std::pair<std::uint32_t, std::uint32_t>>> marks_;  // by stage
  std::multimap<std::uint32_t, Tenancy*> begins_, ends_;
  std::map<std::uint32_t, Tenancy*> ends_written_;
  std::map<std::uint32_t, std::size_t> written_by_;  // by owner
  std::map<std::uint32_t, Buffer> current_;          // by owner, while nodes are emitted
  std::set<std::uint32_t> gathered_again_;           // owners, for a backward pass
  std::map<std::uint32_t, UnitShards> kept_;         // by owner
  Buffer done_;                                      // what the next gathering may have to wait for
};

}  // namespace

Graph with_slots(const Graph& graph, const SlotPlan& slots, const ShardPlan& plan) {
  if (slots.values.empty() && slots.gradients.empty() && !plan.keep_between_microbatches) return graph;
  std::map<Rank, RankSlots> ranks;
  const auto of = [&](Rank rank) -> RankSlots& {
    return ranks.try_emplace(rank, graph, slots, plan, rank).first->second;
  };
  for (std::uint32_t i = 0; i < slots.values.size(); ++i) {
    of(graph.spec(slots.values[i].whole).rank).own(i, slots.values[i]);
  }
  for (std::uint32_t i = 0; i < slots.gradients.size(); ++i) {
    of(graph.spec(slots.gradients[i].whole).rank).own(i, slots.gradients[i]);
  }
  Graph out = graph.only_rank() ? Graph(graph.num_ranks(), *graph.only_rank()) : Graph(graph.num_ranks());
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& spec = graph.spec(Buffer{i});
    static_cast<void>(spec.token ? out.token(spec.rank, spec.name) : out.buffer(spec));
  }
  for (std::uint32_t i = 0; i < graph.num_groups(); ++i) static_cast<void>(out.group(graph.spec(Group{i})));
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) of(graph.rank(Node{node})).see(node);
  for (auto& [rank, rank_slots] : ranks) rank_slots.assign(out);
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) of(graph.rank(Node{node})).emit(out, node);
  return out;
}

}  // namespace stepgraph
