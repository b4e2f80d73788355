#include "tools/stepgraph/session/search_line.hpp"

#include <iomanip>
#include <iostream>
#include <sstream>

#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {

std::string search_text(const SearchProgress& progress) {
  std::ostringstream out;
  out << "auto " << std::fixed << std::setprecision(1) << progress.elapsed_s << " s  bubble rate "
      << std::setprecision(4) << progress.bubble_rate << "  bound " << progress.lower_bound_rate << "  "
      << progress.doing;
  return out.str();
}

SearchLine::SearchLine(bool keep_result) : keep_result_(keep_result), terminal_(stderr_can_redraw()) {}

SearchLine::~SearchLine() { clear(); }

void SearchLine::clear() {
  if (drawn_) std::cerr << clear_line << std::flush;
  drawn_ = false;
}

void SearchLine::show(const SearchProgress& progress) {
  if (progress.is_result) {
    clear();
    next_s_ = 10;
    if (keep_result_) std::cerr << search_text(progress) << std::endl;
    return;
  }
  if (terminal_) {
    // The last column stays empty: some terminals wrap when it is written.
    const std::string line = search_text(progress);
    std::cerr << "\r" << line.substr(0, static_cast<std::size_t>(stderr_columns() - 1)) << "\x1b[K" << std::flush;
    drawn_ = true;
  } else if (progress.elapsed_s >= next_s_) {
    next_s_ = progress.elapsed_s + 10;
    std::cerr << search_text(progress) << std::endl;
  }
}

}  // namespace stepgraph::cli
