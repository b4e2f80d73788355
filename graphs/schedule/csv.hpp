#pragma once
#include <iosfwd>
#include <string>
#include <string_view>

#include "graphs/schedule/schedule.hpp"

namespace stepgraph {

// The CSV of torch.distributed.pipelining (`_dump_csv`, `_load_csv`): a row for each rank, a cell for each action, such
// as `0F0`, `1I3`, `2SEND_F0` or `1UNSHARD`; an empty cell is an idle slot.

// Rows have no idle slots here, so the CSV has none.
void write_csv(const PipelineSchedule& schedule, std::ostream& out);
[[nodiscard]] std::string to_csv(const PipelineSchedule& schedule);

// Blanks around a cell, empty cells and either end of line are accepted; anything else that is not an action is refused
// with Error(config) that names row and column, both from 1, and the reason. Which rank has a stage, and how many
// microbatches there are, is what the cells say (schedule_of).
[[nodiscard]] PipelineSchedule parse_csv(std::string_view text);
// Of a regular file of at most 64 MiB. Errors name the file.
[[nodiscard]] PipelineSchedule read_csv(const std::string& path);

}  // namespace stepgraph
