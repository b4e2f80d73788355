#include "tools/stepgraph/terminal/progress.hpp"

#include <unistd.h>

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/processes/pseudo_terminal.hpp"

namespace cli = stepgraph::cli;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using stepgraph::testing::last_line;
using stepgraph::testing::TerminalForStderr;

namespace {

constexpr cli::ProgressState half{.done             = 50,
                                  .total            = 100,
                                  .loss             = 5.4321,
                                  .rate             = 3e-4,
                                  .grad_norm        = 1.2468,
                                  .tokens_per_s     = 12'345,
                                  .seconds_per_step = 1.66};

// Redirects stderr into a pipe and returns what was written.
class StderrInPipe {
 public:
  StderrInPipe() {
    if (pipe(ends_) != 0) throw std::runtime_error("no pipe");
    before_ = dup(STDERR_FILENO);
    dup2(ends_[1], STDERR_FILENO);
    close(ends_[1]);
  }
  std::string close_and_read() {
    dup2(before_, STDERR_FILENO);  // the last writing end of the pipe
    close(before_);
    std::string text;
    char block[4096];
    for (ssize_t size; (size = read(ends_[0], block, sizeof block)) > 0;)
      text.append(block, static_cast<std::size_t>(size));
    close(ends_[0]);
    return text;
  }

 private:
  int ends_[2] = {}, before_ = -1;
};

}  // namespace

TEST_CASE("progress shows the step, the loss, the rate, the norm, the speed and the time left", "[tools][progress]") {
  CHECK(cli::progress_text("train", half, 93) ==
        "train 50/100 [======>     ]  loss 5.4321  rate 0.0003  norm 1.25  12.3k tokens/s  1m 23s left");
  CHECK(cli::progress_text("train", {.done = 100, .total = 100, .loss = 1, .seconds_per_step = 3}, 80) ==
        "train 100/100 [========================================]  loss 1");
  CHECK(cli::progress_text("eval", {.done = 0, .total = 7}, 30) == "eval 0/7 [>                  ]");
}

TEST_CASE("progress fits the columns and leaves out the least important parts first", "[tools][progress]") {
  for (int columns = 0; columns <= 200; ++columns) {
    CAPTURE(columns);
    CHECK(cli::progress_text("train", half, columns).size() <= static_cast<std::size_t>(columns));
  }
  CHECK(cli::progress_text("train", half, 80) ==
        "train 50/100  loss 5.4321  rate 0.0003  norm 1.25  12.3k tokens/s  1m 23s left");
  CHECK(cli::progress_text("train", half, 70) == "train 50/100  loss 5.4321  norm 1.25  12.3k tokens/s  1m 23s left");
  CHECK(cli::progress_text("train", half, 50) == "train 50/100  loss 5.4321  norm 1.25  1m 23s left");
  CHECK(cli::progress_text("train", half, 39) == "train 50/100  loss 5.4321  1m 23s left");
  CHECK(cli::progress_text("train", half, 27) == "train 50/100  1m 23s left");
  CHECK(cli::progress_text("train", half, 12) == "train 50/100");
  CHECK(cli::progress_text("train", half, 7) == "train 5");
}

TEST_CASE("the time left goes down during a step, and follows the speed of the run", "[tools][progress]") {
  const auto left = [](double seconds_per_step, double waited_s) {
    return cli::progress_text("train", {.done = 8, .total = 10, .seconds_per_step = seconds_per_step}, 30, false,
                              waited_s);
  };
  CHECK(left(60, 0) == "train 8/10  2m 00s left");
  CHECK(left(60, 25) == "train 8/10  1m 35s left");
  CHECK(left(60, 500) == "train 8/10  1m 00s left");  // a slow step; the one after it is still to come
  cli::Pace pace;
  pace.add(9);
  CHECK(pace.seconds_per_step() == 9);
  pace.add(1);
  CHECK(pace.seconds_per_step() == 5);
  for (int step = 0; step < 100; ++step) pace.add(2);
  CHECK(pace.seconds_per_step() < 2.01);
  for (int step = 0; step < 30; ++step) pace.add(4);
  CHECK(pace.seconds_per_step() > 3.8);
}

TEST_CASE("durations are short", "[tools][progress]") {
  CHECK(cli::duration_text(0) == "0s");
  CHECK(cli::duration_text(6.1) == "7s");
  CHECK(cli::duration_text(59.5) == "1m 00s");
  CHECK(cli::duration_text(3599) == "59m 59s");
  CHECK(cli::duration_text(7500) == "2h 05m");
  CHECK(cli::duration_text(273'600) == "3d 04h");
  CHECK(cli::duration_text(std::numeric_limits<double>::infinity()) == "forever");
}

TEST_CASE("on a terminal progress redraws one line and removes it at the end", "[tools][progress]") {
  std::vector<std::string> lines;
  std::string all;
  {
    TerminalForStderr terminal(50);
    {
      cli::Progress progress({.redraw_every = std::chrono::milliseconds(0), .tick = std::chrono::hours(1)});
      for (const int columns : {50, 50, 40, 20, 70}) {
        terminal.resize(columns);
        progress.show(
            {.done = static_cast<std::int64_t>(lines.size()) + 1, .total = 9, .loss = 2.5, .seconds_per_step = 4});
        all += terminal.written();
        lines.push_back(last_line(all));
        if (lines.back().size() >= static_cast<std::size_t>(columns)) lines.back() += " (too long)";
      }
      progress.note("a word");
      all += terminal.written();
      lines.push_back(last_line(all));
      progress.show({.done = 6, .total = 9});
    }
    all += terminal.written();
  }
  CHECK(lines == std::vector<std::string>{
                     "train 1/9 [=>               ]  loss 2.5  32s left",
                     "train 2/9 [===>             ]  loss 2.5  28s left",
                     "train 3/9  loss 2.5  24s left",
                     "train 4/9  20s left",
                     "train 5/9 [====================>                ]  loss 2.5  16s left",
                     "",
                 });
  CHECK(std::count(all.begin(), all.end(), '\n') == 1);
  CHECK_THAT(all, ContainsSubstring("\r\x1b[Ka word\r\n"));
  CHECK(last_line(all).empty());
}

TEST_CASE("on a terminal progress is not drawn more often than it can be read", "[tools][progress]") {
  std::string all;
  {
    TerminalForStderr terminal(80);
    cli::Progress progress({.redraw_every = std::chrono::hours(1), .tick = std::chrono::hours(1)});
    for (int step = 1; step <= 1000; ++step) progress.show({.done = step, .total = 1000});
    all = terminal.written();
  }
  CHECK(std::count(all.begin(), all.end(), '\r') == 2);  // the first and the last
}

TEST_CASE("on a terminal the time left is drawn again while a step runs", "[tools][progress]") {
  std::string all;
  {
    TerminalForStderr terminal(80);
    cli::Progress progress({.tick = std::chrono::milliseconds(200)});
    progress.show({.done = 1, .total = 9, .seconds_per_step = 3000});
    while (std::count(all.begin(), all.end(), '\r') < 4) all += terminal.written();
    progress.clear();
    const std::string rest = terminal.written();
    all += rest;
    CHECK(terminal.written().empty());  // nothing is drawn before the next step
  }
  CHECK(last_line(all).empty());
  CHECK_THAT(all, ContainsSubstring("train 1/9 [") && ContainsSubstring("6h "));
}

TEST_CASE("without a terminal progress is a few plain lines at most", "[tools][progress]") {
  for (const auto& [total, log_lines, expected] :
       {std::tuple{1000, 10, 10}, std::tuple{3, 10, 3}, std::tuple{17, 10, 10}, std::tuple{1000, 0, 0}}) {
    CAPTURE(total, log_lines);
    StderrInPipe pipe;
    {
      cli::Progress progress({.what = "eval", .log_lines = log_lines, .log_every = std::chrono::milliseconds(0)});
      for (int step = 1; step <= total; ++step) progress.show({.done = step, .total = total});
    }
    const std::string text = pipe.close_and_read();
    CHECK(std::count(text.begin(), text.end(), '\n') == expected);
    CHECK(text.find_first_of("\r\x1b[") == text.npos);
    if (expected > 0) CHECK_THAT(text, StartsWith("eval ") && ContainsSubstring(std::to_string(total) + "/"));
  }
}

TEST_CASE("without a terminal a short run prints no progress", "[tools][progress]") {
  StderrInPipe pipe;
  {
    cli::Progress progress({.log_every = std::chrono::hours(1)});
    for (int step = 1; step <= 100; ++step) progress.show({.done = step, .total = 100});
  }
  CHECK(pipe.close_and_read().empty());
}

TEST_CASE("a dumb terminal gets plain lines", "[tools][progress]") {
  std::string all;
  {
    TerminalForStderr terminal(80, "dumb");
    cli::Progress progress({.log_lines = 2, .log_every = std::chrono::milliseconds(0)});
    for (int step = 1; step <= 10; ++step) progress.show({.done = step, .total = 10});
    all = terminal.written();
  }
  CHECK(std::count(all.begin(), all.end(), '\n') == 2);
  CHECK(all.find('\x1b') == all.npos);
}
