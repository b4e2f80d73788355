#include "graphs/schedule/search/improve.hpp"

#include <algorithm>
#include <cmath>

#include "graphs/schedule/search/random.hpp"

namespace stepgraph::search {
namespace {

class Improver {
 public:
  Improver(const Setting& setting, RowTimer& timer, std::mt19937_64& random, const ImproveOptions& options)
      : setting_(setting), timer_(timer), random_(random), options_(options) {}

  void run() {
    constexpr std::int64_t trial = 64;  // what a trial costs beside its timing, in timed actions
    const std::int64_t begin     = timer_.num_timed();
    Rows best                    = timer_.rows();
    double best_cost = cost(), now = best_cost;
    const double step = mean_time(setting_);
    find_path();
    int without = 0;
    for (std::int64_t i = 0; timer_.longest_span() > options_.enough && !path_.empty(); ++i) {
      const std::int64_t spent = timer_.num_timed() - begin + i * trial;
      if (spent >= options_.most_timed || (i % 64 == 0 && options_.stop())) break;
      const double progress       = static_cast<double>(spent) / static_cast<double>(options_.most_timed);
      const double heat           = options_.heat * step * (1 - progress) * (1 - progress);
      const double most           = now - heat * std::log(1 - uniform());
      const auto [rank, from, to] = pick();
      if (from == to) continue;
      const double span = timer_.move(rank, from, to, most);
      if (++without > 200) find_path(), without = 0;
      if (span == never) continue;
      const double got = cost();
      if (got > most) {
        timer_.undo();
        continue;
      }
      timer_.keep();
      now = got;
      find_path();
      without = 0;
      if (now < best_cost - 1e-12 * best_cost) {
        best_cost = now;
        best      = timer_.rows();
      }
    }
    timer_.set(best);
  }

 private:
  struct Place {
    int rank, position;
  };
  struct Arc {
    Place from, to;
  };
  struct Move {
    int rank, from, to;
  };

  double cost() const { return smooth_cost(setting_, timer_); }
  double uniform() { return search::uniform(random_); }
  int below(int end) { return search::below(random_, end); }

  // From the end of a rank with a long span, back along the actions that it waited for.
  void find_path() {
    path_.clear();
    int rank    = 0;
    double most = -1;
    for (int r = 0; r < setting_.ranks; ++r) {
      const double weight = timer_.span(r) * (1 + 1e-3 * uniform());
      if (weight > most) most = weight, rank = r;
    }
    int i = timer_.rows().length - 1;
    while (i >= 0) {
      const RowTimer::Place from = timer_.waited_for(rank, i);
      const bool no_gap          = i > 0 && timer_.end(rank, i - 1) >= timer_.begin(rank, i);
      if (from.rank < 0 || (no_gap && below(2) == 0)) {  // without a gap both are longest paths
        --i;
        continue;
      }
      path_.push_back({{from.rank, from.position}, {rank, i}});
      rank = from.rank;
      i    = from.position;
    }
  }

  int distance() {
    int d = 1;
    while (d < 40 && uniform() < 0.7) ++d;
    return d;
  }

  Move pick() {
    const int k    = below(static_cast<int>(path_.size()));
    const Arc& arc = path_[size(k)];
    const int last = timer_.rows().length - 1, way = below(8);
    if (way < 2) {  // the action before the transfer comes earlier
      return {arc.from.rank, arc.from.position, std::max(0, arc.from.position - distance())};
    }
    if (way < 5) {  // an action of the path before it comes later
      const int begin = size(k) + 1 < path_.size() ? path_[size(k) + 1].to.position : 0;
      const int low   = std::max(begin, arc.from.position - 40);
      if (low == arc.from.position) return {0, 0, 0};
      int from = low + below(arc.from.position - low);
      if (way < 4) {
        while (from < arc.from.position && timer_.rows().row(arc.from.rank)[from] % 3 != W) ++from;
        if (from == arc.from.position) return {0, 0, 0};
      }
      return {arc.from.rank, from, std::min(last, arc.from.position + distance() - 1)};
    }
    if (way < 7)  // an action from later on fills the gap
      return {arc.to.rank, std::min(last, arc.to.position + distance()), arc.to.position};
    return {arc.to.rank, arc.to.position, std::min(last, arc.to.position + distance())};
  }

  const Setting& setting_;
  RowTimer& timer_;
  std::mt19937_64& random_;
  const ImproveOptions& options_;
  std::vector<Arc> path_;
};

}  // namespace

void improve_rows(const Setting& setting, RowTimer& timer, std::mt19937_64& random, const ImproveOptions& options) {
  Improver(setting, timer, random, options).run();
}

}  // namespace stepgraph::search
