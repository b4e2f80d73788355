#include "graphs/broadcast_weights.hpp"

#include <algorithm>
#include <memory>
#include <string>

#include "engine/context.hpp"
#include "engine/error.hpp"
#include "graphs/layout.hpp"
#include "graphs/weights.hpp"
#include "ops/collectives.hpp"
#include "ops/hash.hpp"

namespace stepgraph {
namespace {

// What a rank has that its data-parallel neighbours have too, bit for bit; a buffer that two weights share once.
std::vector<Buffer> replicated(const StepGraph& step, Rank rank) {
  std::vector<Buffer> found;
  const auto& weights = step.ranks[static_cast<std::size_t>(index(rank))].weights;
  Coord coord         = step.layout.coord(rank);
  const int tp = step.layout.degree(Axis::tp), dp = step.layout.degree(Axis::dp);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const std::int64_t elements = num_elements(local_shape(step.spec(weights[i]), tp, coord.tp));
    for (const auto part : {&StepWeight::value, &StepWeight::master, &StepWeight::first, &StepWeight::second}) {
      bool whole = true;  // on all of them; ranks that are elsewhere have what this one has
      for (coord.dp = 0; coord.dp < dp; ++coord.dp) {
        const auto& others = step.ranks[static_cast<std::size_t>(index(step.layout.rank(coord)))].weights;
        if (!others.empty()) whole = whole && (others[i].*part).size() == elements;
      }
      const Buffer buffer = (weights[i].*part).buffer;
      if (whole && std::find(found.begin(), found.end(), buffer) == found.end()) found.push_back(buffer);
    }
  }
  return found;
}

class Builder {
 public:
  Builder(const StepGraph& step, const WeightsGraphOptions& options)
      : step_(step),
        options_(options),
        made_{.graph = step.graph.only_rank() ? Graph(step.graph.num_ranks(), *step.graph.only_rank())
                                              : Graph(step.graph.num_ranks())},
        copies_(step.ranks.size()) {
    made_.hashes.resize(step.ranks.size());
  }

  WeightsGraph build() {
    for (std::size_t rank = 0; rank < step_.ranks.size(); ++rank) declare(rank);
    for (const RankGroup& ranks : step_.layout.groups(Axis::dp)) {
      const auto here = std::find_if(ranks.ranks.begin(), ranks.ranks.end(), [&](Rank rank) { return has(rank); });
      if (here != ranks.ranks.end()) add(ranks, *here);
    }
    return std::move(made_);
  }

 private:
  template <class List>
  static auto& at(List& list, Rank rank) {
    return list[static_cast<std::size_t>(index(rank))];
  }
  [[nodiscard]] bool has(Rank rank) const { return !at(copies_, rank).empty(); }

  void declare(std::size_t rank) {
    for (const Buffer of_step : replicated(step_, Rank{static_cast<int>(rank)})) {
      const Buffer here = made_.graph.buffer(step_.graph.spec(of_step));
      made_.same.push_back({.here = here, .of_step = of_step});
      copies_[rank].push_back(here);
    }
  }

  Buffer make(std::string name, Rank rank, std::size_t count) {
    return made_.graph.buffer({.name       = std::move(name),
                               .rank       = rank,
                               .size_bytes = static_cast<std::int64_t>(8 * count),
                               .type       = DType::i64,
                               .lifetime   = Lifetime::persistent});
  }

  // Members have the same weights in the same order: they differ in dp alone.
  void add(const RankGroup& ranks, Rank here) {
    const std::size_t count = at(copies_, here).size();
    const bool alone        = ranks.size() == 1;
    const Group group       = alone ? Group{} : add_group(made_.graph, ranks, "weights");
    for (std::size_t i = 0; i < count && options_.broadcast && !alone; ++i) {
      broadcast(made_.graph, {.name   = "broadcast " + made_.graph.spec(at(copies_, here)[i]).name,
                              .group  = group,
                              .lane   = LaneKind::reduce,
                              .out    = [&](Rank rank) { return at(copies_, rank)[i]; },
                              .root   = ranks.ranks.front(),
                              .labels = {.phase = "broadcast"}});
    }
    for (const Rank rank : ranks.ranks) {
      if (!has(rank)) continue;
      at(made_.hashes, rank) = make("hashes of weights", rank, count);
      hash_bytes(made_.graph, {.name   = "hash weights",
                               .values = at(copies_, rank),
                               .hashes = at(made_.hashes, rank),
                               .labels = {.phase = "hash"}});
    }
    if (!alone) compare(ranks, group, count);
  }

  void compare(const RankGroup& ranks, Group group, std::size_t count) {
    std::vector<Buffer> gathered(step_.ranks.size());
    for (const Rank rank : ranks.ranks) {
      if (has(rank)) at(gathered, rank) = make("hashes of all members", rank, count * ranks.ranks.size());
    }
    all_gather(made_.graph, {.name   = "all_gather hashes of weights",
                             .group  = group,
                             .lane   = LaneKind::reduce,
                             .in     = [&](Rank rank) { return at(made_.hashes, rank); },
                             .out    = [&](Rank rank) { return at(gathered, rank); },
                             .labels = {.phase = "hash"}});
    for (const Rank rank : ranks.ranks) {
      if (!has(rank)) continue;
      std::vector<std::string> names;
      for (const Buffer copy : at(copies_, rank)) names.push_back(made_.graph.spec(copy).name);
      made_.graph.add({.name   = "compare hashes of weights",
                       .lane   = made_.graph.lane(rank, LaneKind::host),
                       .reads  = at(gathered, rank),
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
                            throw Error(
                                ErrorKind::run,
                                str("weights: '", names[i], "' of rank ", members[member], " has the hash ",
                                    hash_text(own), ", that of rank ", members.front(), " has ", hash_text(first),
                                    " (the same bits on all data-parallel ranks: broadcast_weights)"));
                          }
                        }
                      });
    }
  }

  const StepGraph& step_;
  WeightsGraphOptions options_;
  WeightsGraph made_;
  std::vector<std::vector<Buffer>> copies_;  // by rank
};

std::uint64_t run_graph(StepRun& run, const WeightsGraphOptions& options) {
  const WeightsGraph weights = weights_graph(run.step(), options);
  const Program program      = run.beside(weights.graph, weights.same);
  run.run(program);
  std::uint64_t hash = 0;
  for (std::size_t rank = 0; rank < weights.hashes.size(); ++rank) {
    if (run.step().ranks[rank].coord.dp != 0 || weights.hashes[rank] == Buffer{}) continue;
    for (const std::int64_t each : program.memory().span<std::int64_t>(weights.hashes[rank])) {
      hash = join_hashes(hash, static_cast<std::uint64_t>(each));
    }
  }
  return hash;
}

}  // namespace

WeightsGraph weights_graph(const StepGraph& step, const WeightsGraphOptions& options) {
  return Builder(step, options).build();
}

std::uint64_t broadcast_weights(StepRun& run) { return run_graph(run, {.broadcast = true}); }
std::uint64_t check_weights(StepRun& run) { return run_graph(run, {.broadcast = false}); }

}  // namespace stepgraph
