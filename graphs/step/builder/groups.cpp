// The communicators of a step. A communicator is a queue, so communication that may overlap needs one each.
#include <array>
#include <map>
#include <set>

#include "engine/base/error.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/step/builder/setup.hpp"

namespace stepgraph {
namespace {

std::string name_of(const RankGroup& ranks, std::string_view purpose) { return str(ranks.name, " ", purpose); }

std::string transfer_name(int from_stage, int to_stage, const Coord& coord) {
  return str("pp_s", from_stage, "_s", to_stage, "_dp", coord.dp, "_tp", coord.tp);
}

std::string shared_name(int num_holders, const Coord& coord) {
  return str("tp_shared", num_holders, "_tp", coord.tp / num_holders * num_holders, "_dp", coord.dp, "_pp", coord.pp);
}

std::string tied_name(const WeightSpec& weight, const Coord& coord) {
  return str("tied_", weight.name, "_dp", coord.dp, "_tp", coord.tp);
}

std::string shard_name(const Plan& plan, const Coord& coord, std::string_view purpose) {
  return str("shard", shard_group(plan, coord.dp).replica, "_tp", coord.tp, "_pp", coord.pp, " ", purpose);
}
std::string replica_name(const Plan& plan, const Coord& coord) {
  return str("replicas", shard_group(plan, coord.dp).member, "_tp", coord.tp, "_pp", coord.pp);
}
std::string reshard_name(const Plan& plan, const Coord& coord) {
  return str("reshard", coord.dp / plan.shard.reshard_group, "_tp", coord.tp, "_pp", coord.pp);
}
std::string norm_name(const ShardGroup& sharers) { return str("norm", sharers.replica); }

// The numbers of ranks that hold the same piece of some weight, where more than one rank does.
std::set<int> shared_by(const Model& model, int tp) {
  std::set<int> numbers;
  for (const Block& block : model.blocks) {
    for (const WeightSpec& weight : block.weights) {
      if (!weight.cut) continue;
      for (const TpPiece& piece : tp_pieces(weight, tp, 0)) {
        if (piece.num_holders > 1) numbers.insert(piece.num_holders);
      }
    }
  }
  return numbers;
}

}  // namespace

void StepSetup::make_group(std::string name, RankList ranks) {
  if (step.graph.ranks().num_in(ranks) == 0) return;
  const Group group = step.graph.group({.name = name, .ranks = std::move(ranks)});
  groups_.emplace(std::move(name), group);
}

// Groups are made for the ranks that the step holds, in the order in which the whole step would make them. So a slice
// costs what it holds, and has the groups of the whole step.
void StepSetup::make_groups(bool trains) {
  const int dp = plan.layout.dp, tp = plan.layout.tp;
  const auto along = [&](Axes axes, std::string_view purpose) {
    std::map<Rank, RankGroup> by_first;
    for (const Rank rank : step.graph.ranks()) {
      RankGroup group = step.layout.group_of(rank, axes);
      by_first.emplace(group.ranks.front(), std::move(group));
    }
    for (const auto& [first, group] : by_first) make_group(name_of(group, purpose), group.ranks);
  };
  if (tp > 1) along(Axis::tp, "tp");
  if (dp > 1) along(Axis::dp, "loss");
  if (dp > 1 && trains) along(Axis::dp, "gradients");
  make_shard_groups(trains);
  if (sequence_parallel() && trains) along(Axis::tp, "shares");
  // The other groups connect ranks of one data-parallel replica.
  std::map<int, std::vector<Coord>> replicas;
  for (const StepRank& rank : step.ranks) replicas[rank.coord.dp].push_back(rank.coord);
  const std::set<int> shared = trains ? shared_by(step.model, tp) : std::set<int>();
  for (const auto& [replica, held] : replicas) make_replica_groups(replica, held, shared, trains);
}

void StepSetup::make_replica_groups(int replica, const std::vector<Coord>& held, const std::set<int>& shared,
                                    bool trains) {
  std::set<int> places;
  for (const Coord& coord : held) places.insert(coord.tp);
  for (const int t : places) {
    const Coord coord{.dp = replica, .tp = t};
    for (int s = 0; s + 1 < num_stages(); ++s) {
      const Rank here = rank_of(Stage{s}, coord), next = rank_of(Stage{s + 1}, coord);
      if (here == next || !(step.graph.holds(here) || step.graph.holds(next))) continue;
      make_group(transfer_name(s, s + 1, coord), {here, next});
      if (trains) make_group(transfer_name(s + 1, s, coord), {next, here});
    }
    if (!trains) continue;
    for (const Block& block : step.model.blocks) {
      for (const WeightSpec& weight : block.weights) {
        if (weight.tied_to.empty()) continue;
        const Rank owner = rank_of(stage_of_weight.at(weight.tied_to), coord);
        const Rank other = rank_of(stage_of_weight.at(weight.name), coord);
        if (owner != other) make_group(tied_name(weight, coord), {owner, other});
      }
    }
  }
  for (const int holders : shared) {
    std::set<std::pair<int, int>> firsts;  // pipeline rank, and the first tensor-parallel rank
    for (const Coord& coord : held) firsts.emplace(coord.pp, coord.tp / holders * holders);
    for (const auto& [p, first] : firsts) {
      const Coord coord{.dp = replica, .tp = first, .pp = p};
      make_group(shared_name(holders, coord),
                 RankList::mesh(step.layout.rank(coord), {{holders, step.layout.stride(Axis::tp)}}));
    }
  }
}

// Groups of neighbours along the data-parallel axis, for each place on the other axes.
void StepSetup::make_shard_groups(bool trains) {
  const Layout& layout = step.layout;
  const int dp = plan.layout.dp, tp = plan.layout.tp, pp = plan.layout.pp, size = stepgraph::shard_group(plan, 0).size;
  const auto ranks_of = [&](Coord coord, int first, int count, int stride) {
    coord.dp = first;
    return RankList::mesh(layout.rank(coord), {{count, stride * layout.stride(Axis::dp)}});
  };
  std::map<std::pair<int, int>, std::set<int>> held;  // dp indices, by pp and tp
  for (const StepRank& rank : step.ranks) held[{rank.coord.pp, rank.coord.tp}].insert(rank.coord.dp);
  const auto firsts = [](const std::set<int>& indices, int group) {
    std::set<int> found;
    for (const int each : indices) found.insert(each / group * group);
    return found;
  };
  for (const auto& [place, indices] : held) {
    if (size == 1) break;
    const auto& [p, t] = place;
    const Coord at{.tp = t, .pp = p};
    for (const int first : firsts(indices, size)) {
      const Coord coord{.dp = first, .tp = t, .pp = p};
      make_group(shard_name(plan, coord, "gather"), ranks_of(at, first, size, 1));
      if (trains) make_group(shard_name(plan, coord, "reduce"), ranks_of(at, first, size, 1));
    }
    if (!trains) continue;
    std::set<int> members;
    for (const int each : indices) members.insert(each % size);
    for (const int member : members) {
      if (size < dp)
        make_group(replica_name(plan, {.dp = member, .tp = t, .pp = p}), ranks_of(at, member, dp / size, size));
    }
    const int neighbours = plan.shard.reshard_group;
    if (neighbours == 0) continue;
    for (const int first : firsts(indices, neighbours))
      make_group(reshard_name(plan, {.dp = first, .tp = t, .pp = p}), ranks_of(at, first, neighbours, 1));
  }
  const int sharers = norm_sharers(0).size;
  if (!trains || sharers * tp * pp == 1) return;
  std::set<int> norms;
  for (const auto& [place, indices] : held) norms.merge(firsts(indices, sharers));
  for (const int first : norms) {
    std::array<RankList::Axis, 3> axes{};
    for (std::size_t i = 0; i < layout.order().size(); ++i) {
      const Axis axis = layout.order()[i];
      axes[i]         = {axis == Axis::dp ? sharers : layout.degree(axis), layout.stride(axis)};
    }
    make_group(norm_name(norm_sharers(first)), RankList::mesh(layout.rank({.dp = first}), {axes[0], axes[1], axes[2]}));
  }
}

Group StepSetup::shard_group(const Coord& coord, std::string_view purpose) const {
  return groups_.at(shard_name(plan, coord, purpose));
}
Group StepSetup::replica_group(const Coord& coord) const { return groups_.at(replica_name(plan, coord)); }
Group StepSetup::reshard_group(const Coord& coord) const { return groups_.at(reshard_name(plan, coord)); }
Group StepSetup::norm_group(const Coord& coord) const { return groups_.at(norm_name(norm_sharers(coord.dp))); }

// With sharding, each shard group sums its own norm. Else all data-parallel ranks share the work.
ShardGroup StepSetup::norm_sharers(int dp_index) const {
  const ShardGroup shards = stepgraph::shard_group(plan, dp_index);
  if (plan.shard.strategy != Shard::none || !options.share_norm) return shards;
  return {.size = plan.layout.dp, .member = dp_index, .replica = 0};
}

Group StepSetup::group(Rank rank, Axes axes, std::string_view purpose) const {
  return groups_.at(name_of(step.layout.group_of(rank, axes), purpose));
}
Group StepSetup::transfer_group(int from_stage, int to_stage, const Coord& coord) const {
  return groups_.at(transfer_name(from_stage, to_stage, coord));
}
Group StepSetup::shared_group(int num_holders, const Coord& coord) const {
  return groups_.at(shared_name(num_holders, coord));
}
Group StepSetup::tied_group(const WeightSpec& weight, const Coord& coord) const {
  return groups_.at(tied_name(weight, coord));
}

}  // namespace stepgraph
