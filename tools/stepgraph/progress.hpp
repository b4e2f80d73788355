#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace stepgraph::cli {

// The progress of a run.
struct ProgressState {
  std::int64_t done          = 0;  // steps
  std::int64_t total         = 1;
  std::optional<double> loss = {};
  double tokens_per_s        = 0;  // 0: not known
  double seconds             = 0;  // since the start
};

// "train 12/200 [==>           ] loss 5.4321  12.3k tokens/s  1m 23s left", at most `columns` letters. On a narrow
// terminal the bar shrinks, then parts are left out in this order: bar, speed, loss, time left.
[[nodiscard]] std::string progress_text(std::string_view what, const ProgressState& state, int columns,
                                        bool with_bar = true);
[[nodiscard]] std::string duration_text(double seconds);  // "7s", "1m 23s", "2h 05m", "3d 04h"

struct ProgressOptions {
  std::string what = "train";
  int log_lines    = 10;                      // at most, evenly over the steps, if stderr is not a terminal; 0: none
  std::chrono::milliseconds log_every{2000};  // the shortest time between them
  std::chrono::milliseconds redraw_every{100};
};

// Shows progress on stderr. On a terminal it redraws one line and removes it at the end. Otherwise it prints a few
// plain lines.
class Progress {
 public:
  explicit Progress(ProgressOptions options = {});
  ~Progress() { clear(); }
  Progress(const Progress&)            = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const ProgressState& state);
  void clear();                      // call it before printing; the next show() draws again
  void note(std::string_view line);  // a line on stderr that stays

 private:
  using Clock = std::chrono::steady_clock;

  ProgressOptions options_;
  bool terminal_;
  bool drawn_                  = false;
  Clock::time_point last_draw_ = Clock::now();
  std::int64_t logged_         = 0;
};

}  // namespace stepgraph::cli
