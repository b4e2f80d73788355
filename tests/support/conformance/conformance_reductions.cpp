#include "engine/base/error.hpp"
#include "tests/support/conformance/conformance_cases.hpp"

namespace stepgraph::testing {

void add_rank_order(Trial& trial, const ConformanceOptions& options) {
  if (!options.rank_order) return;
  for (const PartOp op : {PartOp::all_reduce, PartOp::reduce, PartOp::reduce_scatter}) {
    for (const DType type : options.types) {
      if (type == DType::u8 || type == DType::i32 || type == DType::i64) continue;
      for (const Reduction reduction : {Reduction::sum, Reduction::average, Reduction::product}) {
        for (const std::vector<int>& ranks : subsets(trial)) {
          add(trial,
              {.op = op, .type = type, .reduction = reduction, .ranks = ranks, .elements = 37, .fill = Fill::rounding});
        }
      }
    }
  }
}

void add_special_numbers(Trial& trial, const ConformanceOptions& options) {
  for (const PartOp op : {PartOp::all_reduce, PartOp::reduce, PartOp::reduce_scatter}) {
    for (const DType type : options.types) {
      if (type == DType::u8 || type == DType::i32 || type == DType::i64) continue;
      for (const Reduction reduction : {Reduction::min, Reduction::max}) {
        for (const std::vector<int>& ranks : subsets(trial)) {
          add(trial,
              {.op = op, .type = type, .reduction = reduction, .ranks = ranks, .elements = 60, .fill = Fill::special});
        }
      }
    }
  }
}

void add_cut_elements(Trial& trial, const ConformanceOptions& options) {
  const int n     = trial.num_ranks();
  const auto rows = [](Buffer buffer, std::int64_t offset, std::int64_t length, std::int64_t count) {
    return buffer.strided(offset, length, length + 2, count);
  };
  const auto buffer = [&](Rank rank, const char* name) { return trial.place({rank, name}, {200}).view()[0].buffer; };
  const auto meet   = [&](PartOp op, DType type, Reduction reduction, const auto& member) {
    Meeting meeting{.name      = str(to_string(op), " ", type, " ", to_string(reduction), " of cut elements"),
                      .op        = op,
                      .group     = trial.group(everyone(trial)),
                      .type      = type,
                      .reduction = reduction};
    for (int rank = 0; rank < n; ++rank) meeting.members.push_back(member(Rank{rank}));
    trial.meet(meeting);
  };
  for (const DType type : options.types) {
    if (type == DType::i64) continue;  // the reference computes in f64
    const bool whole     = type == DType::u8 || type == DType::i32;
    const Reduction some = whole ? Reduction::sum : Reduction::min;
    // 72 bytes: rows of 6 in memory that begins at an odd address, into two ranges that meet inside an element.
    meet(PartOp::all_reduce, type, some, [&](Rank rank) {
      const Buffer in = buffer(rank, "cut in"), out = buffer(rank, "cut out");
      return TrialMember{.rank   = rank,
                         .reads  = rows(in, 1 + index(rank) % 3, 6, 12),
                         .writes = {out.range(3, 29), out.range(40 + index(rank), 43)}};
    });
    meet(PartOp::all_reduce, type, Reduction::max, [&](Rank rank) {  // in place
      const Buffer both = buffer(rank, "cut both");
      return TrialMember{.rank = rank, .both = {rows(both, 5, 3, 8), both.range(60, 24), both.range(100, 24)}};
    });
    meet(PartOp::reduce_scatter, type, some, [&](Rank rank) {
      const Buffer in = buffer(rank, "cut in"), out = buffer(rank, "cut out");
      TrialMember member{.rank = rank, .writes = {out.range(1, 5), out.range(9, 3)}};
      // Not as many accesses as members: they are laid end to end and cut into equal shards.
      const std::vector<int> sizes = n == 3 ? std::vector{8 * n - 5, 2, 2, 1} : std::vector{8 * n - 5, 2, 3};
      for (std::size_t i = 0; i < sizes.size(); ++i)
        member.reads.push_back(in.range(i == 0 ? 1 : 100 + 7 * static_cast<std::int64_t>(i), sizes[i]));
      return member;
    });
  }
}

}  // namespace stepgraph::testing
