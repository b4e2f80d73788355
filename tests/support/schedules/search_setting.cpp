#include "tests/support/schedules/search_setting.hpp"

#include <algorithm>

#include "graphs/schedule/kinds.hpp"

namespace stepgraph::testing {

search::Setting random_setting(std::mt19937_64& random, int max_ranks, int max_microbatches, int max_chunks) {
  search::Setting setting{.ranks        = draw(random, 1, max_ranks),
                          .chunks       = draw(random, 1, max_chunks),
                          .microbatches = draw(random, 1, max_microbatches),
                          .retain       = draw(random, 0, 4) / 4.0};
  setting.rank_of_stage = setting.chunks == 2 && draw(random, 0, 1) == 0
                              ? v_placement(setting.ranks)
                              : looped_placement(setting.ranks, setting.chunks);
  for (int stage = 0; stage < setting.num_stages(); ++stage) {
    setting.costs.push_back({draw(random, 1, 12) / 4.0, draw(random, 1, 12) / 4.0, draw(random, 0, 12) / 4.0,
                             std::max(0, draw(random, -3, 6)) / 4.0});
  }
  if (draw(random, 0, 1) == 0) setting.limit = 1 + draw(random, 0, 4 * setting.ranks) / 2.0;
  return setting;
}

}  // namespace stepgraph::testing
