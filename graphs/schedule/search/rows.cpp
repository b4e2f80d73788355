#include "graphs/schedule/search/rows.hpp"

#include <algorithm>
#include <array>

namespace stepgraph::search {
std::vector<int> Setting::stages_of(int rank) const {
  std::vector<int> stages;
  for (int stage = 0; stage < num_stages(); ++stage) {
    if (rank_of(stage) == rank) stages.push_back(stage);
  }
  return stages;
}

double Setting::transfer(int from, int to) const noexcept { return rank_of(from) == rank_of(to) ? 0 : cost(from).COMM; }

double Setting::work(int rank) const noexcept {
  double sum = 0;  // added as the simulation adds it
  for (int stage = 0; stage < num_stages(); ++stage) {
    if (rank_of(stage) == rank) sum += microbatches * (cost(stage).F + cost(stage).I + cost(stage).W);
  }
  return sum;
}

double Setting::most_work() const noexcept {
  double most = 0;
  for (int rank = 0; rank < ranks; ++rank) most = std::max(most, work(rank));
  return most;
}

Rows rows_of(const Setting& setting, const PipelineSchedule& schedule) {
  Rows rows{.length = setting.row_length()};
  rows.letters.reserve(size(setting.ranks) * size(rows.length));
  for (int rank = 0; rank < setting.ranks; ++rank) {
    const std::vector<int> stages = setting.stages_of(rank);
    for (const Action& action : schedule.rows[size(rank)]) {
      const auto slot  = std::find(stages.begin(), stages.end(), index(action.stage)) - stages.begin();
      const auto first = static_cast<Letter>(3 * slot);
      if (action.kind == ActionKind::forward) rows.letters.push_back(first + F);
      if (action.kind == ActionKind::input_gradient || action.kind == ActionKind::backward)
        rows.letters.push_back(first + I);
      if (action.kind == ActionKind::weight_gradient || action.kind == ActionKind::backward)
        rows.letters.push_back(first + W);
    }
  }
  return rows;
}

PipelineSchedule schedule_of_rows(const Setting& setting, const Rows& rows, const std::vector<bool>& joined) {
  static constexpr std::array kinds{ActionKind::forward, ActionKind::input_gradient, ActionKind::weight_gradient};
  PipelineSchedule schedule{.rank_of_stage = setting.rank_of_stage, .num_microbatches = setting.microbatches};
  for (int rank = 0; rank < setting.ranks; ++rank) {
    const std::vector<int> stages = setting.stages_of(rank);
    std::array<int, 3 * most_chunks> number{};
    auto& row = schedule.rows.emplace_back();
    for (int i = 0; i < rows.length; ++i) {
      const Letter letter = rows.row(rank)[i];
      const Stage stage{stages[size(slot_of(letter))]};
      const Microbatch microbatch{number[letter]++};
      if (!joined.empty() && joined[size(rank) * size(rows.length) + size(i)]) {
        row.push_back({stage, ActionKind::backward, microbatch});
        ++number[size(letter + W - I)];
        ++i;
      } else {
        row.push_back({stage, kinds[size(kind_of(letter))], microbatch});
      }
    }
  }
  return schedule;
}

bool fits(const Setting& setting, const Rows& rows) {
  for (int rank = 0; rank < setting.ranks; ++rank) {
    int whole = 0, retained = 0;
    for (int i = 0; i < rows.length; ++i) {
      const int kind = kind_of(rows.row(rank)[i]);
      whole += (kind == F) - (kind == I);
      retained += (kind == I) - (kind == W);
      if (setting.activation(whole, retained) > setting.limit) return false;
    }
  }
  return true;
}

}  // namespace stepgraph::search
