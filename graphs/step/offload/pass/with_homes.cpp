#include <algorithm>
#include <array>
#include <deque>
#include <map>

#include "engine/base/error.hpp"
#include "graphs/step/offload/homes.hpp"
#include "graphs/step/offload/pass/early_updates.hpp"
#include "graphs/step/offload/pass/host_updates.hpp"
#include "graphs/step/offload/pass/transfers.hpp"

namespace stepgraph {

namespace offload {
namespace {

// Writes the nodes of the new graph.
class Emitter {
 public:
  Emitter(const Graph& graph, const HomePlan& plan, HomeTable table, NodeOrder order, std::vector<bool> on_host)
      : graph_(graph),
        plan_(plan),
        table_(std::move(table)),
        order_(std::move(order)),
        on_host_(std::move(on_host)),
        out_(graph.num_ranks(), graph.ranks()) {}

  WithHomes emit() {
    copy_buffers();
    uses_  = find_uses(graph_, order_, table_, on_host_, plan_.slots);
    slots_ = assign_slots(out_, table_, uses_, plan_);
    add_brakes();
    schedule();
    if (plan_.async) find_first_mirrors();
    for (std::uint32_t place = 0; place < order_.nodes.size(); ++place) emit(place);
    for (std::uint32_t buffer = 0; buffer < graph_.num_buffers(); ++buffer) write_pending(Buffer{buffer});
    WithHomes made{.graph = std::move(out_)};
    for (std::size_t i = 0; i < plan_.homes.size(); ++i) {
      made.homes.push_back(table_.homes[i]);
    }
    return made;
  }

 private:
  void copy_buffers() {
    for (std::uint32_t i = 0; i < graph_.num_buffers(); ++i) {
      const BufferSpec& spec = graph_.spec(Buffer{i});
      const std::uint32_t at = table_.by_buffer[i];
      const bool moves       = at != none && !table_.unit_of(table_.homes[at]).staged &&
                         table_.unit_of(table_.homes[at]).of != OffloadClass::activations;
      if (spec.token) {
        static_cast<void>(out_.token(spec.rank, spec.name));
      } else {
        static_cast<void>(out_.buffer(moves ? spec_of(table_.homes[at]) : spec));
      }
    }
    for (std::uint32_t i = 0; i < graph_.num_groups(); ++i) static_cast<void>(out_.group(graph_.spec(Group{i})));
    for (KnownHome& home : table_.homes) {
      const Unit& unit = table_.unit_of(home);
      if (unit.of == OffloadClass::activations && !unit.staged) home.home = out_.buffer(spec_of(home));
    }
  }

  [[nodiscard]] BufferSpec spec_of(const KnownHome& home) const {
    BufferSpec spec = graph_.spec(home.buffer);
    spec.space      = home.space;
    spec.size_bytes = stored_bytes(home);
    if (home.compression != Compression::none) spec.type = DType::u8;
    return spec;
  }

  // A slot that is free from the beginning would be filled as soon as the home is written, and would save nothing.
  // Later tenants of a slot wait for those before them.
  void add_brakes() {
    brakes_.assign(uses_.size(), Buffer{});
    std::vector<bool> taken(slots_.size(), false);
    for (std::uint32_t i = 0; i < uses_.size(); ++i) {
      Use& use = uses_[i];
      if (use.slot == none || !plan_.async || taken[use.slot]) use.not_before = none;
      if (use.slot != none) taken[use.slot] = true;
      if (use.not_before == none) continue;
      const Unit& unit = table_.units[use.unit];
      brakes_[i]       = out_.token(unit.rank, str("time to fill ", unit.name));
      braked_[use.not_before].push_back(i);
    }
  }

  // What is emitted at which place.
  void schedule() {
    const std::vector<std::uint32_t> places = fill_places(table_, uses_, plan_.slots);
    uses_of_unit_.resize(table_.units.size());
    std::map<Rank, std::vector<std::uint32_t>> copied_out;  // uses of activations
    for (std::uint32_t i = 0; i < uses_.size(); ++i) {
      const Use& use = uses_[i];
      uses_of_unit_[use.unit].push_back(i);
      begins_[use.first].push_back(i);
      ends_[use.last].push_back(i);
      const Rank rank = table_.units[use.unit].rank;
      if (!plan_.async) {
        fills_before_[use.first].push_back(i);
      } else if (places[i] == none) {
        first_fills_[rank].push_back(i);
      } else {
        fills_after_[places[i]].push_back(i);
      }
      const bool leaves = std::any_of(use.buffers.begin(), use.buffers.end(), [](const UsedBuffer& buffer) {
        return buffer.during == During::own && !buffer.back.empty();
      });
      if (leaves) copied_out[rank].push_back(i);
    }
    // The activations of only a few units wait for their copies at once.
    for (const auto& [rank, leaving] : copied_out) {
      const auto depth = static_cast<std::size_t>(plan_.slots);
      for (std::size_t i = depth; i < leaving.size(); ++i) {
        const Use& before = uses_[leaving[i - depth]];
        if (before.last < uses_[leaving[i]].first) waits_for_[uses_[leaving[i]].first].push_back(leaving[i - depth]);
      }
    }
    waited_for_.assign(uses_.size(), Buffer{});
    for (const auto& [place, all] : waits_for_) {
      for (const std::uint32_t use : all) {
        if (waited_for_[use] == Buffer{})
          waited_for_[use] =
              out_.token(table_.units[uses_[use].unit].rank, str("copied out ", table_.units[uses_[use].unit].name));
      }
    }
  }

  // Scalars that nodes on the host read and that no node writes before are copied first of all.
  void find_first_mirrors() {
    std::vector<bool> seen(graph_.num_buffers(), false);
    for (const std::uint32_t node : order_.nodes) {
      for (std::size_t i = 0; i < graph_.num_accesses(Node{node}); ++i) {
        const Graph::AccessView view = graph_.access(Node{node}, i);
        const BufferSpec& spec       = graph_.spec(view.buffer);
        if (seen[view.buffer.id] || table_.by_buffer[view.buffer.id] != none || spec.token) continue;
        if (!writes(view.mode) && !on_host_[node]) continue;
        seen[view.buffer.id] = true;
        if (!writes(view.mode) && spec.space == Space::device)
          first_mirrors_[spec.rank].emplace_back(view.buffer, graph_.labels(Node{node}));
      }
    }
  }

  void emit(std::uint32_t place) {
    const std::uint32_t node = order_.nodes[place];
    const Rank rank          = graph_.rank(Node{node});
    if (const auto found = first_mirrors_.find(rank); found != first_mirrors_.end()) {
      for (const auto& [buffer, labels] : found->second) mirrors_.emplace(buffer.id, transfers_.mirror(buffer, labels));
      first_mirrors_.erase(found);
    }
    if (const auto found = first_fills_.find(rank); found != first_fills_.end()) {
      for (const std::uint32_t use : found->second) fill(use);
      first_fills_.erase(found);
    }
    for (const std::uint32_t use : at(fills_before_, place)) fill(use);
    for (const std::uint32_t use : at(begins_, place)) {
      for (const UsedBuffer& buffer : uses_[use].buffers) transfers_.finish_fill(uses_[use], buffer);
    }
    NodeSpec spec = rewritten(place);
    for (const std::uint32_t use : at(waits_for_, place)) spec.reads.push_back(waited_for_[use]);
    for (const std::uint32_t use : at(braked_, place)) spec.writes.push_back(brakes_[use]);
    out_.add(spec, graph_.body(Node{node}));
    for (const std::uint32_t use : at(ends_, place)) write_back(use);
    for (const std::uint32_t use : at(fills_after_, place)) fill(use);
  }

  void fill(std::uint32_t number) {
    const Use& use = uses_[number];
    AccessList after;
    if (brakes_[number] != Buffer{}) after.push_back(brakes_[number]);
    for (const UsedBuffer& buffer : use.buffers) {
      if (buffer.fill.empty()) continue;
      write_pending(table_.homes[buffer.home].buffer);
      transfers_.fill(use, buffer, after);
    }
  }

  // The results of nodes on the host go to the device as late as possible: the lane that copies them is a queue, and
  // copies behind them would have to wait for the host.
  void write_back(std::uint32_t number) {
    const Use& use = uses_[number];
    AccessList done;
    if (waited_for_[number] != Buffer{}) done.push_back(waited_for_[number]);
    const UsedBuffer* last = nullptr;
    for (const UsedBuffer& buffer : use.buffers) {
      if (!buffer.back.empty()) last = &buffer;
    }
    for (const UsedBuffer& buffer : use.buffers) {
      if (buffer.back.empty()) continue;
      if (table_.units[use.unit].staged) {
        pending_.emplace(table_.homes[buffer.home].buffer.id, std::pair(&use, &buffer));
        if (plan_.early_updates) write_earlier(use, table_.homes[buffer.home].buffer);
      } else {
        transfers_.back(use, buffer, &buffer == last ? done : AccessList());
      }
    }
  }

  // No node of the step uses what an early update writes. It is copied to the device when the host has started on some
  // layers more.
  void write_earlier(const Use& use, Buffer buffer) {
    auto& layers = written_[table_.units[use.unit].rank];
    const std::pair layer(use.labels.stage, use.labels.layer);
    if (layers.empty() || layers.back().first != layer) layers.push_back({layer, {}});
    layers.back().second.push_back(buffer);
    if (layers.size() <= static_cast<std::size_t>(plan_.slots)) return;
    for (const Buffer each : layers.front().second) write_pending(each);
    layers.pop_front();
  }

  void write_pending(Buffer buffer) {
    const auto found = pending_.find(buffer.id);
    if (found == pending_.end()) return;
    const auto [use, used] = found->second;
    pending_.erase(found);
    transfers_.back(*use, *used);
  }

  // The use of a unit that a place belongs to.
  [[nodiscard]] const Use& use_at(std::uint32_t unit, std::uint32_t place) const {
    const auto& all = uses_of_unit_[unit];
    auto found      = std::upper_bound(all.begin(), all.end(), place,
                                       [&](std::uint32_t at, std::uint32_t use) { return at < uses_[use].first; });
    return uses_[*--found];
  }

  [[nodiscard]] Access moved(std::uint32_t place, const Graph::AccessView& view, bool on_host) {
    const Access direct(view.buffer, view.region);
    const std::uint32_t at = table_.by_buffer[view.buffer.id];
    if (at == none) {
      const BufferSpec& spec = graph_.spec(view.buffer);
      if (!on_host || spec.token || spec.space != Space::device) return direct;
      const auto [mirror, is_new] = mirrors_.try_emplace(view.buffer.id);
      if (is_new) mirror->second = transfers_.mirror(view.buffer, graph_.labels(Node{order_.nodes[place]}));
      return {mirror->second, view.region};
    }
    const KnownHome& home = table_.homes[at];
    if (table_.unit_of(home).staged && !on_host) {
      write_pending(view.buffer);
      return direct;
    }
    const Use& use = use_at(home.unit, place);
    for (const UsedBuffer& buffer : use.buffers) {
      if (buffer.home == at) return transfers_.at(use, buffer, view.region);
    }
    throw Error(ErrorKind::graph, str("offload: ", graph_.describe(view.buffer), " has no use at ",
                                      graph_.describe(Node{order_.nodes[place]})));
  }

  // The node with accesses to slots in place of accesses to offloaded buffers.
  [[nodiscard]] NodeSpec rewritten(std::uint32_t place) {
    const Node node{order_.nodes[place]};
    NodeSpec spec = graph_.spec(node);
    if (spec.part) spec.part->issue = -1;  // the new graph issues parts in the order of nodes
    spec.reads = spec.writes = spec.accumulates = {};
    const bool on_host                          = on_host_[node.id];
    if (on_host) run_on_host(graph_.rank(node), spec);
    for (std::size_t i = 0; i < graph_.num_accesses(node); ++i) {
      const Graph::AccessView view = graph_.access(node, i);
      AccessList& list             = view.mode == AccessMode::read    ? spec.reads
                                     : view.mode == AccessMode::write ? spec.writes
                                                                      : spec.accumulates;
      list.push_back(moved(place, view, on_host));
      if (writes(view.mode) && !on_host) mirrors_.erase(view.buffer.id);
    }
    return spec;
  }

  using AtPlace = std::map<std::uint32_t, std::vector<std::uint32_t>>;  // uses
  [[nodiscard]] static const std::vector<std::uint32_t>& at(const AtPlace& all, std::uint32_t place) {
    static const std::vector<std::uint32_t> nothing;
    const auto found = all.find(place);
    return found == all.end() ? nothing : found->second;
  }

  const Graph& graph_;
  const HomePlan& plan_;
  HomeTable table_;
  NodeOrder order_;
  std::vector<bool> on_host_;
  Graph out_;
  std::vector<Use> uses_;
  std::vector<Buffer> slots_;
  Transfers transfers_{out_, table_, plan_, slots_};
  std::vector<std::vector<std::uint32_t>> uses_of_unit_;
  AtPlace begins_, ends_, fills_before_, fills_after_, waits_for_, braked_;
  std::map<Rank, std::vector<std::uint32_t>> first_fills_;
  std::map<Rank, std::vector<std::pair<Buffer, Labels>>> first_mirrors_;
  std::vector<Buffer> waited_for_;           // by use: the token that its copies write, or none
  std::vector<Buffer> brakes_;               // by use: the token that its fills read, or none
  std::map<std::uint32_t, Buffer> mirrors_;  // by buffer, until it is written
  std::map<std::uint32_t, std::pair<const Use*, const UsedBuffer*>> pending_;  // copies to the device, by buffer
  // Of early updates: the buffers of the last layers that have such copies.
  std::map<Rank, std::deque<std::pair<std::pair<int, int>, std::vector<Buffer>>>> written_;
};

}  // namespace
}  // namespace offload

WithHomes with_homes(const Graph& graph, const HomePlan& plan) {
  using namespace offload;
  if (plan.homes.empty()) return {.graph = graph};
  if (plan.slots < 1) throw Error(ErrorKind::config, str("offload.slots: ", plan.slots, " (at least 1)"));
  HomeTable table                 = table_of(graph, plan);
  const std::vector<bool> on_host = host_nodes(graph, table, plan);
  add_staged(graph, on_host, table);
  std::vector<bool> gradients(graph.num_buffers(), false);
  for (const Home& home : plan.homes) gradients[home.buffer.id] = home.of == OffloadClass::grads;
  NodeOrder order =
      plan.early_updates ? with_early_updates(graph, gradients, on_host) : with_early_norms(graph, gradients);
  return Emitter(graph, plan, std::move(table), std::move(order), on_host).emit();
}

}  // namespace stepgraph
