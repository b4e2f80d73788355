#include <algorithm>

#include "engine/base/error.hpp"
#include "graphs/schedule/validate.hpp"

namespace stepgraph {
namespace {

constexpr std::size_t around_column = 5;  // actions shown on either side of a bad cell
constexpr std::size_t around_row    = 2;  // ranks shown above and below one

bool contains(const std::vector<Cell>& cells, const Cell& cell) {
  return std::find(cells.begin(), cells.end(), cell) != cells.end();
}

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

// What is shown of one rank.
struct Window {
  std::size_t row, begin, end;
};

// Rows are at different places when ranks wait for each other, so each is shown around its own bad cell.
std::vector<Window> windows(const PipelineSchedule& schedule, const std::vector<Cell>& marked) {
  std::vector<Window> shown;
  for (std::size_t row = 0; row < schedule.rows.size(); ++row) {
    const auto near = std::find_if(marked.begin(), marked.end(), [&](const Cell& cell) {
      return row + around_row >= cell.row && row <= cell.row + around_row;
    });
    if (near == marked.end()) continue;
    const auto own           = std::find_if(marked.begin(), marked.end(), [&](const Cell& c) { return c.row == row; });
    const std::size_t column = own != marked.end() ? own->column : near->column;
    const std::size_t size   = schedule.rows[row].size();
    shown.push_back(
        {row, std::min(size, column - std::min(column, around_column)), std::min(size, column + around_column + 1)});
  }
  return shown;
}

}  // namespace

std::string grid_text(const PipelineSchedule& schedule, const std::vector<Cell>& marked) {
  const std::vector<Window> shown = windows(schedule, marked);
  std::size_t width               = 0;
  for (const Window& window : shown) {
    for (std::size_t i = window.begin; i < window.end; ++i)
      width = std::max(width, to_string(schedule.rows[window.row][i]).size() + 2);
  }
  std::string text;
  std::size_t next = 0;  // the first row that was not looked at
  for (const Window& window : shown) {
    const auto& actions = schedule.rows[window.row];
    if (window.row > next) text += "    ...\n";
    next             = window.row + 1;
    std::string line = str("    ", padded(str("rank ", window.row), 9));
    if (window.begin > 0) line += padded(str("... (", window.begin, ")"), 10);
    for (std::size_t i = window.begin; i < window.end; ++i) {
      const bool bad = contains(marked, {window.row, i});
      line += padded(str(bad ? "[" : " ", to_string(actions[i]), bad ? "]" : " "), width);
    }
    if (contains(marked, {window.row, actions.size()})) line += "[missing]";
    if (window.end < actions.size()) line += str(" ... (", actions.size() - window.end, ")");
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  if (!shown.empty() && next < schedule.rows.size()) text += "    ...\n";
  return text;
}

}  // namespace stepgraph
