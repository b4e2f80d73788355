#include "tools/stepgraph/terminal/progress.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <system_error>
#include <vector>

#include "engine/base/error.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

std::string speed_text(double per_s) {
  for (const auto& [unit, letter] : {std::pair{1e9, "G"}, std::pair{1e6, "M"}, std::pair{1e3, "k"}}) {
    if (per_s >= unit) return str(short_number(per_s / unit, 3), letter, " tokens/s");
  }
  return str(short_number(per_s, 3), " tokens/s");
}

std::string bar_text(double share, int width) {
  const int filled = std::clamp(static_cast<int>(share * width), 0, width);
  std::string bar(static_cast<std::size_t>(filled), '=');
  if (filled < width) bar += '>';
  bar.resize(static_cast<std::size_t>(width), ' ');
  return "[" + bar + "]";
}

}  // namespace

std::string duration_text(double seconds) {
  if (!(seconds < 1e9)) return "forever";
  const auto s   = static_cast<long long>(std::ceil(seconds));
  const auto two = [](long long number) { return str(number < 10 ? "0" : "", number); };
  if (s < 60) return str(s, "s");
  if (s < 3600) return str(s / 60, "m ", two(s % 60), "s");
  if (s < 86400) return str(s / 3600, "h ", two(s % 3600 / 60), "m");
  return str(s / 86400, "d ", two(s % 86400 / 3600), "h");
}

void Pace::add(double seconds) {
  constexpr int most = 10;
  count_             = std::min(count_ + 1, most);
  mean_ += (seconds - mean_) / count_;
}

std::string progress_text(std::string_view what, const ProgressState& state, int columns, bool with_bar,
                          double waited_s) {
  const double share = static_cast<double>(state.done) / static_cast<double>(std::max<std::int64_t>(state.total, 1));
  const std::string head = str(what, " ", state.done, "/", state.total);
  // In the order of printing. The part with the highest number is left out first.
  struct Part {
    int goes;
    std::string text;
  };
  std::vector<Part> parts;
  if (state.loss) parts.push_back({2, "loss " + short_number(*state.loss, 5)});
  if (state.rate) parts.push_back({5, "rate " + short_number(*state.rate, 3)});
  if (state.grad_norm) parts.push_back({3, "norm " + short_number(*state.grad_norm, 3)});
  if (state.tokens_per_s > 0) parts.push_back({4, speed_text(state.tokens_per_s)});
  if (state.seconds_per_step > 0 && state.done < state.total) {
    // The running step is subtracted as it goes on, but never by more than the time of a usual step.
    const double left_s = static_cast<double>(state.total - state.done) * state.seconds_per_step -
                          std::min(waited_s, state.seconds_per_step);
    parts.push_back({1, duration_text(left_s) + " left"});
  }
  const auto tail = [&] {
    std::string text;
    for (const Part& part : parts) text += "  " + part.text;
    return text;
  };
  const auto room = [&] { return columns - static_cast<int>(head.size() + tail().size()); };
  while (room() < 0 && !parts.empty()) {
    parts.erase(
        std::max_element(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.goes < b.goes; }));
  }
  constexpr int smallest_bar = 8, largest_bar = 40, around = 3;  // a blank and two brackets
  const int bar          = std::min(room() - around, largest_bar);
  const std::string line = str(head, with_bar && bar >= smallest_bar ? str(" ", bar_text(share, bar)) : "", tail());
  return line.substr(0, static_cast<std::size_t>(std::max(columns, 0)));
}

Progress::Progress(ProgressOptions options) : options_(std::move(options)), terminal_(stderr_can_redraw()) {
  if (!terminal_) return;
  try {
    ticker_ = std::jthread([this](const std::stop_token& ends) { run_ticks(ends); });
  } catch (const std::system_error&) {  // no more threads: the line is drawn after each step only
  }
}

Progress::~Progress() {
  ticker_ = {};  // ends the thread
  clear();
}

void Progress::show(const ProgressState& state) {
  const auto now = Clock::now();
  if (!terminal_) {
    // Line k of n is printed when k / n of the steps are done.
    const std::int64_t lines = std::min<std::int64_t>(options_.log_lines, state.total);
    if (lines <= 0 || state.done * lines < (logged_ + 1) * state.total || now - last_draw_ < options_.log_every) return;
    logged_    = state.done * lines / state.total;
    last_draw_ = now;
    std::cerr << progress_text(options_.what, state, 79, false) << std::endl;
    return;
  }
  const std::lock_guard lock(mutex_);
  state_     = state;
  last_step_ = now;
  if (drawn_ && now - last_draw_ < options_.redraw_every && state.done < state.total) return;
  draw(now);
}

void Progress::draw(Clock::time_point now) {
  last_draw_          = now;
  drawn_              = true;
  const double waited = std::chrono::duration<double>(now - last_step_).count();
  // The last column stays empty: some terminals wrap when it is written.
  std::cerr << str("\r", progress_text(options_.what, state_, stderr_columns() - 1, true, waited), "\x1b[K")
            << std::flush;
}

void Progress::run_ticks(const std::stop_token& ends) {
  std::unique_lock lock(mutex_);
  while (!next_tick_.wait_for(lock, ends, options_.tick, [&] { return ends.stop_requested(); })) {
    if (drawn_) draw(Clock::now());
  }
}

void Progress::clear() {
  const std::lock_guard lock(mutex_);
  if (!drawn_) return;
  std::cerr << clear_line << std::flush;
  drawn_ = false;
}

void Progress::note(std::string_view line) {
  clear();
  std::cerr << line << std::endl;
}

}  // namespace stepgraph::cli
