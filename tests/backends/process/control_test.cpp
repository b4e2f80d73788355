#include "backends/process/control.hpp"

#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "tests/backends/process/processes.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::testing::connected_pair;
using sg::testing::eventually;
using sg::testing::patient;

namespace {

constexpr auto long_time = 60s;  // a time-out that does not end in a test
// A time-out that ends. A process is blamed wrongly only if its control thread is late by nearly as much.
constexpr auto short_time = 1500ms;

// What the control threads of all processes have called.
struct Calls {
  void verdict(int rank, const std::string& line) {
    const std::lock_guard lock(mutex);
    lines[rank].push_back(line);
  }
  [[nodiscard]] std::vector<std::string> lines_of(int rank) {
    const std::lock_guard lock(mutex);
    return lines[rank];
  }

  std::mutex mutex;
  std::map<int, std::vector<std::string>> lines;
  std::atomic<int> num_overdue = 0, num_signals = 0;
  std::vector<std::string> notes;
};

// The control channels of a job. Each process has a progress that the test sets.
class Star {
 public:
  explicit Star(int size, std::chrono::milliseconds timeout = long_time, int num_connected = -1)
      : progress_(static_cast<std::size_t>(size)), num_beats_(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) {
      options.rank       = rank;
      options.size       = size;
      options.timeout    = timeout;
      options.progress   = [this, rank] { return progress(rank); };
      options.on_verdict = [this, rank](const sg::Verdict&, const std::string& line) { calls.verdict(rank, line); };
      options.on_overdue = [this] { ++calls.num_overdue; };
      options.on_signal  = [this](const sg::Progress&) { ++calls.num_signals; };
      options.on_note    = [this, rank](int from, const std::string& note) {
        const std::lock_guard lock(calls.mutex);
        calls.notes.push_back(std::to_string(from) + " to " + std::to_string(rank) + ": " + note);
      };
      all.push_back(std::make_unique<sg::Control>(options));
      if (rank > 0 && (num_connected < 0 || rank < num_connected)) connect(rank);
    }
  }

  void connect(int rank) {
    auto [here, there] = connected_pair();
    at(0).connect(rank, std::move(here));
    at(rank).connect(0, std::move(there));
  }

  [[nodiscard]] sg::Control& at(int rank) { return *all[static_cast<std::size_t>(rank)]; }
  void set(int rank, sg::Progress progress) {
    const std::lock_guard lock(mutex_);
    progress_[static_cast<std::size_t>(rank)] = std::move(progress);
  }
  [[nodiscard]] sg::Progress progress(int rank) {
    const std::lock_guard lock(mutex_);
    ++num_beats_[static_cast<std::size_t>(rank)];
    return progress_[static_cast<std::size_t>(rank)];
  }

  // Until every process has sent two more heartbeats: process 0 has read the first of each.
  [[nodiscard]] bool all_beat() {
    std::vector<int> wanted = num_beats();
    for (int& num : wanted) num += 2;
    return eventually([&] {
      const std::vector<int> now = num_beats();
      return std::equal(now.begin(), now.end(), wanted.begin(), std::greater_equal<>());
    });
  }
  [[nodiscard]] std::vector<int> num_beats() {
    const std::lock_guard lock(mutex_);
    return num_beats_;
  }

  // All but `gone` have one verdict: this one.
  void check_all_say(const std::string& text, int gone = -1) {
    for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
      if (rank == gone) continue;
      CAPTURE(rank);
      REQUIRE(eventually([&] { return at(rank).verdict().has_value(); }));
      CHECK(eventually([&] { return at(rank).interrupt().raised(); }));
      CHECK_THAT(at(rank).line(), ContainsSubstring(text));
      CHECK(at(rank).interrupt().why() == at(rank).line());
      CHECK(calls.lines_of(rank) == std::vector<std::string>{at(rank).line()});
    }
  }

  sg::ControlOptions options;
  Calls calls;

 private:
  std::mutex mutex_;
  std::vector<sg::Progress> progress_;
  std::vector<int> num_beats_;

 public:
  std::vector<std::unique_ptr<sg::Control>> all;  // ends first: its threads use the others
};

sg::Progress in_run(int num_computing, std::vector<sg::Wait> waits) {
  return {sg::Phase::run, 2, 5, num_computing, std::move(waits), "F mb0"};
}

}  // namespace

TEST_CASE("a process that dies is gone for all others", "[backends][process]") {
  const int dead = GENERATE(0, 1, 3);
  CAPTURE(dead);
  Star star(4, 2000ms);
  star.set(dead, in_run(1, {}));
  star.set(2, in_run(0, {{dead, "all_reduce g0"}}));
  // Process 0 hears it from the others, and they hear it from process 0.
  REQUIRE(star.all_beat());
  REQUIRE(star.all_beat());
  star.all[static_cast<std::size_t>(dead)].reset();
  star.check_all_say("rank " + std::to_string(dead) + " is gone (its connection closed)", dead);
  CHECK_THAT(star.at(2).line(), ContainsSubstring("'all_reduce g0' of rank 2 waited for rank"));
  CHECK_THAT(star.at(2).line(), ContainsSubstring("last known node of rank " + std::to_string(dead) + ": 'F mb0'"));
  CHECK(star.at(2).verdict()->kind == sg::VerdictKind::gone);
}

TEST_CASE("a process that fails says why, and all say so", "[backends][process]") {
  const int failing = GENERATE(0, 2);
  CAPTURE(failing);
  Star star(3);
  star.at(failing).fail("no memory");  // returns when all have written
  CHECK(star.at(failing).verdict().has_value());
  star.check_all_say("failed: no memory");
  CHECK_THAT(star.at(1).line(), ContainsSubstring("rank " + std::to_string(failing)));
  CHECK_THAT(star.at(failing).line(), ContainsSubstring("(this process)"));
  star.at(1).fail("a consequence");
  CHECK_THAT(star.at(1).line(), ContainsSubstring("no memory"));
}

TEST_CASE("no process leaves before all have written what they know", "[backends][process]") {
  Star star(4);
  star.at(3).fail("x");
  // The call has returned, so all have called on_verdict.
  for (int rank = 0; rank < 4; ++rank) CHECK(star.calls.lines_of(rank).size() == 1);
  while (!star.all.empty()) star.all.erase(star.all.begin());  // process 0 first: it is not blamed
  for (int rank = 0; rank < 4; ++rank) CHECK(star.calls.lines_of(rank).size() == 1);
  CHECK(star.calls.num_overdue == 0);
}

TEST_CASE("a process that is stopped is silent after the time-out", "[backends][process]") {
  Star star(3, short_time, 2);
  auto [here, there] = connected_pair();  // a rank 2 that says nothing
  star.at(0).connect(2, std::move(here));
  star.check_all_say("rank 2 is silent (for 1500 ms)", 2);
}

TEST_CASE("a silent process 0 is noticed by the others", "[backends][process]") {
  Star star(2, short_time, 1);
  auto [here, there] = connected_pair();  // a process 0 that says nothing
  star.at(1).connect(0, std::move(there));
  REQUIRE(eventually([&] { return star.at(1).verdict().has_value(); }));
  CHECK_THAT(star.at(1).line(), ContainsSubstring("rank 0 is silent (for 1500 ms)"));
}

TEST_CASE("a rank that finishes no node while another one waits for it is stuck", "[backends][process]") {
  Star star(4, short_time);
  star.set(0, in_run(0, {{1, "recv x"}}));
  star.set(1, in_run(0, {{2, "recv y"}}));
  star.set(2, in_run(1, {{0, "recv z"}}));
  star.check_all_say("rank 2");
  CHECK_THAT(star.at(1).line(), ContainsSubstring("rank 2 is stuck"));
  CHECK_THAT(star.at(1).line(), ContainsSubstring("'recv y' of rank 1 waited for rank 2"));
}

TEST_CASE("ranks that wait for each other are a deadlock", "[backends][process]") {
  Star star(3, short_time);
  star.set(1, in_run(0, {{2, "recv a"}}));
  star.set(2, in_run(0, {{1, "recv b"}}));
  star.check_all_say("deadlock: rank 1 waits for rank 2 in 'recv a', rank 2 waits for rank 1 in 'recv b'");
}

TEST_CASE("slow steps and work outside a run are no failure", "[backends][process]") {
  Star star(3, short_time);
  star.set(0, in_run(0, {{2, "recv"}, {1, "recv"}}));
  star.set(1, {.phase = sg::Phase::outside, .waits = {}});  // saves a model
  // Longer than the time-out; a node ends in every tenth of it.
  for (int turn = 0; turn < 15; ++turn) {
    sg::Progress slow = in_run(0, {{0, "recv"}});
    slow.nodes_done   = static_cast<std::uint64_t>(turn);
    star.set(2, slow);
    std::this_thread::sleep_for(short_time / 10);
  }
  for (int rank = 0; rank < 3; ++rank) CHECK(star.at(rank).line().empty());
}

TEST_CASE("a process that does not join is named, and one that joins late learns of it", "[backends][process]") {
  Star star(4, short_time, 2);
  REQUIRE(eventually([&] { return star.at(0).verdict().has_value() && star.at(1).verdict().has_value(); }));
  CHECK_THAT(star.at(0).line(), ContainsSubstring("rank 2 has not joined (within 1500 ms; missing: 2, 3)"));
  CHECK_THAT(star.at(1).line(), ContainsSubstring("rank 2 has not joined"));
  star.connect(2);
  REQUIRE(eventually([&] { return star.at(2).verdict().has_value(); }));
  CHECK_THAT(star.at(2).line(), ContainsSubstring("rank 2 (this process) has not joined"));
}

TEST_CASE("a process that does not fit ends the job for all", "[backends][process]") {
  Star star(3);
  star.at(0).misfit(7, "world size: rank 7 has 9, rank 0 has 3");
  star.check_all_say("world size: rank 7 has 9, rank 0 has 3");
}

TEST_CASE("a suspicion gets the verdict, or stays what it is", "[backends][process]") {
  Star star(3);
  std::string told;
  std::thread waiting([&] { told = star.at(1).suspect(2, "connection reset"); });
  star.all[2].reset();
  waiting.join();
  CHECK_THAT(told, ContainsSubstring("rank 2 is gone"));

  sg::ControlOptions alone = star.options;
  alone.rank               = 0;
  alone.size               = 1;
  alone.suspicion_time     = 50ms;
  sg::Control control(alone);
  CHECK(control.suspect(0, "connection reset") == "connection reset");
}

TEST_CASE("bytes of another protocol are a process that is gone", "[backends][process]") {
  Star star(3, long_time, 2);
  auto [here, there] = connected_pair();
  star.at(0).connect(2, std::move(here));
  const sg::Bytes wrong = GENERATE(sg::Bytes{std::byte{1}}, sg::Bytes{}, sg::Bytes(5, std::byte{2}));
  there.queue(wrong);
  CHECK(there.flush());
  star.check_all_say("rank 2 is gone", 2);
}

TEST_CASE("after good-byes no process is blamed", "[backends][process]") {
  const bool first_leaves_first = GENERATE(false, true);
  Star star(4, 2000ms);
  std::vector<int> clean(4);
  const auto errors = sg::testing::run_processes(4, [&](int rank) {
    if ((rank == 0) != first_leaves_first) std::this_thread::sleep_for(50ms);
    clean[static_cast<std::size_t>(rank)] = star.at(rank).bye();
  });
  CHECK(clean == std::vector<int>{1, 1, 1, 1});
  while (!star.all.empty()) {
    CHECK(star.all.back()->line().empty());
    star.all.pop_back();
  }
  CHECK(star.calls.lines.empty());
}

TEST_CASE("a note reaches all other processes once", "[backends][process]") {
  Star star(3);
  star.at(0).tell("a");
  star.at(2).tell("b");
  const auto num_notes = [&] {
    const std::lock_guard lock(star.calls.mutex);
    return star.calls.notes.size();
  };
  CHECK(eventually([&] { return num_notes() == 4; }));
  star.all.clear();
  std::sort(star.calls.notes.begin(), star.calls.notes.end());
  CHECK(star.calls.notes == std::vector<std::string>{"0 to 1: a", "0 to 2: a", "2 to 0: b", "2 to 1: b"});
}

TEST_CASE("a main thread that does not end after a verdict is overdue", "[backends][process]") {
  Star star(2);
  sg::ControlOptions options = star.options;
  options.rank               = 0;
  options.size               = 1;
  options.unwind_time        = 20ms;
  sg::Control control(options);
  control.fail("x");
  CHECK(eventually([&] { return star.calls.num_overdue == 1; }));
}

TEST_CASE("a report that blocks does not keep the process alive", "[backends][process]") {
  std::atomic<int> num_overdue = 0;
  std::atomic<bool> in_time    = false;
  sg::ControlOptions options;
  options.unwind_time = 20ms;
  options.on_overdue  = [&] { ++num_overdue; };
  options.on_verdict  = [&](const sg::Verdict&, const std::string&) {  // as a terminal that was stopped
    in_time = eventually([&] { return num_overdue > 0; });
  };
  {
    sg::Control control(options);
    control.fail("x");
  }
  CHECK(in_time);
  CHECK(num_overdue == 1);
}

TEST_CASE("a signal without a verdict is an ordinary interrupt, and with one it is part of the failure",
          "[backends][process]") {
  Star star(3);
  star.at(1).note_signal();
  CHECK(eventually([&] { return star.calls.num_signals == 1; }));
  star.at(1).note_signal();
  star.at(2).fail("x");
  star.check_all_say("rank 2");
  std::this_thread::sleep_for(500ms);
  CHECK(star.calls.num_signals == 1);
}
