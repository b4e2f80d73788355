#include "backends/process/verdict.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "backends/process/message.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr auto timeout = 1000ms;
const sg::Deadline now{1000s};

// A rank in a run.
sg::ProcessRecord busy(std::chrono::milliseconds without_node, int num_computing, std::vector<sg::Wait> waits) {
  sg::ProcessRecord row;
  row.joined   = true;
  row.heard    = now - 50ms;
  row.advanced = now - without_node;
  row.progress = {.phase         = sg::Phase::run,
                  .run           = 3,
                  .nodes_done    = 17,
                  .num_computing = num_computing,
                  .waits         = std::move(waits),
                  .last_node     = "F mb0"};
  return row;
}

sg::ProcessRecord healthy() { return busy(10ms, 1, {}); }

std::optional<sg::Verdict> judged(const std::vector<sg::ProcessRecord>& table) {
  return sg::judge(table, now, timeout);
}

std::string line(const std::vector<sg::ProcessRecord>& table, int my_rank = 9, const sg::Progress& mine = {}) {
  const std::optional<sg::Verdict> verdict = judged(table);
  return verdict ? sg::line_of(*verdict, my_rank, mine) : "none";
}

}  // namespace

TEST_CASE("no rank is blamed while all make progress", "[backends][process]") {
  CHECK(line({healthy(), healthy(), healthy()}) == "none");
  CHECK(line({busy(5000ms, 1, {}), healthy()}) == "none");                          // slow, but no rank waits for it
  CHECK(line({busy(5000ms, 0, {{1, "recv"}}), healthy()}) == "none");               // waits for one that makes progress
  CHECK(line({busy(999ms, 0, {{1, "a"}}), busy(999ms, 0, {{0, "b"}})}) == "none");  // not yet
  std::vector<sg::ProcessRecord> table = {busy(5000ms, 0, {{1, "recv"}}), busy(5000ms, 0, {})};
  table[1].progress.phase              = sg::Phase::outside;  // it saves a model, say
  CHECK(line(table) == "none");
  table[1].joined = false;  // not there yet
  CHECK(line(table) == "none");
  CHECK(line({busy(5000ms, 0, {{7, "no such rank"}, {-1, "x"}})}) == "none");
}

TEST_CASE("rule 1: a closed connection without a good-bye is a rank that is gone", "[backends][process]") {
  std::vector<sg::ProcessRecord> table = {busy(10ms, 0, {{2, "all_reduce g0"}}), healthy(), healthy()};
  table[2].closed                      = true;
  CHECK(
      line(table) ==
      "rank 2 is gone (its connection closed); 'all_reduce g0' of rank 0 waited for rank 2; last known node of rank 2: "
      "'F mb0' (17 done in run 3)");
  table[2].progress = {};  // no heartbeat of a run came
  CHECK(line(table) ==
        "rank 2 is gone (its connection closed); 'all_reduce g0' of rank 0 waited for rank 2; no node of rank 2 is "
        "known");
  table[1].failed      = "lost rank 2";  // a consequence
  table[1].failed_turn = 1;
  CHECK_THAT(line(table), ContainsSubstring("rank 2 is gone"));
  table[1].failed.clear();
  table[2].left = true;
  CHECK(line(table) == "none");
}

TEST_CASE("rule 2: a report of a failure, the first of several", "[backends][process]") {
  std::vector<sg::ProcessRecord> table = {healthy(), healthy(), healthy()};
  table[1].failed                      = "second";
  table[1].failed_turn                 = 2;
  table[2].failed                      = "no memory";
  table[2].failed_turn                 = 1;
  table[2].closed                      = true;  // it has left since
  CHECK(line(table) == "rank 2 failed: no memory; last known node of rank 2: 'F mb0' (17 done in run 3)");
  table[2].heard = now - 5000ms;
  CHECK(judged(table)->kind == sg::VerdictKind::failed);
  table[2].progress = {};
  CHECK(line(table) == "rank 2 failed: no memory");  // perhaps not in a run

  // A rank that failed because another one has aborted the run.
  table              = {healthy(), healthy(), healthy()};
  table[1].failed    = "the step was aborted by process 2: no memory";
  table[1].failed_by = 2;
  CHECK_THAT(line(table), ContainsSubstring("rank 2 failed: the step was aborted by process 2: no memory"));
  table[2].failed      = "no memory";
  table[2].failed_turn = 1;
  CHECK_THAT(line(table), ContainsSubstring("rank 2 failed: no memory"));
}

TEST_CASE("rule 3: no heartbeat for the time-out", "[backends][process]") {
  std::vector<sg::ProcessRecord> table = {healthy(), healthy(), healthy()};
  table[1].progress.phase              = sg::Phase::outside;
  table[1].heard                       = now - 999ms;
  CHECK(line(table) == "none");
  table[1].heard = now - 1000ms;
  CHECK_THAT(line(table), ContainsSubstring("rank 1 is silent (for 1000 ms)"));
  table[1].left = true;
  CHECK(line(table) == "none");
  table[0].heard = now - 9000ms;  // of itself process 0 does not hear
  CHECK(line(table) == "none");
}

TEST_CASE("rule 4: the rank at the end of the waits is stuck, not those that wait", "[backends][process]") {
  // 0 waits for 1, 1 for 2, and 2 computes.
  std::vector<sg::ProcessRecord> table = {busy(2000ms, 0, {{1, "recv x"}}), busy(2000ms, 0, {{2, "recv y"}}),
                                          busy(2000ms, 1, {})};
  CHECK(line(table) ==
        "rank 2 is stuck (it finishes no node); 'recv y' of rank 1 waited for rank 2; last known node of rank 2: 'F "
        "mb0' (17 "
        "done in run 3)");
  // It computes on one lane and waits on another.
  table[2] = busy(2000ms, 1, {{0, "recv z"}});
  CHECK_THAT(line(table), ContainsSubstring("rank 2 is stuck"));
  // It does nothing.
  table[2] = busy(2000ms, 0, {});
  CHECK_THAT(line(table), ContainsSubstring("rank 2 is stuck"));
  // Process 0 itself.
  CHECK_THAT(line({busy(2000ms, 1, {}), busy(2000ms, 0, {{0, "recv"}})}), ContainsSubstring("rank 0 is stuck"));
  // A rank that waits need not be stuck itself.
  CHECK_THAT(line({busy(10ms, 1, {{1, "recv"}}), busy(2000ms, 1, {})}), ContainsSubstring("rank 1 is stuck"));
  // Of two, the one that has been stuck longer.
  CHECK_THAT(line({busy(2000ms, 0, {{1, "a"}, {2, "b"}}), busy(2000ms, 1, {}), busy(2500ms, 1, {})}),
             ContainsSubstring("rank 2 is stuck"));
}

TEST_CASE("rule 4: a stopped rank is silent, although it waited when it was heard last", "[backends][process]") {
  std::vector<sg::ProcessRecord> table = {busy(1000ms, 0, {{1, "recv a"}}), busy(1000ms, 0, {{0, "recv b"}})};
  table[1].heard                       = now - 990ms;
  CHECK_THAT(line(table), ContainsSubstring("rank 1 is silent (for 990 ms)"));
}

TEST_CASE("rule 4: ranks that wait only for each other are a deadlock", "[backends][process]") {
  std::vector<sg::ProcessRecord> table = {healthy(), busy(2000ms, 0, {{2, "recv b"}}), busy(1500ms, 0, {{3, "recv c"}}),
                                          busy(1500ms, 0, {{1, "recv a"}}), busy(2000ms, 0, {{1, "recv d"}})};
  CHECK(
      line(table) ==
      "deadlock: rank 1 waits for rank 2 in 'recv b', rank 2 waits for rank 3 in 'recv c', rank 3 waits for rank 1 in "
      "'recv a'");
  CHECK(judged(table)->rank == 1);
  // One of them also waits for a rank that makes progress. What comes from there may end the cycle.
  table[3].progress.waits.push_back({0, "recv e"});
  CHECK(line(table) == "none");
  // A rank that waits for itself.
  CHECK_THAT(line({healthy(), busy(2000ms, 0, {{1, "x"}})}), ContainsSubstring("rank 1 waits for rank 1"));
}

TEST_CASE("rule 4: ranks in one operation are stuck, not a deadlock", "[backends][process]") {
  std::vector<sg::ProcessRecord> table = {busy(1500ms, 0, {{1, "recv"}}), busy(1500ms, 0, {{2, "sum"}}),
                                          busy(2000ms, 0, {{1, "sum"}})};
  CHECK_THAT(line(table), ContainsSubstring("rank 2 is stuck") && ContainsSubstring("'sum' of rank 1 waited"));
  // Another wait of them closes a cycle.
  table[1].progress.waits.push_back({0, "recv y"});
  CHECK(line(table) == "deadlock: rank 0 waits for rank 1 in 'recv', rank 1 waits for rank 0 in 'recv y'");
}

TEST_CASE("rule 4: there is no deadlock while a rank may be silent", "[backends][process]") {
  std::vector<sg::ProcessRecord> table = {busy(1500ms, 0, {{1, "a"}}), busy(1500ms, 0, {{0, "b"}}), healthy()};
  CHECK_THAT(line(table), ContainsSubstring("deadlock"));
  table[2].heard = now - 600ms;
  CHECK(line(table) == "none");
  table[2].heard = now - 1000ms;
  CHECK_THAT(line(table), ContainsSubstring("rank 2 is silent"));
}

TEST_CASE("a rank that has left while another one waits for it is gone", "[backends][process]") {
  std::vector<sg::ProcessRecord> table = {busy(2000ms, 0, {{1, "recv"}}), healthy()};
  table[1].left                        = true;
  CHECK_THAT(line(table), ContainsSubstring("rank 1 is gone (has left the job); 'recv' of rank 0 waited for rank 1"));
  table[0].advanced = now;
  CHECK(line(table) == "none");
}

TEST_CASE("many ranks that wait are judged quickly", "[backends][process]") {
  // Each waits for the next eight; the last makes progress. Following all paths would never end.
  std::vector<sg::ProcessRecord> table;
  const int size = 1000;
  for (int rank = 0; rank < size; ++rank) {
    std::vector<sg::Wait> waits;
    for (int i = 1; i <= 8 && rank + i < size; ++i) waits.push_back({rank + i, "recv"});
    table.push_back(busy(2000ms, 0, waits));
  }
  table.back() = healthy();
  CHECK(line(table) == "none");
  table.back() = busy(2000ms, 1, {});
  CHECK_THAT(line(table), ContainsSubstring("rank 999 is stuck"));
}

TEST_CASE("a line names the node of the process that prints it", "[backends][process]") {
  std::vector<sg::ProcessRecord> table = {busy(10ms, 0, {{2, "node of 0"}}), healthy(), healthy()};
  table[2].closed                      = true;
  const sg::Progress mine{.waits = {{0, "first"}, {2, "second"}}};
  CHECK_THAT(line(table, 1, mine), ContainsSubstring("'second' of rank 1 waited for rank 2"));
  CHECK_THAT(line(table, 2), ContainsSubstring("rank 2 (this process) is gone"));
  table[0].progress.waits.clear();
  const sg::Progress chain{.waits = {{0, "first"}}};
  CHECK_THAT(line(table, 1, chain), ContainsSubstring("'first' of rank 1 waited for rank 0"));
}

TEST_CASE("progress and verdicts arrive as they were sent, with long names cut", "[backends][process]") {
  sg::Progress progress = busy(0ms, 2, {{1, "a"}, {-1, ""}}).progress;
  sg::MessageWriter to;
  sg::write(to, progress);
  sg::MessageReader from(to.bytes());
  CHECK(sg::read_progress(from) == progress);

  progress.waits.assign(20, {4, std::string(300, 'n')});
  sg::MessageWriter long_one;
  sg::write(long_one, progress);
  CHECK(long_one.bytes().size() < 1000);
  sg::MessageReader cut(long_one.bytes());
  CHECK(sg::read_progress(cut).waits == std::vector<sg::Wait>(8, {4, std::string(77, 'n') + "..."}));

  const sg::Verdict verdict{.kind         = sg::VerdictKind::deadlock,
                            .rank         = 5,
                            .text         = "text",
                            .run          = 7,
                            .nodes_done   = 8,
                            .last_node    = "last",
                            .waiting_rank = 2,
                            .waiting_node = "node",
                            .cycle        = {{5, {6, "x"}}, {6, {5, "y"}}}};
  sg::MessageWriter verdict_to;
  sg::write(verdict_to, verdict);
  sg::MessageReader verdict_from(verdict_to.bytes());
  CHECK(sg::read_verdict(verdict_from) == verdict);
  for (std::size_t size = 0; size < verdict_to.bytes().size(); ++size) {
    sg::MessageReader shorter(std::span(verdict_to.bytes()).first(size));
    CHECK_THROWS_AS(sg::read_verdict(shorter), sg::Error);
  }
}
