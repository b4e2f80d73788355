#include "engine/base/error.hpp"
#include "tests/support/conformance/conformance_cases.hpp"

namespace stepgraph::testing {
namespace {

// Random numbers that are the same in every process.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(mix(seed)) {}
  int below(int count) { return static_cast<int>((state_ = mix(state_)) % static_cast<std::uint64_t>(count)); }

 private:
  std::uint64_t state_;
};

// Every rank has two buffers of bytes. Each communication goes from one to the other, at random places.
class RandomTrial {
 public:
  RandomTrial(Trial& trial, std::uint64_t seed) : trial_(trial), draw_(seed), sets_(subsets(trial)) {
    for (int rank = 0; rank < trial.num_ranks(); ++rank) {
      for (auto* pool : {&pools_[0], &pools_[1]}) {
        const AccessList made = trial.place({Rank{rank}, pool == &pools_[0] ? "a" : "b"}, {pool_bytes});
        pool->push_back(made.view()[0].buffer);
      }
    }
  }

  void build(int num_acts) {
    for (int act = 0; act < num_acts; ++act) {
      from_ = draw_.below(2);
      if (draw_.below(4) == 0) trial_.touch(region(draw_.below(trial_.num_ranks()), from_, {draw_.below(40)}));
      communicate(sets_[static_cast<std::size_t>(draw_.below(static_cast<int>(sets_.size())))]);
    }
  }

 private:
  static constexpr int pool_bytes = 128;

  // Accesses of these sizes, with gaps and rows, in one of a rank's buffers.
  AccessList region(int rank, int pool, const std::vector<int>& sizes) {
    AccessList list;
    std::int64_t end = draw_.below(16);
    for (const int size : sizes) {
      Region region{.offset = end, .length = size};
      if (size > 0 && size % 2 == 0 && draw_.below(3) == 0)
        region = {.offset = end, .length = size / 2, .stride = size / 2 + 1 + draw_.below(3), .count = 2};
      end = region.end() + draw_.below(3);
      list.push_back({pools_[pool][static_cast<std::size_t>(rank)], region});
    }
    return list;
  }
  AccessList in(int rank, const std::vector<int>& sizes) { return region(rank, from_, sizes); }
  AccessList out(int rank, const std::vector<int>& sizes) { return region(rank, 1 - from_, sizes); }

  void communicate(const std::vector<int>& ranks) {
    constexpr Reduction reductions[] = {Reduction::sum, Reduction::min, Reduction::max};
    const auto n                     = static_cast<int>(ranks.size());
    const PartOp op                  = draw_.below(4) == 0 && n > 1 ? PartOp::send : all_collectives[draw_.below(10)];
    const int root = draw_.below(n), bytes = draw_.below(40), by = 1 + draw_.below(3);
    std::vector<std::vector<int>> slices(ranks.size());  // [from][to]; the first row also: shards
    for (auto& row : slices) {
      for (int i = 0; i < n; ++i) row.push_back(draw_.below(7));
    }
    Meeting meeting{.name      = str("random ", to_string(op)),
                    .op        = op,
                    .group     = trial_.group(ranks),
                    .reduction = reductions[draw_.below(3)],
                    .root      = has_root(op) ? Rank{ranks[static_cast<std::size_t>(root)]} : Rank{-1}};
    if (op == PartOp::send) {
      const int from = ranks[static_cast<std::size_t>(root)], to = ranks[static_cast<std::size_t>((root + 1) % n)];
      meeting.members = {{.rank = Rank{from}, .reads = in(from, {bytes, 3}), .peer = Rank{to}},
                         {.rank = Rank{to}, .writes = out(to, {bytes + 3}), .peer = Rank{from}}};
    } else {
      for (int i = 0; i < n; ++i) {
        const int rank = ranks[static_cast<std::size_t>(i)], shard = slices[0][static_cast<std::size_t>(i)];
        TrialMember member{.rank = Rank{rank}};
        const bool is_root = i == root;
        if (op == PartOp::all_reduce || op == PartOp::reduce || (op == PartOp::broadcast && is_root))
          member.reads = in(rank, {bytes});
        if (op == PartOp::all_reduce || (op == PartOp::reduce && is_root) || op == PartOp::broadcast)
          member.writes = out(rank, {bytes});
        if (op == PartOp::all_gather || op == PartOp::gather) member.reads = in(rank, {shard});
        if (op == PartOp::all_gather || (op == PartOp::gather && is_root)) member.writes = out(rank, slices[0]);
        if (op == PartOp::reduce_scatter || (op == PartOp::scatter && is_root)) member.reads = in(rank, slices[0]);
        if (op == PartOp::reduce_scatter || op == PartOp::scatter) member.writes = out(rank, {shard});
        if (op == PartOp::all_to_all) {
          std::vector<int> column;
          for (const auto& row : slices) column.push_back(row[static_cast<std::size_t>(i)]);
          member.reads  = in(rank, slices[static_cast<std::size_t>(i)]);
          member.writes = out(rank, column);
        }
        if (op == PartOp::permute && by % n != 0) {
          member.peer   = Rank{ranks[static_cast<std::size_t>((i + by) % n)]};
          member.source = Rank{ranks[static_cast<std::size_t>((i + n - by % n) % n)]};
          member.reads  = in(rank, {bytes});
          member.writes = out(rank, {bytes});
        }
        meeting.members.push_back(member);
      }
    }
    trial_.meet(meeting);
  }

  Trial& trial_;
  Draw draw_;
  std::vector<std::vector<int>> sets_;
  std::vector<Buffer> pools_[2];
  int from_ = 0;
};

}  // namespace

void add_random(Trial& trial, std::uint64_t seed, int num_communications) {
  RandomTrial(trial, seed).build(num_communications);
}

}  // namespace stepgraph::testing
