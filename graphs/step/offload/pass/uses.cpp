#include "graphs/step/offload/pass/uses.hpp"

#include <algorithm>
#include <map>

#include "graphs/step/step_graph.hpp"

namespace stepgraph::offload {
namespace {

constexpr std::size_t most_ranges = 8;  // of a buffer that are copied one by one

// Nodes of one unit are one use while no node of another unit of the class comes between them. Nodes of one microbatch
// and phase may also have one other unit between them, as where buckets and layers overlap. Activations may have three,
// and as many layers: the backward pass would wait for the copies of the last layers.
// Gradients that move once have one use for all microbatches.
// Updates are uses of their own: they may run without the rest of a step (updates_of).
class Finder {
 public:
  Finder(const Graph& graph, const NodeOrder& order, const HomeTable& table, const std::vector<bool>& on_host,
         int depth)
      : graph_(graph), order_(order), table_(table), on_host_(on_host), depth_(depth), states_(table.units.size()) {}

  std::vector<Use> find() {
    for (std::uint32_t place = 0; place < order_.nodes.size(); ++place) {
      count_layers(place);
      see(place);
    }
    finish();
    return std::move(uses_);
  }

 private:
  struct State {  // of a unit
    std::uint32_t use = none, place = none, turn = 0, layers = 0;
    int microbatch    = -1;
    std::string phase = {};
    // Of a staged unit: the last node that has written it in place.
    std::uint32_t written_at = none;
    bool written             = false;  // since the last use
  };
  struct Turns {  // of the units of a class
    std::uint32_t unit = none, count = 0;
  };

  // The layers of a rank in the order in which its nodes pass through them, each microbatch by itself.
  struct Layers {
    std::pair<int, int> at          = {-1, -1};  // layer and microbatch
    std::vector<std::uint32_t> ends = {};        // of each: the place of its last node on the compute lane
    [[nodiscard]] std::uint32_t count() const { return static_cast<std::uint32_t>(ends.size()); }
  };

  void count_layers(std::uint32_t place) {
    const Node node{order_.nodes[place]};
    const Labels labels = graph_.labels(node);
    if (labels.layer < 0 || labels.microbatch < 0) return;
    Layers& layers = layers_[graph_.rank(node)];
    const std::pair now(labels.layer, labels.microbatch);
    if (layers.at != now) layers.ends.push_back(none);
    layers.at       = now;
    const auto lane = graph_.lane(node);
    if (lane && lane->kind == LaneKind::compute && !graph_.has_part(node)) layers.ends.back() = place;
  }

  // The node after which a use that begins now may be filled.
  [[nodiscard]] std::uint32_t brake_of(const Layers& layers, std::uint32_t before) const {
    const std::int64_t at = std::int64_t{layers.count()} - 2 - depth_;
    if (at < 0) return none;
    const std::uint32_t place = layers.ends[static_cast<std::size_t>(at)];
    return place != none && place > before ? place : none;
  }

  void see(std::uint32_t place) {
    const std::uint32_t node = order_.nodes[place];
    const std::size_t count  = graph_.num_accesses(Node{node});
    for (const bool writing : {false, true}) {
      for (std::size_t i = 0; i < count; ++i) {
        const Graph::AccessView access = graph_.access(Node{node}, i);
        const std::uint32_t home       = table_.by_buffer[access.buffer.id];
        if (home == none || !(writing ? writes(access.mode) : reads(access.mode))) continue;
        const std::uint32_t unit = table_.homes[home].unit;
        State& state             = states_[unit];
        if (table_.units[unit].staged && !on_host_[node]) {
          if (writing) {
            state.written_at = place;
            state.written    = true;
          }
          continue;
        }
        if (state.place != place) join(unit, place);
        Use& use           = uses_[state.use];
        UsedBuffer* buffer = use.find(home);
        if (buffer == nullptr) {
          use.buffers.push_back({.home = home});
          buffer = &use.buffers.back();
        }
        buffer->accessed.add(access.region);
        if (writing) {
          buffer->written.add(access.region);
        } else {
          ByteSet read;
          read.add(access.region);
          buffer->read_first.add(read.without(buffer->written));
        }
      }
    }
  }

  // The unit's current use goes on, or a new one begins.
  void join(std::uint32_t unit, std::uint32_t place) {
    const std::uint32_t node = order_.nodes[place];
    const Labels labels      = graph_.labels(Node{order_.like[node]});
    State& state             = states_[unit];
    const Unit& of           = table_.units[unit];
    Turns& turns             = turns_[{of.rank, of.staged ? -1 : static_cast<int>(of.of)}];
    if (turns.unit != unit) turns = {unit, turns.count + 1};
    const bool same_phase = labels.microbatch == state.microbatch && labels.phase == state.phase;
    const bool same_run   = (labels.phase == update_phase) == (state.phase == update_phase);
    const bool is_kept    = of.of == OffloadClass::activations;
    const Layers& layers  = layers_[of.rank];
    const bool is_near    = turns.count <= state.turn + (is_kept      ? 4
                                                         : same_phase ? 2
                                                                      : 0) &&
                         (!is_kept || layers.count() <= state.layers + 4);
    const bool goes_on = state.use != none && same_run && uses_[state.use].on_host == on_host_[node] &&
                         (of.staged ? !state.written : is_near || of.once);
    if (!goes_on) {
      const std::uint32_t after = of.staged ? state.written_at : state.use == none ? none : uses_[state.use].last;
      uses_.push_back({.unit       = unit,
                       .on_host    = on_host_[node],
                       .first      = place,
                       .after      = after,
                       .not_before = is_kept && !of.staged && after != none ? brake_of(layers, after) : none,
                       .labels     = graph_.labels(Node{node})});
      state.use = static_cast<std::uint32_t>(uses_.size() - 1);
    }
    uses_[state.use].last = place;
    state.place           = place;
    state.turn            = turns.count;
    state.layers          = layers.count();
    state.microbatch      = labels.microbatch;
    state.phase           = labels.phase;
    state.written         = false;
  }

  void finish() {
    std::vector<std::vector<UsedBuffer*>> of_home(table_.homes.size());
    for (Use& use : uses_) {
      for (UsedBuffer& buffer : use.buffers) {
        const KnownHome& home = table_.homes[buffer.home];
        const Unit& unit      = table_.unit_of(home);
        const bool is_first   = of_home[buffer.home].empty();
        if (unit.of == OffloadClass::activations && is_first && !unit.staged) buffer.during = During::own;
        if (use.on_host && home.space == Space::pinned && home.compression == Compression::none)
          buffer.during = During::home;
        if (buffer.during != During::home) {
          choose_bytes(buffer, home, is_first && home.lifetime == Lifetime::step && !unit.staged);
        }
        of_home[buffer.home].push_back(&buffer);
      }
    }
    for (std::uint32_t i = 0; i < of_home.size(); ++i) {
      const KnownHome& home = table_.homes[i];
      bool is_read_later    = home.lifetime == Lifetime::persistent || table_.unit_of(home).staged;
      for (auto buffer = of_home[i].rbegin(); buffer != of_home[i].rend(); ++buffer) {
        if (!is_read_later) (*buffer)->back = (*buffer)->clear = {};
        is_read_later |=
            !(*buffer)->fill.empty() || ((*buffer)->during == During::home && !(*buffer)->read_first.empty());
      }
    }
    std::stable_sort(uses_.begin(), uses_.end(), [](const Use& a, const Use& b) { return a.first < b.first; });
  }

  // is_new: no bytes of the home were written before.
  static void choose_bytes(UsedBuffer& buffer, const KnownHome& home, bool is_new) {
    const ByteSet whole({0, home.bytes});
    buffer.back = buffer.written;
    if (home.is_whole()) {
      if (!buffer.written.empty()) buffer.back = whole;
    } else if (buffer.written.ranges().size() > most_ranges) {
      buffer.back = ByteSet(buffer.written.hull());
    }
    const ByteSet between = buffer.back.without(buffer.written);
    if (is_new) {
      buffer.clear = between;
      return;
    }
    buffer.fill = buffer.read_first;
    buffer.fill.add(between);
    if (buffer.fill.empty()) return;
    if (home.is_whole()) buffer.fill = whole;
    if (buffer.fill.ranges().size() > most_ranges) buffer.fill = ByteSet(buffer.fill.hull());
  }

  const Graph& graph_;
  const NodeOrder& order_;
  const HomeTable& table_;
  const std::vector<bool>& on_host_;
  int depth_;
  std::vector<State> states_;
  std::map<Rank, Layers> layers_;
  std::map<std::pair<Rank, int>, Turns> turns_;
  std::vector<Use> uses_;
};

}  // namespace

bool Use::needs_slot() const {
  return std::any_of(buffers.begin(), buffers.end(),
                     [](const UsedBuffer& buffer) { return buffer.during == During::slot; });
}

std::vector<Use> find_uses(const Graph& graph, const NodeOrder& order, const HomeTable& table,
                           const std::vector<bool>& on_host, int depth) {
  return Finder(graph, order, table, on_host, depth).find();
}

}  // namespace stepgraph::offload
