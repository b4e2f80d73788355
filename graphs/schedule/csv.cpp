#include "graphs/schedule/csv.hpp"

#include <algorithm>
#include <ostream>

#include "engine/base/error.hpp"
#include "graphs/files/files.hpp"

namespace stepgraph {
namespace {

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") + 1 - begin);
}

// Takes what stands before `end`, and the end itself.
std::string_view take(std::string_view& text, char end) {
  const std::size_t length    = std::min(text.find(end), text.size());
  const std::string_view part = text.substr(0, length);
  text.remove_prefix(std::min(length + 1, text.size()));
  return part;
}

// What some programs write around a cell.
std::string_view unquoted(std::string_view cell) {
  if (cell.size() >= 2 && cell.front() == '"' && cell.back() == '"') return trimmed(cell.substr(1, cell.size() - 2));
  return cell;
}

// A column counts empty cells too, so positions are those in the file.
std::vector<Action> parse_row(std::string_view line, std::size_t row, std::vector<std::size_t>& columns) {
  std::vector<Action> actions;
  for (std::size_t column = 1; !line.empty(); ++column) {
    const std::string_view cell = unquoted(trimmed(take(line, ',')));
    if (cell.empty()) continue;
    try {
      actions.push_back(parse_action(cell));
      columns.push_back(column);
    } catch (const Error& error) {
      throw Error(ErrorKind::config, str("schedule: row ", row, ", column ", column, ": ", error.what()));
    }
  }
  return actions;
}

}  // namespace

std::string to_csv(const PipelineSchedule& schedule) {
  std::string text;
  for (const auto& row : schedule.rows) {
    for (std::size_t i = 0; i < row.size(); ++i) text += str(i == 0 ? "" : ",", to_string(row[i]));
    text += '\n';
  }
  return text;
}

void write_csv(const PipelineSchedule& schedule, std::ostream& out) { out << to_csv(schedule); }

PipelineSchedule parse_csv(std::string_view text) {
  constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";
  if (text.starts_with(byte_order_mark)) text.remove_prefix(byte_order_mark.size());
  std::vector<std::vector<Action>> rows;
  std::vector<std::vector<std::size_t>> columns;
  for (std::size_t row = 1; !text.empty(); ++row) {
    std::string_view line = take(text, '\n');
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (trimmed(line).empty()) {
      // At the end of a file it means nothing; before the end it could be a rank, or a slip.
      if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) break;
      throw Error(ErrorKind::config, str("schedule: row ", row, " is empty (a row of actions for each rank)"));
    }
    rows.push_back(parse_row(line, row, columns.emplace_back()));
  }
  if (rows.empty()) throw Error(ErrorKind::config, "schedule: no rows (one for each rank)");
  return schedule_of(std::move(rows), columns);
}

PipelineSchedule read_csv(const std::string& path) {
  constexpr std::int64_t most_bytes = 64 << 20;  // some million actions
  const std::string text            = read_text(path, most_bytes);
  try {
    return parse_csv(text);
  } catch (const Error& error) {
    throw Error(ErrorKind::config, str(path, ": ", error.what()));
  }
}

}  // namespace stepgraph
