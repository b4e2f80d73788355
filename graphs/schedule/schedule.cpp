#include "graphs/schedule/schedule.hpp"

#include <algorithm>
#include <array>
#include <charconv>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

constexpr std::array<std::string_view, num_action_kinds> kind_names{
    "F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"};

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw Error(ErrorKind::config, str("action '", text, "': ", why));
}

// Takes the digits that `rest` begins with. from_chars alone would take a sign as well.
int take_number(std::string_view text, std::string_view& rest, std::string_view what) {
  const std::size_t length = std::min(rest.find_first_not_of("0123456789"), rest.size());
  if (length == 0) refuse(text, str("no ", what, " (written like 2F0: stage, action, microbatch)"));
  int number           = 0;
  const auto [end, ec] = std::from_chars(rest.data(), rest.data() + length, number);
  if (ec != std::errc{}) refuse(text, str(what, " ", rest.substr(0, length), " is too large"));
  rest.remove_prefix(length);
  return number;
}

}  // namespace

std::string_view to_string(ActionKind kind) noexcept { return kind_names[static_cast<std::size_t>(kind)]; }

std::string to_string(const Action& action) {
  return has_microbatch(action.kind) ? str(index(action.stage), to_string(action.kind), index(action.microbatch))
                                     : str(index(action.stage), to_string(action.kind));
}

Action parse_action(std::string_view text) {
  std::string_view rest = text;
  if (rest.starts_with('(')) refuse(text, "overlapped actions are not supported (one action, like 2F0)");
  Action action{.stage = Stage{take_number(text, rest, "stage")}};
  const std::size_t length    = std::min(rest.find_first_of("0123456789"), rest.size());
  const std::string_view name = rest.substr(0, length);
  const auto found            = std::find(kind_names.begin(), kind_names.end(), name);
  if (found == kind_names.end()) {
    std::string known;
    for (const std::string_view each : kind_names) known += str(known.empty() ? "" : ", ", each);
    refuse(text, str("unknown action '", name, "' (known: ", known, ")"));
  }
  action.kind = static_cast<ActionKind>(found - kind_names.begin());
  rest.remove_prefix(length);
  if (has_microbatch(action.kind)) action.microbatch = Microbatch{take_number(text, rest, "microbatch")};
  if (!rest.empty()) refuse(text, str("'", rest, "' follows the action (one action, like 2F0)"));
  return action;
}

std::size_t PipelineSchedule::num_actions() const noexcept {
  std::size_t count = 0;
  for (const auto& row : rows) count += row.size();
  return count;
}

std::vector<int> PipelineSchedule::stages_per_rank() const {
  std::vector<int> count(rows.size());
  for (const Rank rank : rank_of_stage) {
    if (index(rank) >= 0 && index(rank) < num_ranks()) ++count[static_cast<std::size_t>(index(rank))];
  }
  return count;
}

PipelineSchedule schedule_of(std::vector<std::vector<Action>> rows,
                             const std::vector<std::vector<std::size_t>>& columns) {
  PipelineSchedule schedule{.rows = std::move(rows)};
  const auto most = static_cast<std::int64_t>(schedule.num_actions());
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    for (std::size_t i = 0; i < schedule.rows[rank].size(); ++i) {
      const Action& action = schedule.rows[rank][i];
      const auto bad       = [&](std::string_view what, int number) {
        throw Error(ErrorKind::config,
                          str("schedule: row ", rank + 1, ", column ", columns.empty() ? i + 1 : columns[rank][i], ": '",
                              action, "': ", what, " ", number, " (numbered from 0; there are only ", most, " actions)"));
      };
      if (index(action.stage) < 0 || index(action.stage) >= most) bad("stage", index(action.stage));
      if (has_microbatch(action.kind) && (index(action.microbatch) < 0 || index(action.microbatch) >= most))
        bad("microbatch", index(action.microbatch));
      const auto stage = static_cast<std::size_t>(index(action.stage));
      if (stage >= schedule.rank_of_stage.size()) schedule.rank_of_stage.resize(stage + 1, Rank{-1});
      if (schedule.rank_of_stage[stage] == Rank{-1}) schedule.rank_of_stage[stage] = Rank{static_cast<int>(rank)};
      schedule.num_microbatches = std::max(schedule.num_microbatches, index(action.microbatch) + 1);
    }
  }
  return schedule;
}

std::string to_string(const PipelineSchedule& schedule) {
  std::string text;
  for (const auto& row : schedule.rows) {
    for (std::size_t i = 0; i < row.size(); ++i) text += str(i == 0 ? "" : " ", to_string(row[i]));
    text += '\n';
  }
  return text;
}

PipelineSchedule parse_schedule(std::string_view text) {
  std::vector<std::vector<Action>> rows;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    auto& row = rows.emplace_back();
    while (true) {
      line.remove_prefix(std::min(line.find_first_not_of(" \t\r"), line.size()));
      if (line.empty()) break;
      const std::size_t length = std::min(line.find_first_of(" \t\r"), line.size());
      try {
        row.push_back(parse_action(line.substr(0, length)));
      } catch (const Error& error) {
        throw Error(ErrorKind::config,
                    str("schedule: row ", rows.size(), ", column ", row.size() + 1, ": ", error.what()));
      }
      line.remove_prefix(length);
    }
  }
  return schedule_of(std::move(rows));
}

}  // namespace stepgraph
