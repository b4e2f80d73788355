#include "graphs/step/offload/choose.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"
#include "engine/graph/recompute.hpp"
#include "engine/run/storage.hpp"
#include "graphs/step/offload/bytes.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t most_piece_bytes = std::int64_t{8} << 20;
constexpr std::int64_t scalar_bytes     = Storage::block_bytes;  // of the copies of scalars that the host reads
// In the order in which they get host memory.
constexpr std::array by_benefit{OffloadClass::params, OffloadClass::grads, OffloadClass::activations,
                                OffloadClass::optimizer};

std::string with_text(std::int64_t bytes) { return str(bytes, " (", bytes_text(static_cast<double>(bytes)), ")"); }

// The bytes that a buffer takes in pinned memory.
std::int64_t pinned_bytes(std::int64_t size) {
  return offload::rounded_up(size,
                             size >= MemoryPlan::block_alignment ? MemoryPlan::block_alignment : MemoryPlan::alignment);
}

struct Candidate {
  std::string unit            = {};
  std::vector<Buffer> buffers = {};
  std::int64_t bytes          = 0;
};

// The units of one rank, in the order of the model or of the first use.
class RankUnits {
 public:
  RankUnits(const StepGraph& step, Rank rank) : step_(step), rank_(rank) {
    add_weights();
    add_other_gradients();
    add_activations();
    for (auto& list : classes_) {
      for (Candidate& unit : list) leave_small(unit);
    }
  }
  [[nodiscard]] const std::vector<Candidate>& of(OffloadClass of) const {
    return classes_[static_cast<std::size_t>(of)];
  }

 private:
  void add(OffloadClass of, const std::string& unit, Buffer buffer) {
    if (!seen_.insert(buffer.id).second) return;
    auto& list       = classes_[static_cast<std::size_t>(of)];
    const auto found = numbers_.try_emplace({of, unit}, list.size());
    if (found.second) list.push_back({.unit = unit});
    list[found.first->second].buffers.push_back(buffer);
  }

  void add_weights() {
    const auto& weights = step_.ranks.at(rank_).weights;
    std::map<std::uint32_t, std::set<std::size_t>> blocks_of;  // by buffer
    const auto for_each = [&](const auto& visit) {
      for (const StepWeight& weight : weights) {
        const std::pair<OffloadClass, const StoredRange*> all[] = {{OffloadClass::params, &weight.value},
                                                                   {OffloadClass::grads, &weight.gradient},
                                                                   {OffloadClass::optimizer, &weight.master},
                                                                   {OffloadClass::optimizer, &weight.first},
                                                                   {OffloadClass::optimizer, &weight.second}};
        for (const auto& [of, range] : all) {
          if (!range->empty()) visit(weight, of, range->buffer);
        }
      }
    };
    for_each([&](const StepWeight& weight, OffloadClass, Buffer buffer) {
      if (!weight.tied || weight.gradient.buffer == buffer) blocks_of[buffer.id].insert(weight.block);
    });
    for_each([&](const StepWeight& weight, OffloadClass of, Buffer buffer) {
      const auto& blocks = blocks_of[buffer.id];
      const bool shared  = of == OffloadClass::grads && blocks.size() > 1;
      const auto block   = blocks.empty() ? weight.block : *blocks.begin();
      add(of, shared ? step_.graph.spec(buffer).name : step_.model.blocks[block].name, buffer);
    });
  }

  // Whole gradients of shard units, and buckets that gradients are copied to.
  void add_other_gradients() {
    for (std::uint32_t i = 0; i < step_.graph.num_buffers(); ++i) {
      const BufferSpec& spec = step_.graph.spec(Buffer{i});
      if (spec.rank != rank_ || spec.token || spec.size_bytes == 0 || step_.role(Buffer{i}) != MemoryRole::gradients)
        continue;
      add(OffloadClass::grads, spec.name, Buffer{i});
    }
  }

  // Tensors of the forward pass that the backward pass reads.
  void add_activations() {
    const Graph& graph = step_.graph;
    std::map<std::uint32_t, Labels> made_by;  // by buffer
    for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
      if (graph.rank(Node{node}) != rank_) continue;
      const Labels labels = graph.labels(Node{node});
      const bool backward = labels.phase == "backward" || labels.phase == "weight" || labels.phase == recompute_phase;
      if (labels.phase != "forward" && !backward) continue;
      for (std::size_t i = 0; i < graph.num_accesses(Node{node}); ++i) {
        const Graph::AccessView access = graph.access(Node{node}, i);
        const BufferSpec& spec         = graph.spec(access.buffer);
        if (spec.token || spec.size_bytes == 0 || spec.lifetime != Lifetime::step || spec.space != Space::device ||
            step_.role(access.buffer) != MemoryRole::activations)
          continue;
        if (!backward) {
          if (writes(access.mode)) made_by.try_emplace(access.buffer.id, labels);
          continue;
        }
        const auto found = made_by.find(access.buffer.id);
        if (found == made_by.end()) continue;
        const Labels& at = found->second;
        add(OffloadClass::activations,
            str(at.layer >= 0 ? str("layer", at.layer) : str("stage", at.stage), " mb", at.microbatch), access.buffer);
      }
    }
  }

  void leave_small(Candidate& unit) const {
    const auto bytes_of = [&](Buffer buffer) { return step_.graph.spec(buffer).size_bytes; };
    std::int64_t most   = 0;
    for (const Buffer buffer : unit.buffers) most = std::max(most, bytes_of(buffer));
    std::erase_if(unit.buffers, [&](Buffer buffer) { return bytes_of(buffer) * 1024 < most; });
    for (const Buffer buffer : unit.buffers) unit.bytes += bytes_of(buffer);
  }

  const StepGraph& step_;
  Rank rank_;
  std::array<std::vector<Candidate>, 4> classes_;
  std::map<std::pair<OffloadClass, std::string>, std::size_t> numbers_;
  std::set<std::uint32_t> seen_;
};

// Chooses a share of units, spread evenly.
std::vector<bool> evenly_spread(std::size_t count, double share) {
  const auto wanted = static_cast<std::size_t>(
      std::clamp(std::ceil(share * static_cast<double>(count) - 1e-9), 0.0, static_cast<double>(count)));
  std::vector<bool> chosen(count);
  for (std::size_t i = 0; i < count; ++i) chosen[i] = (i + 1) * wanted / count > i * wanted / count;
  return chosen;
}

// The buffers of weights that are tied to a weight of another rank. The copies of both ranks must stay equal, but the
// ranks use them at different times, and a lossy kind of compression would round them at other points.
std::set<std::uint32_t> buffers_with_copies(const StepGraph& step, Rank rank) {
  std::map<std::string, const StepWeight*> here;
  for (const StepWeight& weight : step.ranks.at(rank).weights) here.emplace(step.spec(weight).name, &weight);
  std::set<std::uint32_t> found;
  for (const Block& block : step.model.blocks) {
    for (const WeightSpec& spec : block.weights) {
      if (spec.tied_to.empty() || here.contains(spec.name) == here.contains(spec.tied_to)) continue;
      const StepWeight& weight = *here.at(here.contains(spec.name) ? spec.name : spec.tied_to);
      for (const StoredRange* range :
           {&weight.value, &weight.gradient, &weight.master, &weight.first, &weight.second}) {
        if (!range->empty()) found.insert(range->buffer.id);
      }
    }
  }
  return found;
}

// The memory of one rank for its homes.
class RankChoice {
 public:
  RankChoice(const StepGraph& step, const Plan& plan, const OffloadAmounts& amounts,
             const std::optional<OffloadRates>& rates, Rank rank, HomePlan& made)
      : step_(step),
        plan_(plan.offload),
        amounts_(amounts),
        rates_(rates),
        rank_(rank),
        made_(made),
        units_(step, rank),
        exact_(buffers_with_copies(step, rank)) {}

  void choose() {
    for (const OffloadClass of : by_benefit) choose_units(of);
    if (plan_.host_bytes > 0) host_left_ = plan_.host_bytes - scalar_bytes;
    const bool may_use_disk = plan_.host_bytes > 0 && !plan_.disk.empty();
    const bool uses_ring    = may_use_disk || plan_.compress == Compression::lossless;
    if (uses_ring && plan_.host_bytes > 0) {
      host_left_ -= made_.num_pieces * made_.piece_bytes;
      if (host_left_ < 0) refuse_host(made_.num_pieces * Storage::block_bytes + scalar_bytes, "staging");
    }
    std::int64_t needed = scalar_bytes + (uses_ring ? made_.num_pieces * made_.piece_bytes : 0);
    for (const Chosen& unit : chosen_) needed += host_bytes_of(unit);
    if (plan_.host_bytes > 0 && !may_use_disk && needed > plan_.host_bytes) refuse_host(needed, "homes");
    std::int64_t disk_bytes = 0;
    for (const Chosen& unit : chosen_) {
      const bool fits = plan_.host_bytes == 0 || host_bytes_of(unit) <= host_left_;
      if (fits) host_left_ -= host_bytes_of(unit);
      for (const Buffer buffer : unit.of->buffers) {
        Home home{.buffer      = buffer,
                  .of          = unit.offload_class,
                  .unit        = unit.of->unit,
                  .space       = fits ? Space::pinned : Space::disk,
                  .compression = kind_of(buffer)};
        if (!fits) disk_bytes += offload::rounded_up(stored_bytes(buffer), Storage::block_bytes);
        pinned_[buffer.id] = fits;
        made_.homes.push_back(std::move(home));
      }
    }
    if (plan_.disk_bytes > 0 && disk_bytes > plan_.disk_bytes) {
      throw Error(ErrorKind::config,
                  str("offload.disk_bytes: rank ", rank_, " needs ", with_text(disk_bytes), " on disk, disk_bytes is ",
                      with_text(plan_.disk_bytes), " (disk_bytes ", disk_bytes, ", or a larger host_bytes)"));
    }
    choose_updates();
  }

 private:
  struct Chosen {
    OffloadClass offload_class;
    const Candidate* of;
  };

  [[nodiscard]] double share(OffloadClass of) const {
    switch (of) {
      case OffloadClass::params:
        return amounts_.params;
      case OffloadClass::grads:
        return amounts_.grads;
      case OffloadClass::optimizer:
        return amounts_.optimizer;
      case OffloadClass::activations:
        break;
    }
    return amounts_.activations;
  }

  void choose_units(OffloadClass of) {
    const std::vector<Candidate>& all = units_.of(of);
    const std::vector<bool> moves     = evenly_spread(all.size(), share(of));
    std::int64_t stays                = of == OffloadClass::params      ? plan_.device_param_bytes
                                        : of == OffloadClass::optimizer ? amounts_.resident_bytes
                                                                        : 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!moves[i]) continue;
      if (all[i].bytes <= stays) {
        stays -= all[i].bytes;
        continue;
      }
      if (of == OffloadClass::optimizer) stays = 0;  // without gaps: the next step needs the first units first
      chosen_.push_back({of, &all[i]});
    }
  }

  [[nodiscard]] Compression kind_of(Buffer buffer) const {
    const bool keeps_bits = exact_.contains(buffer.id) && is_lossy(plan_.compress, step_.graph.spec(buffer).type);
    return keeps_bits ? Compression::none : plan_.compress;
  }

  [[nodiscard]] std::int64_t stored_bytes(Buffer buffer) const {
    const BufferSpec& spec = step_.graph.spec(buffer);
    return stepgraph::stored_bytes(home_format(spec.type,
                                               spec.size_bytes / static_cast<std::int64_t>(size_bytes(spec.type)),
                                               Space::pinned, kind_of(buffer), made_.piece_bytes));
  }

  [[nodiscard]] std::int64_t host_bytes_of(const Chosen& unit) const {
    std::int64_t sum = 0;
    for (const Buffer buffer : unit.of->buffers) sum += pinned_bytes(stored_bytes(buffer));
    return sum;
  }

  [[noreturn]] void refuse_host(std::int64_t needed, std::string_view what) const {
    const std::string right =
        plan_.disk.empty() ? str("offload.disk, or host_bytes ", needed) : str("host_bytes ", needed, " or more");
    throw Error(ErrorKind::config,
                str("offload.host_bytes: rank ", rank_, " needs ", with_text(needed), " of host memory for ", what,
                    ", host_bytes is ", with_text(plan_.host_bytes), " (", right, ")"));
  }

  // The memory that an update on the host needs beside the homes: for gradients and values that are not in host memory.
  // None: it cannot run there.
  [[nodiscard]] std::optional<std::int64_t> staging_of(const Candidate& unit) const {
    constexpr std::int64_t padding       = 512;  // in a slot
    std::int64_t sum                     = 0;
    const std::set<std::uint32_t> states = [&] {
      std::set<std::uint32_t> ids;
      for (const Buffer buffer : unit.buffers) ids.insert(buffer.id);
      return ids;
    }();
    for (const Buffer buffer : unit.buffers) {
      if (!pinned_.at(buffer.id)) return std::nullopt;
      if (effective(kind_of(buffer), step_.graph.spec(buffer).type) != Compression::none)
        sum += plan_.slots * pinned_bytes(step_.graph.spec(buffer).size_bytes + padding);
    }
    for (const StepWeight& weight : step_.ranks.at(rank_).weights) {
      if (weight.first.empty() || !states.contains(weight.first.buffer.id)) continue;
      for (const StoredRange* range : {&weight.gradient, &weight.value}) {
        const auto home = pinned_.find(range->buffer.id);
        if (home != pinned_.end() && !home->second) return std::nullopt;  // on disk
        const DType type  = step_.graph.spec(range->buffer).type;
        const bool direct = home != pinned_.end() && effective(kind_of(range->buffer), type) == Compression::none;
        if (!direct) sum += pinned_bytes(weight.first.size() * static_cast<std::int64_t>(size_bytes(type)) + padding);
      }
    }
    return sum;
  }

  // Which units the host updates, so that link, host and device end together.
  [[nodiscard]] std::vector<bool> balanced(const std::vector<const Candidate*>& offloaded) const {
    std::vector<UpdateUnit> units;
    for (const Candidate* const unit : offloaded) {
      UpdateUnit& made = units.emplace_back(UpdateUnit{.name = unit->unit, .state_bytes = unit->bytes});
      const auto is_of = [&](const StoredRange& range) {
        return std::find(unit->buffers.begin(), unit->buffers.end(), range.buffer) != unit->buffers.end();
      };
      for (const StepWeight& weight : step_.ranks.at(rank_).weights) {
        if (weight.first.empty() || !is_of(weight.first)) continue;
        made.elements += weight.first.size();
        const auto bytes_of = [&](const StoredRange& range) {
          return weight.first.size() * static_cast<std::int64_t>(size_bytes(step_.graph.spec(range.buffer).type));
        };
        if (!pinned_.contains(weight.gradient.buffer.id)) made.gradient_bytes += bytes_of(weight.gradient);
        if (!pinned_.contains(weight.value.buffer.id)) made.value_bytes += bytes_of(weight.value);
      }
    }
    std::vector<bool> on_host;
    for (const UpdateMode mode : balance_updates(units, *rates_, 0).modes) on_host.push_back(mode == UpdateMode::host);
    return on_host;
  }

  void choose_updates() {
    std::vector<const Candidate*> offloaded;
    for (const Chosen& unit : chosen_) {
      if (unit.offload_class == OffloadClass::optimizer) offloaded.push_back(unit.of);
    }
    const std::vector<bool> on_host = rates_ ? balanced(offloaded) : evenly_spread(offloaded.size(), amounts_.host_updates);
    for (std::size_t i = 0; i < offloaded.size(); ++i) {
      UpdateMode mode = UpdateMode::streamed;
      if (const auto staging = on_host[i] ? staging_of(*offloaded[i]) : std::nullopt) {
        if (plan_.host_bytes == 0 || *staging <= host_left_) {
          host_left_ -= *staging;
          mode = UpdateMode::host;
        }
      }
      made_.updates.push_back({.rank = rank_, .unit = offloaded[i]->unit, .mode = mode});
    }
  }

  const StepGraph& step_;
  const OffloadPlan& plan_;
  const OffloadAmounts& amounts_;
  const std::optional<OffloadRates>& rates_;
  Rank rank_;
  HomePlan& made_;
  RankUnits units_;
  std::set<std::uint32_t> exact_;  // buffers that must keep their bits
  std::vector<Chosen> chosen_;
  std::map<std::uint32_t, bool> pinned_;  // by buffer with a home: in host memory, else on disk
  std::int64_t host_left_ = 0;
};

}  // namespace

OffloadAmounts manual_amounts(const OffloadPlan& plan) noexcept {
  if (plan.strategy != OffloadStrategy::manual) return {};
  return {.optimizer   = plan.optimizer ? 1.0 : 0.0,
          .grads       = plan.grads ? 1.0 : 0.0,
          .params      = plan.params ? 1.0 : 0.0,
          .activations = plan.activations ? 1.0 : 0.0};
}

HomePlan choose_homes(const StepGraph& step, const Plan& plan, const OffloadAmounts& amounts,
                      const std::map<Rank, OffloadAmounts>& amounts_of, const std::optional<OffloadRates>& rates) {
  HomePlan made{.slots = plan.offload.slots, .async = plan.offload.async, .piece_bytes = most_piece_bytes};
  if (plan.offload.host_bytes > 0) {  // the ring takes at most a quarter
    const std::int64_t piece =
        plan.offload.host_bytes / (4 * made.num_pieces) / Storage::block_bytes * Storage::block_bytes;
    made.piece_bytes = std::clamp(piece, Storage::block_bytes, most_piece_bytes);
  }
  for (const Rank rank : step.graph.ranks()) {
    const auto own = amounts_of.find(rank);
    RankChoice(step, plan, own == amounts_of.end() ? amounts : own->second, rates, rank, made).choose();
  }
  return made;
}

std::vector<OffloadedUnit> offloaded_units(const Graph& before, const HomePlan& homes) {
  std::map<std::pair<Rank, std::string>, UpdateMode> modes;
  for (const UnitUpdate& update : homes.updates) modes[{update.rank, update.unit}] = update.mode;
  std::vector<OffloadedUnit> units;
  std::map<std::tuple<Rank, OffloadClass, std::string>, std::size_t> numbers;
  for (const Home& home : homes.homes) {
    const BufferSpec& spec    = before.spec(home.buffer);
    const auto [unit, is_new] = numbers.try_emplace({spec.rank, home.of, home.unit}, units.size());
    if (is_new) {
      units.push_back(
          {.rank = spec.rank, .of = home.of, .unit = home.unit, .space = home.space, .compression = home.compression});
      if (home.of == OffloadClass::optimizer) {
        const auto mode     = modes.find({spec.rank, home.unit});
        units.back().update = mode == modes.end() ? UpdateMode::streamed : mode->second;
      }
    }
    OffloadedUnit& made = units[unit->second];
    made.bytes += spec.size_bytes;
    if (home.space == Space::disk) made.space = Space::disk;
  }
  return units;
}

OffloadTraffic& OffloadTraffic::operator+=(const OffloadTraffic& other) noexcept {
  h2d_bytes += other.h2d_bytes;
  d2h_bytes += other.d2h_bytes;
  disk_read_bytes += other.disk_read_bytes;
  disk_written_bytes += other.disk_written_bytes;
  return *this;
}

OffloadTraffic offload_traffic(const Graph& graph, Rank rank) {
  OffloadTraffic traffic;
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    if (graph.rank(Node{node}) != rank) continue;
    const std::string_view op = graph.op(Node{node});
    const bool is_disk        = op == "disk_read" || op == "disk_write";
    if (!is_disk && op != "h2d" && op != "d2h") continue;
    const std::int64_t bytes = graph.access(Node{node}, 0).region.num_bytes();
    (op == "h2d"         ? traffic.h2d_bytes
     : op == "d2h"       ? traffic.d2h_bytes
     : op == "disk_read" ? traffic.disk_read_bytes
                         : traffic.disk_written_bytes) += bytes;
  }
  return traffic;
}

}  // namespace stepgraph
