#include "graphs/step/shard/weight_slots.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/graph/without_nodes.hpp"
#include "graphs/step/shard_units.hpp"

namespace stepgraph {
namespace {

constexpr std::uint32_t none = ~std::uint32_t{0};

// Nodes `first` to `last`, in the order of the graph.
struct Span {
  std::uint32_t first = 0, last = 0;
  friend auto operator<=>(const Span&, const Span&) = default;
};

// The time for which the weights of a unit, or its gradients of one microbatch, have memory.
struct Tenancy {
  std::uint32_t unit = 0;  // index into SlotPlan::values or SlotPlan::gradients
  Span span          = {};
  std::uint32_t user = 0;  // the first node that reads; the span may begin at a mark before it
  bool forward       = false;
  Buffer slot        = {};
};

// When the nodes of one rank use whole weights and whole gradients. Nodes are seen in the order of the graph.
class UnitUses {
 public:
  UnitUses(const Graph& graph, const SlotPlan& slots) : graph_(graph), slots_(slots) {}

  void add_values(std::uint32_t unit) { values_.emplace(slots_.values[unit].whole.id, unit); }
  void add_gradients(std::uint32_t unit) { gradients_.emplace(slots_.gradients[unit].whole.id, unit); }
  // The unit whose whole weights or gradients the buffer stands for; or none.
  [[nodiscard]] std::uint32_t values_of(Buffer buffer) const { return find(values_, buffer); }
  [[nodiscard]] std::uint32_t gradients_of(Buffer buffer) const { return find(gradients_, buffer); }

  void see(std::uint32_t node) {
    const auto op = graph_.op(Node{node});
    if (op == unshard_mark) marks_[graph_.labels(Node{node}).stage].push_back({node, none});
    if (op == reshard_mark) marks_[graph_.labels(Node{node}).stage].back().last = node;
    std::uint32_t read = none, written = none;
    for (std::size_t i = 0; i < graph_.num_accesses(Node{node}); ++i) {
      const Buffer buffer = graph_.access(Node{node}, i).buffer;
      if (const std::uint32_t unit = values_of(buffer); unit != none) {
        if (read != none && read != unit) {
          throw Error(ErrorKind::config,
                      str("shard.units: ", graph_.describe(Node{node}), " reads weights of '", slots_.values[read].unit,
                          "' and of '", slots_.values[unit].unit, "' (weights of one unit)"));
        }
        read = unit;
      }
      if (const std::uint32_t unit = gradients_of(buffer); unit != none) written = unit;
    }
    if (read != none) reads_.push_back({node, read});
    if (written != none) written_.push_back({node, written});
  }

  // Weights are dropped after each use. Reads of one unit are one use while no other unit is read in between.
  [[nodiscard]] std::vector<Tenancy> each_use() const {
    std::vector<Tenancy> tenancies;
    for (const Use& read : reads_) {
      const bool goes_on = !tenancies.empty() && tenancies.back().unit == read.unit;
      if (!goes_on) tenancies.push_back(tenancy(read.unit, {read.node, read.node}));
      tenancies.back().span.last = read.node;
    }
    return tenancies;
  }

  // Weights stay from the forward pass of a microbatch to its backward pass. Microbatches that overlap are one tenancy.
  [[nodiscard]] std::vector<Tenancy> by_microbatch() const {
    std::map<std::pair<std::uint32_t, int>, Span> spans;  // by unit and microbatch
    for (const Use& read : reads_) {
      const int microbatch = graph_.labels(Node{read.node}).microbatch;
      spans.try_emplace({read.unit, microbatch}, Span{read.node, read.node}).first->second.last = read.node;
    }
    SpansOfUnits by_unit;
    for (const auto& [key, span] : spans) by_unit[key.first].push_back(span);
    return joined(std::move(by_unit));
  }

  // Weights of a stage stay from an unshard mark to the next reshard mark.
  [[nodiscard]] std::vector<Tenancy> by_mark() const {
    SpansOfUnits by_unit;
    for (const Use& read : reads_) {
      Span span{read.node, read.node};
      if (const auto marks = marks_.find(graph_.labels(Node{read.node}).stage); marks != marks_.end()) {
        for (const Span& mark : marks->second) {
          if (mark.first <= read.node && read.node <= mark.last) span.first = mark.first;
        }
      }
      by_unit[read.unit].push_back(span);
    }
    return joined(std::move(by_unit));
  }

  // From the first write of a unit's gradients to the last.
  [[nodiscard]] std::vector<Tenancy> of_gradients() const {
    std::vector<Tenancy> tenancies;
    std::map<std::uint32_t, std::size_t> places;  // by unit
    for (const Use& write : written_) {
      const auto [place, first] = places.try_emplace(write.unit, tenancies.size());
      if (first) tenancies.push_back({.unit = write.unit, .span = {write.node, write.node}});
      tenancies[place->second].span.last = write.node;
    }
    return tenancies;
  }

 private:
  struct Use {
    std::uint32_t node, unit;
  };
  using UnitOfBuffer = std::map<std::uint32_t, std::uint32_t>;
  using SpansOfUnits = std::map<std::uint32_t, std::vector<Span>>;

  [[nodiscard]] static std::uint32_t find(const UnitOfBuffer& units, Buffer buffer) {
    const auto found = units.find(buffer.id);
    return found == units.end() ? none : found->second;
  }

  [[nodiscard]] Tenancy tenancy(std::uint32_t unit, const Span& span) const {
    const std::uint32_t user = graph_.op(Node{span.first}) == unshard_mark ? span.last : span.first;
    return {.unit = unit, .span = span, .user = user, .forward = graph_.labels(Node{user}).phase == "forward"};
  }

  // Spans of one unit that overlap become one tenancy.
  [[nodiscard]] std::vector<Tenancy> joined(SpansOfUnits by_unit) const {
    std::vector<Tenancy> tenancies;
    for (auto& [unit, spans] : by_unit) {
      std::sort(spans.begin(), spans.end());
      const std::size_t first_of_unit = tenancies.size();
      for (const Span& span : spans) {
        const bool overlaps = tenancies.size() > first_of_unit && span.first <= tenancies.back().span.last;
        if (!overlaps) tenancies.push_back(tenancy(unit, span));
        tenancies.back().span.last = std::max(tenancies.back().span.last, span.last);
      }
    }
    std::sort(tenancies.begin(), tenancies.end(), [](const Tenancy& a, const Tenancy& b) {
      return std::tie(a.span.first, a.unit) < std::tie(b.span.first, b.unit);
    });
    return tenancies;
  }

  const Graph& graph_;
  const SlotPlan& slots_;
  UnitOfBuffer values_, gradients_;
  std::vector<Use> reads_, written_;        // in the order of nodes
  std::map<int, std::vector<Span>> marks_;  // by stage
};

// Each tenancy takes the next slot, the first slot again after the last. A slot is as large as its largest tenant. The
// tenants of one slot must follow one another.
template <class Units>
void share_slots(Graph& out, Rank rank, std::vector<Tenancy>& tenancies, int num_slots, const Units& units,
                 std::string_view name) {
  const auto count = std::min(static_cast<std::size_t>(num_slots), tenancies.size());
  for (std::size_t s = 0; s < count; ++s) {
    std::int64_t size = 0;
    for (std::size_t i = s; i < tenancies.size(); i += count)
      size = std::max(size, units[tenancies[i].unit].size_bytes);
    const Buffer slot =
        out.buffer({.name = str(name, s), .rank = rank, .size_bytes = size, .type = units[tenancies[s].unit].type});
    for (std::size_t i = s; i < tenancies.size(); i += count) {
      tenancies[i].slot = slot;
      if (i < count || tenancies[i - count].span.last < tenancies[i].span.first) continue;
      throw Error(ErrorKind::config,
                  str("shard: '", units[tenancies[i].unit].unit, "' and '", units[tenancies[i - count].unit].unit,
                      "' are in use at the same time and would share ", name, s,
                      " (units whose blocks run one after another)"));
    }
  }
}

// Gives the tenants of one rank their slots, and writes the rank's nodes into the new graph.
class RankSlots {
 public:
  RankSlots(const Graph& graph, const SlotPlan& slots, const ShardPlan& plan, Rank rank)
      : graph_(graph), slots_(slots), plan_(plan), rank_(rank), uses_(graph, slots) {}

  [[nodiscard]] UnitUses& uses() { return uses_; }

  // To be called when all nodes of the rank were seen.
  void assign(Graph& out) {
    values_    = !plan_.reshard_after_forward      ? uses_.by_microbatch()
                 : plan_.keep_between_microbatches ? uses_.by_mark()
                                                   : uses_.each_use();
    gradients_ = uses_.of_gradients();
    if (!keeps_gathered(plan_)) share_slots(out, rank_, values_, plan_.slots, slots_.values, "weight slot ");
    share_slots(out, rank_, gradients_, plan_.grad_slots, slots_.gradients, "gradient slot ");
    for (Tenancy& tenancy : values_) {
      if (keeps_gathered(plan_)) tenancy.slot = own_slot(out, slots_.values[tenancy.unit]);
      if (!tenancy.forward) gathered_again_.insert(tenancy.unit);
      begins_.emplace(tenancy.span.first, &tenancy);
      ends_.emplace(tenancy.span.last, &tenancy);
    }
    for (const Tenancy& tenancy : gradients_) {
      gradient_ends_.emplace(tenancy.span.last, &tenancy);
      gradient_slots_.emplace(tenancy.unit, tenancy.slot);
    }
  }

  // Adds the node with its slots, after the nodes that fill them and before the nodes that empty them.
  void emit(Graph& out, std::uint32_t node) {
    const auto [first, last] = begins_.equal_range(node);
    for (auto at = first; at != last; ++at) gather(out, *at->second);
    if (graph_.op(Node{node}) == unshard_mark || graph_.op(Node{node}) == reshard_mark) return;
    NodeSpec spec     = with_slots_of(node);
    const auto ending = ends_.find(node);
    if (ending != ends_.end() && (!plan_.forward_prefetch || plan_.prefetch != Prefetch::backward_pre)) {
      done_ = out.token(rank_, str("used ", slots_.values[ending->second->unit].unit));
      spec.writes.push_back(done_);
    }
    out.add(spec, graph_.body(Node{node}));
    if (ending != ends_.end()) keep(out, *ending->second, spec.labels);
    if (const auto reduced = gradient_ends_.find(node); reduced != gradient_ends_.end()) reduce(out, *reduced->second);
  }

 private:
  Buffer own_slot(Graph& out, const UnitValues& values) const {
    return out.buffer(
        {.name = str("gathered ", values.unit), .rank = rank_, .size_bytes = values.size_bytes, .type = values.type});
  }

  // The node with accesses to slots in place of accesses to whole weights and gradients.
  [[nodiscard]] NodeSpec with_slots_of(std::uint32_t node) const {
    NodeSpec spec = graph_.spec(Node{node});
    if (spec.part) spec.part->issue = -1;  // the new graph issues parts in the order of nodes
    spec.reads = spec.writes = spec.accumulates = {};
    for (std::size_t i = 0; i < graph_.num_accesses(Node{node}); ++i) {
      const Graph::AccessView view = graph_.access(Node{node}, i);
      AccessList& list             = view.mode == AccessMode::read    ? spec.reads
                                     : view.mode == AccessMode::write ? spec.writes
                                                                      : spec.accumulates;
      list.push_back({slot_of(view.buffer), view.region});
    }
    return spec;
  }

  // The slot that holds the buffer at this node; other buffers are their own.
  [[nodiscard]] Buffer slot_of(Buffer buffer) const {
    if (const std::uint32_t unit = uses_.values_of(buffer); unit != none) return value_slots_.at(unit);
    if (const std::uint32_t unit = uses_.gradients_of(buffer); unit != none) return gradient_slots_.at(unit);
    return buffer;
  }

  // Without prefetch a unit is gathered when the use before it has ended.
  [[nodiscard]] bool waits_for_use(const Tenancy& tenancy) const {
    return tenancy.forward ? !plan_.forward_prefetch : plan_.prefetch != Prefetch::backward_pre;
  }

  void gather(Graph& out, const Tenancy& tenancy) {
    const UnitValues& values = slots_.values[tenancy.unit];
    AccessList after;
    if (done_ != Buffer{} && waits_for_use(tenancy)) after.push_back(done_);
    value_slots_[tenancy.unit] = tenancy.slot;
    const Labels labels        = graph_.labels(Node{tenancy.user});
    const auto kept            = kept_.find(tenancy.unit);
    if (tenancy.forward || kept == kept_.end()) {
      values.gather(out, tenancy.slot, labels, after);
    } else {
      values.gather_kept(out, kept->second, tenancy.slot, labels, after);
    }
  }

  // Once a step, and only a unit that is gathered again for its backward pass.
  void keep(Graph& out, const Tenancy& tenancy, const Labels& labels) {
    const UnitValues& values = slots_.values[tenancy.unit];
    if (!values.keep || !tenancy.forward || !gathered_again_.contains(tenancy.unit) || kept_.contains(tenancy.unit))
      return;
    kept_.emplace(tenancy.unit, values.keep(out, tenancy.slot, labels));
  }

  void reduce(Graph& out, const Tenancy& tenancy) {
    AccessList done;
    if (plan_.prefetch == Prefetch::none) {
      done_ = out.token(rank_, str("reduced ", slots_.gradients[tenancy.unit].unit));
      done.push_back(done_);
    }
    slots_.gradients[tenancy.unit].reduce(out, tenancy.slot, done);
  }

  const Graph& graph_;
  const SlotPlan& slots_;
  const ShardPlan& plan_;
  Rank rank_;
  UnitUses uses_;
  std::vector<Tenancy> values_, gradients_;
  std::multimap<std::uint32_t, const Tenancy*> begins_, ends_;    // of values_, by node
  std::map<std::uint32_t, const Tenancy*> gradient_ends_;         // of gradients_, by node
  std::map<std::uint32_t, Buffer> value_slots_, gradient_slots_;  // by unit; of values: while nodes are emitted
  std::set<std::uint32_t> gathered_again_;                        // units that are gathered for a backward pass
  std::map<std::uint32_t, UnitShards> kept_;                      // by unit
  Buffer done_;  // the token that the next gathering waits for, where it waits
};

// Nodes in the order of the graph, but each reduction directly after the last node before it that uses one of its
// buffers. Parts are issued in this order. Reductions that came after the whole backward pass would wait for the last
// gathering, which waits for a slot. Sums over stages, which have no stage, keep their place: the stages are not at the
// same point of their backward passes. So do all where gradients are reduced after each microbatch: with_slots adds
// those reductions at their place.
std::vector<std::uint32_t> with_early_reductions(const Graph& graph, const SlotPlan& slots) {
  std::vector<std::uint32_t> order(graph.num_nodes()), place(graph.num_nodes());
  std::vector<std::uint32_t> last_use(graph.num_buffers(), 0);  // by buffer: the place of the node
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    order[node] = place[node] = node;
    const std::size_t count   = graph.num_accesses(Node{node});
    const Labels labels       = graph.labels(Node{node});
    if (slots.gradients.empty() && labels.phase == "reduce" && labels.stage >= 0) {
      place[node] = 0;
      for (std::size_t i = 0; i < count; ++i)
        place[node] = std::max(place[node], last_use[graph.access(Node{node}, i).buffer.id]);
    }
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t& last = last_use[graph.access(Node{node}, i).buffer.id];
      last                = std::max(last, place[node]);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return place[a] < place[b]; });
  return order;
}

}  // namespace

Graph with_slots(const Graph& graph, const SlotPlan& slots, const ShardPlan& plan) {
  if (slots.values.empty() && slots.gradients.empty() && !plan.keep_between_microbatches) return graph;
  std::map<Rank, RankSlots> ranks;
  const auto of = [&](Rank rank) -> RankSlots& {
    return ranks.try_emplace(rank, graph, slots, plan, rank).first->second;
  };
  for (std::uint32_t i = 0; i < slots.values.size(); ++i) {
    of(graph.spec(slots.values[i].whole).rank).uses().add_values(i);
  }
  for (std::uint32_t i = 0; i < slots.gradients.size(); ++i) {
    of(graph.spec(slots.gradients[i].whole).rank).uses().add_gradients(i);
  }
  Graph out = without_nodes(graph);
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) of(graph.rank(Node{node})).uses().see(node);
  for (auto& [rank, rank_slots] : ranks) rank_slots.assign(out);
  for (const std::uint32_t node : with_early_reductions(graph, slots)) of(graph.rank(Node{node})).emit(out, node);
  return out;
}

}  // namespace stepgraph
