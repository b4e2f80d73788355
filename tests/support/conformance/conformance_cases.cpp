#include "tests/support/conformance/conformance_cases.hpp"

#include <algorithm>
#include <numeric>

#include "engine/base/error.hpp"

namespace stepgraph::testing {
namespace {

using Shards = Exercise::Shards;

DType any_type(const ConformanceOptions& options, std::size_t i) { return options.types[i % options.types.size()]; }

void every_type(Trial& trial, const ConformanceOptions& options, bool in_place) {
  for (const PartOp op : all_collectives) {
    if (in_place && !has_in_place(op)) continue;
    for (const DType type : options.types) {
      for (const Reduction reduction : all_reductions) {
        if (!reduces(op) && reduction != Reduction::sum) continue;
        add(trial, {.op        = op,
                    .type      = type,
                    .reduction = reduction,
                    .ranks     = everyone(trial),
                    .root      = trial.num_ranks() - 1,
                    .in_place  = in_place});
      }
    }
  }
}
void every_type_apart(Trial& trial, const ConformanceOptions& options) { every_type(trial, options, false); }
void every_type_in_place(Trial& trial, const ConformanceOptions& options) { every_type(trial, options, true); }

void every_shape(Trial& trial, const ConformanceOptions& options) {
  std::size_t turn = 0;
  for (const PartOp op : all_collectives) {
    for (const Placement placement : {Placement::tight, Placement::strided, Placement::shuffled}) {
      for (const Shards shards : {Shards::even, Shards::uneven, Shards::sparse}) {
        for (const bool in_place : {false, true}) {
          if (in_place && !has_in_place(op)) continue;
          add(trial, {.op        = op,
                      .type      = any_type(options, turn++),
                      .ranks     = everyone(trial),
                      .root      = static_cast<int>(turn) % trial.num_ranks(),
                      .shards    = shards,
                      .placement = placement,
                      .in_place  = in_place});
        }
      }
    }
  }
}

void every_size(Trial& trial, const ConformanceOptions& options) {
  std::size_t turn = 0;
  for (const PartOp op : all_collectives) {
    for (const int elements : {0, 1, 2, 7, 13, 1023}) {
      for (const bool in_place : {false, true}) {
        if (in_place && !has_in_place(op)) continue;
        add(trial, {.op       = op,
                    .type     = any_type(options, turn++),
                    .ranks    = everyone(trial),
                    .elements = elements,
                    .in_place = in_place});
      }
    }
  }
}

// Rows and pieces longer than the block through which a world may copy them.
void long_rows(Trial& trial, const ConformanceOptions& options) {
  for (const PartOp op : all_collectives) {
    for (const Placement placement : {Placement::strided, Placement::shuffled}) {
      for (const bool in_place : {false, true}) {
        if (in_place && !has_in_place(op)) continue;
        add(trial, {.op        = op,
                    .type      = options.types.back(),
                    .ranks     = everyone(trial),
                    .elements  = 1100,  // five rows
                    .placement = placement,
                    .in_place  = in_place});
      }
    }
  }
}

// Larger than the tiles into which a world may cut its work.
void large(Trial& trial, const ConformanceOptions& options) {
  const DType type = options.types.back();
  const int n      = trial.num_ranks();
  const auto elements =
      static_cast<int>(options.large_bytes / static_cast<std::int64_t>(size_bytes(type)) / n) / 40 * 40;
  for (const PartOp op : {PartOp::all_reduce, PartOp::broadcast, PartOp::permute, PartOp::all_gather,
                          PartOp::reduce_scatter, PartOp::all_to_all}) {
    const bool shards = op == PartOp::all_gather || op == PartOp::reduce_scatter || op == PartOp::all_to_all;
    const Exercise what{
        .op = op, .type = type, .ranks = everyone(trial), .elements = shards ? elements / n + 1 : elements + 1};
    add(trial, what);
    Exercise in_place = what, strided = what;
    in_place.in_place = true;
    if (has_in_place(op)) add(trial, in_place);
    strided.placement = Placement::strided;
    strided.elements  = shards ? elements / n : elements;  // can be cut into rows
    add(trial, strided);
  }
}

void subset_groups(Trial& trial, const ConformanceOptions& options) {
  std::size_t turn = 0;
  for (const PartOp op : all_collectives) {
    for (const std::vector<int>& ranks : subsets(trial)) {
      add(trial, {.op       = op,
                  .type     = any_type(options, turn++),
                  .ranks    = ranks,
                  .root     = static_cast<int>(ranks.size()) - 1,
                  .elements = 5,
                  .shards   = turn % 2 ? Shards::even : Shards::uneven});
    }
  }
}

// Groups that share no rank, then groups that share one, without data dependencies: all may run at the same time.
void groups_at_once(Trial& trial, const ConformanceOptions& options) {
  const int n = trial.num_ranks();
  for (int round = 0; round < 4; ++round) {
    for (int shift = 0; shift < 2; ++shift) {
      for (int rank = shift; rank + 1 < n; rank += 2) {
        for (const PartOp op : {PartOp::all_reduce, PartOp::all_gather, PartOp::reduce_scatter, PartOp::permute}) {
          add(trial, {.op = op, .type = any_type(options, static_cast<std::size_t>(round)), .ranks = {rank, rank + 1}});
        }
      }
    }
    add(trial, {.op = PartOp::all_reduce, .type = DType::u8, .ranks = everyone(trial)});
  }
}

// Operations of one group on several lanes, without data dependencies: only the communicator orders them.
void interleaved(Trial& trial, const ConformanceOptions& options) {
  for (std::size_t round = 0; round < 6; ++round) {
    for (const PartOp op : all_collectives) {
      add(trial, {.op       = op,
                  .type     = any_type(options, round),
                  .ranks    = everyone(trial),
                  .root     = static_cast<int>(round) % trial.num_ranks(),
                  .elements = 1 + static_cast<int>(round)});
    }
  }
}

// Each operation's output is the input of the next, and sender and receiver both change their bytes in between.
void chain(Trial& trial, const ConformanceOptions&) {
  const int n = trial.num_ranks(), shard = 3;
  const Group group = trial.group(everyone(trial));
  std::vector<AccessList> whole, part;
  for (int rank = 0; rank < n; ++rank) {
    whole.push_back(trial.place({Rank{rank}, "whole"}, std::vector<int>(static_cast<std::size_t>(n), shard)));
    part.push_back(trial.place({Rank{rank}, "part"}, {shard}));
  }
  const auto meet = [&](PartOp op, int round) {
    Meeting meeting{.name = str(to_string(op), " of round ", round), .op = op, .group = group, .root = Rank{round % n}};
    for (int rank = 0; rank < n; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      TrialMember member{.rank = Rank{rank}};
      if (op == PartOp::all_reduce || op == PartOp::all_to_all) {
        member.both = whole[r];
      } else if (op == PartOp::broadcast) {
        (rank == round % n ? member.both : member.writes) = whole[r];
      } else if (op == PartOp::all_gather) {
        member.reads  = part[r];
        member.writes = whole[r];
      } else {
        member.reads  = whole[r];
        member.writes = part[r];
      }
      meeting.members.push_back(member);
    }
    trial.meet(meeting);
    for (int rank = 0; rank < n; ++rank)
      trial.touch((rank + round) % 2 ? whole[static_cast<std::size_t>(rank)] : part[static_cast<std::size_t>(rank)]);
  };
  for (int round = 0; round < 12; ++round) {
    for (const PartOp op : {PartOp::reduce_scatter, PartOp::all_gather, PartOp::all_to_all, PartOp::all_reduce,
                            PartOp::reduce_scatter, PartOp::all_gather, PartOp::broadcast}) {
      meet(op, round);
    }
  }
}

Meeting message(Trial& trial, Group group, int from, int to, DType type, const std::vector<int>& sizes,
                Placement placement, const std::string& name) {
  return {.name    = name,
          .op      = PartOp::send,
          .group   = group,
          .type    = type,
          .members = {{.rank  = Rank{from},
                       .reads = trial.place({Rank{from}, name + " in", type}, sizes, placement),
                       .peer  = Rank{to}},
                      {.rank   = Rank{to},
                       .writes = trial.place({Rank{to}, name + " out", type},
                                             {std::accumulate(sizes.begin(), sizes.end(), 0)}, placement),
                       .peer   = Rank{from}}}};
}

// Every pair, in both directions, several in a row and of different sizes, on one group and on a group of the pair.
void messages(Trial& trial, const ConformanceOptions& options) {
  const int n      = trial.num_ranks();
  std::size_t turn = 0;
  for (int a = 0; a < n; ++a) {
    for (int b = a + 1; b < n; ++b) {
      for (const bool own : {false, true}) {
        const Group group = trial.group(own ? std::vector<int>{b, a} : everyone(trial));
        for (const int elements : {5, 0, 1, 12}) {
          for (const bool back : {false, true}) {
            const auto placement = static_cast<Placement>(turn % 3);
            const Meeting made   = message(trial, group, back ? b : a, back ? a : b, any_type(options, turn++),
                                           {elements, 2}, placement, str("message of ", elements, "+2 elements"));
            trial.meet(made);
            trial.touch(made.members[0].reads);
          }
        }
      }
    }
  }
}

// Rounds of a ring: the send and the receive of a rank share an issue position, so neither waits for the other.
void rings(Trial& trial, const ConformanceOptions&) {
  const int n = trial.num_ranks(), elements = 9;
  if (n < 2) return;
  const Group group = trial.group(everyone(trial));
  std::vector<AccessList> held;
  for (int rank = 0; rank < n; ++rank) held.push_back(trial.place({Rank{rank}, "own"}, {elements}));
  for (int round = 0; round < 2 * n; ++round) {
    std::vector<AccessList> next;
    for (int rank = 0; rank < n; ++rank)
      next.push_back(trial.place({Rank{rank}, str("received in round ", round)}, {elements}));
    for (int from = 0; from < n; ++from) {
      const int to = (from + 1) % n;
      trial.meet({.name    = str("ring round ", round),
                  .op      = PartOp::send,
                  .group   = group,
                  .members = {{.rank = Rank{from}, .reads = held[static_cast<std::size_t>(from)], .peer = Rank{to}},
                              {.rank = Rank{to}, .writes = next[static_cast<std::size_t>(to)], .peer = Rank{from}}},
                  .batch   = round});
    }
    held = next;
  }
}

// A sender may overwrite its bytes at once, and members do not share output memory: each member changes what it sent
// and received.
void distinct_memory(Trial& trial, const ConformanceOptions& options) {
  std::size_t turn = 0;
  for (const PartOp op : all_collectives) {
    for (const bool in_place : {false, true}) {
      if (in_place && !has_in_place(op)) continue;
      add(trial, {.op          = op,
                  .type        = any_type(options, turn++),
                  .ranks       = everyone(trial),
                  .in_place    = in_place,
                  .touch_after = true});
    }
  }
}

constexpr ConformanceCase cases[] = {
    {"every type", every_type_apart},
    {"every type in place", every_type_in_place},
    {"every shape", every_shape},
    {"every size", every_size},
    {"long rows", long_rows},
    {"large", large},
    {"subsets of ranks", subset_groups},
    {"groups at once", groups_at_once},
    {"operations interleaved on one group", interleaved},
    {"a chain", chain},
    {"messages", messages},
    {"rings issued together", rings},
    {"distinct memory", distinct_memory},
    {"rank order", add_rank_order},
    {"special numbers", add_special_numbers},
    {"elements at any address, cut by rows", add_cut_elements},
};

}  // namespace

std::vector<int> everyone(const Trial& trial) {
  std::vector<int> ranks(static_cast<std::size_t>(trial.num_ranks()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::vector<std::vector<int>> subsets(const Trial& trial) {
  const std::vector<int> all = everyone(trial);
  std::vector<std::vector<int>> sets{all, {all.rbegin(), all.rend()}, {all.front()}, {all.back()}};
  std::vector<int> even, odd, shuffled = all;
  for (const int rank : all) (rank % 2 ? odd : even).push_back(rank);
  std::sort(shuffled.begin(), shuffled.end(),
            [](int a, int b) { return mix(static_cast<std::uint64_t>(a)) < mix(static_cast<std::uint64_t>(b)); });
  sets.push_back({even.rbegin(), even.rend()});
  if (!odd.empty()) sets.push_back(odd);
  sets.push_back(shuffled);
  if (all.size() > 2) sets.push_back({shuffled.begin(), shuffled.end() - 1});
  return sets;
}

std::span<const ConformanceCase> conformance_cases() noexcept { return cases; }

}  // namespace stepgraph::testing
