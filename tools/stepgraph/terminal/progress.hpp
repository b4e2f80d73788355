#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>

namespace stepgraph::cli {

// The time of a step: the mean of the first ten steps, then a moving average, so that it follows the speed of a run.
class Pace {
 public:
  void add(double seconds);  // the time of one more step
  [[nodiscard]] double seconds_per_step() const noexcept { return mean_; }

 private:
  double mean_ = 0;
  int count_   = 0;
};

// The progress of a run.
struct ProgressState {
  std::int64_t done               = 0;  // steps
  std::int64_t total              = 1;
  std::optional<double> loss      = {};
  std::optional<double> rate      = {};  // of learning
  std::optional<double> grad_norm = {};
  double tokens_per_s             = 0;  // 0: not known
  double seconds_per_step         = 0;  // 0: not known
};

// "train 12/200 [==>      ] loss 5.4321  rate 0.0003  norm 1.25  12.3k tokens/s  1m 23s left", at most `columns`
// letters. On a narrow terminal the bar shrinks, then parts are left out in this order: bar, rate, speed, norm, loss,
// time left. `waited_s`: the time since the last step.
[[nodiscard]] std::string progress_text(std::string_view what, const ProgressState& state, int columns,
                                        bool with_bar = true, double waited_s = 0);
[[nodiscard]] std::string duration_text(double seconds);  // "7s", "1m 23s", "2h 05m", "3d 04h"

struct ProgressOptions {
  std::string what = "train";
  int log_lines    = 10;                      // at most, evenly over the steps, if stderr is not a terminal; 0: none
  std::chrono::milliseconds log_every{2000};  // the shortest time between them
  std::chrono::milliseconds redraw_every{100};
  std::chrono::milliseconds tick{1000};  // the time left is drawn again this often, also during a long step
};

// Shows progress on stderr. On a terminal it redraws one line and removes it at the end. Otherwise it prints a few
// plain lines. One thread at a time.
class Progress {
 public:
  explicit Progress(ProgressOptions options = {});
  ~Progress();
  Progress(const Progress&)            = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const ProgressState& state);
  void clear();                      // call it before printing; the next show() draws again
  void note(std::string_view line);  // a line on stderr that stays
  [[nodiscard]] bool has_terminal() const noexcept { return terminal_; }

 private:
  using Clock = std::chrono::steady_clock;
  void draw(Clock::time_point now);
  void run_ticks(const std::stop_token& ends);

  ProgressOptions options_;
  bool terminal_;
  std::int64_t logged_ = 0;
  std::mutex mutex_;  // of everything below
  bool drawn_                  = false;
  Clock::time_point last_draw_ = Clock::now(), last_step_ = last_draw_;
  ProgressState state_;
  std::condition_variable_any next_tick_;
  std::jthread ticker_;  // last: it uses the others
};

}  // namespace stepgraph::cli
