#include "graphs/schedule/search/counts.hpp"

#include <algorithm>
#include <cmath>

#include "graphs/schedule/search/random.hpp"

namespace stepgraph::search {

Counts search_counts(const Setting& setting, RowTimer& timer, const MakeRows& make, const Counts& start,
                     std::mt19937_64& random, const ImproveOptions& options) {
  const int most_in_flight = static_cast<int>(
      std::min<double>(setting.limit * setting.chunks, static_cast<double>(setting.microbatches) * setting.chunks));
  const int most_late = setting.microbatches * setting.chunks;
  Counts now = start, best = start;
  Rows best_rows = make.make(start, options.stop);
  if (best_rows.length == 0 || !timer.set(best_rows)) return start;
  double cost = smooth_cost(setting, timer), best_span = timer.longest_span();
  const std::int64_t begin = timer.num_timed();
  const double step        = mean_time(setting);
  std::int64_t tried       = 0;
  while (best_span > options.enough) {
    const std::int64_t spent = timer.num_timed() - begin + tried * make.effort * setting.ranks * best_rows.length;
    if (spent >= options.most_timed || (tried++ % 16 == 0 && options.stop())) break;
    const double left = 1 - static_cast<double>(spent) / static_cast<double>(options.most_timed);
    const double most = cost - options.heat * step * left * std::log(1 - uniform(random));

    Counts next     = now;
    auto& numbers   = below(random, 3) == 0 ? next.in_flight : next.late;
    const bool of_f = &numbers == &next.in_flight;
    const int first = below(random, setting.ranks), change = below(random, 2) == 0 ? 1 : -1;
    int end = first + 1;
    while (end < setting.ranks && uniform(random) < 0.6) ++end;
    for (int rank = first; rank < end; ++rank) {
      int& number = numbers[size(rank)];
      number      = std::clamp(number + change, of_f ? 1 : 0, of_f ? most_in_flight : most_late);
    }
    const Rows rows = make.make(next, options.stop);
    if (rows.length == 0 || timer.replace(rows, most) == never) continue;
    const double got = smooth_cost(setting, timer);
    if (got > most) {
      timer.undo();
      continue;
    }
    timer.keep();
    cost = got;
    now  = std::move(next);
    if (timer.longest_span() < best_span) {
      best_span = timer.longest_span();
      best      = now;
      best_rows = rows;
    }
  }
  timer.set(best_rows);
  return best;
}

}  // namespace stepgraph::search
