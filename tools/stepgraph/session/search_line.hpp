#pragma once
#include "graphs/schedule/search.hpp"

namespace stepgraph::cli {

// The progress of a search for a schedule, on stderr. On a terminal it redraws one line and removes it at the end.
// Otherwise it prints a line every ten seconds.
class SearchLine {
 public:
  // `keep_result`: prints a line with the result of each search, which stays.
  explicit SearchLine(bool keep_result = false);
  ~SearchLine();
  SearchLine(const SearchLine&)            = delete;
  SearchLine& operator=(const SearchLine&) = delete;

  void show(const SearchProgress& progress);

 private:
  void clear();

  bool keep_result_, terminal_;
  bool drawn_    = false;
  double next_s_ = 10;
};

// "auto 1.2 s  bubble rate 0.0131  bound 0.0120  one chunk: moves"
[[nodiscard]] std::string search_text(const SearchProgress& progress);

}  // namespace stepgraph::cli
