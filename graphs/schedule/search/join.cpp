#include "graphs/schedule/search/join.hpp"

#include <algorithm>

namespace stepgraph::search {
namespace {

// The times of rows of which some I are joined with the W after them.
class JoinedTimer {
 public:
  JoinedTimer(const Setting& setting, const Rows& rows) : setting_(setting), rows_(rows) {
    for (int rank = 0; rank < setting.ranks; ++rank) stages_.push_back(setting.stages_of(rank));
    ready_.resize(2 * size(setting.num_stages()) * size(setting.microbatches));
  }

  struct Times {
    double longest_span = 0, makespan = 0;
  };

  Times times(const std::vector<bool>& joined) {
    const int ranks = setting_.ranks, last = setting_.num_stages() - 1;
    std::fill(ready_.begin(), ready_.end(), -1.0);
    std::vector<std::array<int, 3 * most_chunks>> count(size(ranks));
    std::vector<int> next(size(ranks), 0);
    std::vector<double> free(size(ranks), 0), begin(size(ranks), -1);
    for (bool progress = true; progress;) {
      progress = false;
      for (int rank = 0; rank < ranks; ++rank) {
        int& i = next[size(rank)];
        for (; i < rows_.length; ++i) {
          const Letter letter = rows_.row(rank)[i];
          const int stage = stages_[size(rank)][letter / 3u], kind = letter % 3, number = count[size(rank)][letter];
          double time = free[size(rank)];
          if (kind != W && stage != (kind == F ? 0 : last)) {
            const int from       = kind == F ? stage - 1 : stage + 1;
            const double arrival = ready(from, kind, number);
            if (arrival < 0) break;
            time = std::max(time, arrival + setting_.transfer(from, stage));
          }
          if (begin[size(rank)] < 0) begin[size(rank)] = time;
          const Costs& cost = setting_.cost(stage);
          ++count[size(rank)][letter];
          if (kind == I && joined[size(rank) * size(rows_.length) + size(i)]) {
            time += cost.I + cost.W;
            ++count[size(rank)][letter + 1u];
            ++i;
          } else {
            time += kind == F ? cost.F : kind == I ? cost.I : cost.W;
          }
          if (kind != W) ready(stage, kind, number) = time;
          free[size(rank)] = time;
          progress         = true;
        }
      }
    }
    Times times;
    for (std::size_t rank = 0; rank < size(ranks); ++rank) {
      times.longest_span = std::max(times.longest_span, free[rank] - begin[rank]);
      times.makespan     = std::max(times.makespan, free[rank]);
    }
    return times;
  }

 private:
  double& ready(int stage, int kind, int number) {
    return ready_[(2 * size(stage) + size(kind)) * size(setting_.microbatches) + size(number)];
  }

  const Setting& setting_;
  const Rows& rows_;
  std::vector<std::vector<int>> stages_;
  std::vector<double> ready_;
};

}  // namespace

std::vector<bool> joinable(const Setting& setting, const Rows& rows, const std::function<bool()>& stop) {
  std::vector<bool> joined(rows.letters.size(), false);
  std::vector<std::size_t> places;
  for (int rank = 0; rank < setting.ranks; ++rank) {
    std::array<int, 3 * most_chunks> count{};
    for (int i = 0; i < rows.length; ++i) {
      const Letter letter = rows.row(rank)[i];
      if (letter % 3 == I && i + 1 < rows.length && rows.row(rank)[i + 1] == letter + 1 &&
          count[letter] == count[letter + 1u])  // this I's own W
        places.push_back(size(rank) * size(rows.length) + size(i));
      ++count[letter];
    }
  }
  JoinedTimer timer(setting, rows);
  const JoinedTimer::Times apart = timer.times(joined);
  const auto costs_nothing       = [&] {
    const JoinedTimer::Times now = timer.times(joined);
    return now.longest_span <= apart.longest_span * (1 + 1e-12) && now.makespan <= apart.makespan * (1 + 1e-12);
  };
  // All of a range if that works; else its halves, one after the other.
  int trials          = static_cast<int>(std::clamp(4e8 / static_cast<double>(rows.letters.size()), 100.0, 4000.0));
  const auto try_join = [&](const auto& self, std::size_t begin, std::size_t end) -> void {
    if (begin == end || trials-- <= 0 || stop()) return;
    for (std::size_t i = begin; i < end; ++i) joined[places[i]] = true;
    if (costs_nothing()) return;
    for (std::size_t i = begin; i < end; ++i) joined[places[i]] = false;
    if (end - begin == 1) return;
    self(self, begin, begin + (end - begin) / 2);
    self(self, begin + (end - begin) / 2, end);
  };
  try_join(try_join, 0, places.size());
  return joined;
}

}  // namespace stepgraph::search
