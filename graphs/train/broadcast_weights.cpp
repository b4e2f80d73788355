#include "graphs/train/broadcast_weights.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/packed.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/step/offload/homes.hpp"
#include "ops/transfers/collectives.hpp"
#include "ops/transfers/hash.hpp"
#include "ops/transfers/reduce.hpp"

namespace stepgraph {
namespace {

// The buffers of a rank's weights and optimizer state: of whole tensors, which all data-parallel ranks have; or of
// shards, which the ranks at the same place in other shard groups have. A buffer that two weights share is listed once.
std::vector<Buffer> held(const StepRank& rank, bool shards) {
  std::vector<Buffer> found;
  for (const StepWeight& weight : rank.weights) {
    for (const StoredRange& part : {weight.value, weight.master, weight.first, weight.second}) {
      if (part.sharded != shards || part.empty() || std::find(found.begin(), found.end(), part.buffer) != found.end())
        continue;
      found.push_back(part.buffer);
    }
  }
  return found;
}

template <class Map>
std::vector<RankGroup> values_of(const Map& groups) {
  std::vector<RankGroup> values;
  for (const auto& [key, group] : groups) values.push_back(group);
  return values;
}

// Groups of ranks with the same place in their shard groups: they have the same shards.
std::vector<RankGroup> replica_groups(const StepGraph& step) {
  std::map<std::pair<Rank, int>, RankGroup> groups;  // by the first data-parallel rank, and the place
  for (const StepRank& rank : step.ranks) {
    const int place       = rank.coord.dp % step.shard_size;
    const RankGroup ranks = step.layout.group_of(step.layout.rank(rank.coord), Axis::dp);
    RankGroup replicas{.name = str(ranks.name, " shard", place), .axes = ranks.axes};
    replicas.ranks = RankList::mesh(ranks.ranks[static_cast<std::size_t>(place)],
                                    {{ranks.size() / step.shard_size, step.shard_size * step.layout.stride(Axis::dp)}});
    groups.emplace(std::pair(ranks.ranks.front(), place), std::move(replicas));
  }
  return values_of(groups);
}

// The data-parallel groups of the ranks that the step holds.
std::vector<RankGroup> held_groups(const StepGraph& step) {
  std::map<Rank, RankGroup> groups;
  for (const Rank rank : step.graph.ranks()) {
    RankGroup group = step.layout.group_of(rank, Axis::dp);
    groups.emplace(group.ranks.front(), std::move(group));
  }
  return values_of(groups);
}

class Builder {
 public:
  Builder(const StepGraph& step, const WeightsGraphOptions& options)
      : step_(step),
        options_(options),
        made_{.graph = Graph(step.graph.num_ranks(), step.graph.ranks())},
        homes_(step.offload.settings) {}

  WeightsGraph build() {
    made_.hashes = add(held_groups(step_), false);
    // With one shard group every shard is on one rank only.
    const bool replicas = step_.shard_size < step_.layout.degree(Axis::dp);
    made_.shard_hashes  = replicas ? add(replica_groups(step_), true) : std::vector<Buffer>(step_.ranks.size());
    if (!homes_.homes.empty()) made_.graph = with_homes(made_.graph, homes_).graph;
    return std::move(made_);
  }

 private:
  // Lists are by place: of the ranks that the step holds.
  template <class List>
  [[nodiscard]] auto& at(List& list, Rank rank) const {
    return list[*step_.graph.ranks().place(rank)];
  }
  [[nodiscard]] bool has(Rank rank) const { return step_.graph.holds(rank) && !at(copies_, rank).empty(); }

  // Adds the nodes for the buffers that the members of each group share; returns their hashes, by rank.
  std::vector<Buffer> add(const std::vector<RankGroup>& groups, bool shards) {
    copies_.assign(step_.ranks.size(), {});
    hashes_.assign(step_.ranks.size(), {});
    for (std::size_t rank = 0; rank < step_.ranks.size(); ++rank) {
      for (const Buffer of_step : held(step_.ranks[rank], shards)) {
        const Buffer here = add_buffer(of_step);
        made_.same.push_back({.here = here, .of_step = of_step});
        copies_[rank].push_back(here);
      }
    }
    for (const RankGroup& ranks : groups) {
      const auto here = std::find_if(ranks.ranks.begin(), ranks.ranks.end(), [&](Rank rank) { return has(rank); });
      if (here != ranks.ranks.end()) add(ranks, *here, shards ? "shards" : "weights");
    }
    return std::move(hashes_);
  }

  // An offloaded buffer is on the device while it is broadcast and hashed: with_homes gives it a slot.
  Buffer add_buffer(Buffer of_step) {
    BufferSpec spec              = step_.graph.spec(of_step);
    const HomeFormat* const home = step_.home(of_step);
    if (home == nullptr) return made_.graph.buffer(spec);
    spec.space        = Space::device;
    spec.type         = home->type;
    spec.size_bytes   = home->elements * static_cast<std::int64_t>(size_bytes(home->type));
    const Buffer here = made_.graph.buffer(spec);
    homes_.homes.push_back(
        {.buffer = here, .unit = str(here.id), .space = home->space, .compression = home->compression});
    return here;
  }

  Buffer make(std::string name, Rank rank, std::size_t count, Space space = Space::device) {
    return made_.graph.buffer({.name       = std::move(name),
                               .rank       = rank,
                               .size_bytes = static_cast<std::int64_t>(8 * count),
                               .type       = DType::i64,
                               .space      = space,
                               .lifetime   = Lifetime::persistent});
  }

  // Members differ in dp only, so they have the same weights in the same order.
  void add(const RankGroup& ranks, Rank here, const std::string& what) {
    const std::size_t count = at(copies_, here).size();
    const bool alone        = ranks.size() == 1;
    const Group group       = alone ? Group{} : add_group(made_.graph, ranks, "weights");
    for (const Rank rank : ranks.ranks) {
      if (has(rank)) at(hashes_, rank) = make("hashes of " + what, rank, count);
    }
    const bool one_by_one = !homes_.homes.empty();  // so that few offloaded buffers are on the device at once
    const auto hash       = [&](const std::string& name, std::size_t first, std::size_t num) {
      for (const Rank rank : ranks.ranks) {
        if (!has(rank)) continue;
        const auto from   = at(copies_, rank).begin() + static_cast<std::ptrdiff_t>(first);
        const auto offset = static_cast<std::int64_t>(8 * first), size = static_cast<std::int64_t>(8 * num);
        hash_bytes(made_.graph, {.name   = "hash " + name,
                                       .values = std::vector<Buffer>(from, from + static_cast<std::ptrdiff_t>(num)),
                                       .hashes = at(hashes_, rank).range(offset, size),
                                       .labels = {.phase = "hash"}});
      }
    };
    for (std::size_t i = 0; i < count; ++i) {
      const std::string name = made_.graph.spec(at(copies_, here)[i]).name;
      if (options_.broadcast && !alone) {
        broadcast(made_.graph, {.name   = "broadcast " + name,
                                .group  = group,
                                .lane   = LaneKind::reduce,
                                .out    = [&](Rank rank) { return at(copies_, rank)[i]; },
                                .root   = ranks.ranks.front(),
                                .labels = {.phase = "broadcast"}});
      }
      if (one_by_one) hash(name, i, 1);
    }
    if (!one_by_one) hash(what, 0, count);
    if (!alone) compare(ranks, group, count, what);
  }

  void compare(const RankGroup& ranks, Group group, std::size_t count, const std::string& what) {
    std::vector<Buffer> gathered(step_.ranks.size());
    for (const Rank rank : ranks.ranks) {
      if (has(rank)) at(gathered, rank) = make("hashes of all members", rank, count * ranks.ranks.size());
    }
    all_gather(made_.graph, {.name   = "all_gather hashes of " + what,
                             .group  = group,
                             .lane   = LaneKind::reduce,
                             .in     = [&](Rank rank) { return at(hashes_, rank); },
                             .out    = [&](Rank rank) { return at(gathered, rank); },
                             .labels = {.phase = "hash"}});
    for (const Rank rank : ranks.ranks) {
      if (!has(rank)) continue;
      std::vector<std::string> names;
      for (const Buffer held : at(copies_, rank)) names.push_back(made_.graph.spec(held).name);
      const Buffer seen = make("hashes as the host sees them", rank, count * ranks.ranks.size(), Space::pinned);
      copy(made_.graph, {.name   = "hashes of " + what + " to the host",
                         .lane   = LaneKind::d2h,
                         .to     = seen,
                         .from   = at(gathered, rank),
                         .labels = {.phase = "hash"}});
      made_.graph.add({.name   = "compare hashes of " + what,
                       .lane   = made_.graph.lane(rank, LaneKind::host),
                       .reads  = seen,
                       .kind   = NodeKind::host,
                       .op     = "compare_hashes",
                       .labels = {.phase = "hash"}},
                      [names = std::move(names), members = ranks.ranks](const Context& context) {
                        const auto hashes = context.read<std::int64_t>();
                        for (std::size_t member = 1; member < members.size(); ++member) {
                          for (std::size_t i = 0; i < names.size(); ++i) {
                            const auto own   = static_cast<std::uint64_t>(hashes[member * names.size() + i]);
                            const auto first = static_cast<std::uint64_t>(hashes[i]);
                            if (own == first) continue;
                            throw Error(ErrorKind::run,
                                        str("weights: '", names[i], "' on rank ", members[member], " has hash ",
                                            hash_text(own), ", but on rank ", members.front(), " it has ",
                                            hash_text(first), " (equal bits on all ranks; call broadcast_weights)"));
                          }
                        }
                      });
    }
  }

  const StepGraph& step_;
  WeightsGraphOptions options_;
  WeightsGraph made_;
  HomePlan homes_;                                // with the settings of the step
  std::vector<std::vector<Buffer>> copies_ = {};  // by rank
  std::vector<Buffer> hashes_              = {};
};

// The hashes of a rank, in the order in which they are joined.
struct RankHashes {
  Rank rank;
  std::vector<std::uint64_t> hashes;
};

// Process 0 gets the hashes of all ranks, and joins them in the order of ranks.
std::uint64_t joined(const std::vector<RankHashes>& mine, Peers* peers) {
  std::vector<RankHashes> all = mine;
  if (peers != nullptr) {
    Packer sent;
    for (const RankHashes& each : mine) sent.add(each.rank).add_list(std::span<const std::uint64_t>(each.hashes));
    const std::vector<Bytes> gathered = peers->gather("hashes of weights", sent.take());
    if (!gathered.empty()) all.clear();
    for (const Bytes& bytes : gathered) {
      for (Unpacker received(bytes); !received.empty();) {
        const auto rank = received.get<Rank>();
        all.push_back({rank, received.get_list<std::uint64_t>()});
      }
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  std::uint64_t hash = 0;
  for (const RankHashes& rank : all) {
    for (const std::uint64_t each : rank.hashes) hash = join_hashes(hash, each);
  }
  if (peers == nullptr) return hash;
  const Bytes told =
      peers->broadcast("the hash of weights", peers->process() == 0 ? Packer().add(hash).take() : Bytes());
  return Unpacker(told).get<std::uint64_t>();
}

std::uint64_t run_graph(StepRun& run, const WeightsGraphOptions& options) {
  const WeightsGraph weights = weights_graph(run.step(), options);
  const Program program      = run.beside(weights.graph, weights.same);
  run.run(program);
  std::vector<RankHashes> found;
  const auto read = [&](Buffer hashes) {
    if (hashes == Buffer{}) return;
    std::vector<std::int64_t> values(static_cast<std::size_t>(weights.graph.spec(hashes).size_bytes) / 8);
    program.memory().read(hashes, std::span(values));
    for (const std::int64_t each : values) found.back().hashes.push_back(static_cast<std::uint64_t>(each));
  };
  for (std::size_t place = 0; place < weights.hashes.size(); ++place) {
    const int dp = run.step().ranks[place].coord.dp;
    found.push_back({run.step().ranks.ranks()[place], {}});
    if (dp == 0) read(weights.hashes[place]);
    if (dp < run.step().shard_size) read(weights.shard_hashes[place]);
  }
  return joined(found, run.peers());
}

}  // namespace

WeightsGraph weights_graph(const StepGraph& step, const WeightsGraphOptions& options) {
  return Builder(step, options).build();
}

std::uint64_t broadcast_weights(StepRun& run) { return run_graph(run, {.broadcast = true}); }
std::uint64_t check_weights(StepRun& run) { return run_graph(run, {.broadcast = false}); }

}  // namespace stepgraph
