#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "graphs/schedule/csv.hpp"
#include "graphs/schedule/kinds.hpp"
#include "tests/support/command_run.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

namespace {

sg::testing::Outcome run_schedule(const std::string& arguments) {
  return sg::testing::run_stepgraph("schedule " + arguments);
}

}  // namespace

TEST_CASE("schedule prints one JSON line with the promised fields and nothing else", "[tools][schedule]") {
  const auto outcome =
      run_schedule("--kind zb-h2 --stages 8 --microbatches 24 --costs 18.522,18.086,9.337,0.601 --json");
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  const auto line = sg::parse_json(outcome.out);
  CHECK(std::count(outcome.out.begin(), outcome.out.end(), '\n') == 1);
  CHECK(line.at("type") == "schedule");
  CHECK(line.at("kind") == "zb-h2");
  CHECK(line.at("stages") == 8);
  CHECK(line.at("microbatches") == 24);
  CHECK(line.at("valid") == true);
  CHECK(line.at("peak_activation") == std::vector<double>(8, 15));
  CHECK(std::abs(line.at("bubble_rate").as_real() - 0.1083) < 0.00005);
  CHECK(line.at("makespan").as_real() >= line.at("longest_span").as_real());
}

TEST_CASE("schedule counts chunks as shares of a rank", "[tools][schedule]") {
  const auto outcome =
      run_schedule("--kind interleaved --stages 4 --microbatches 8 --chunks 2 --costs 1,1,1,0 --json --retain 0.5");
  REQUIRE(outcome.exit_code == 0);
  const auto line = sg::parse_json(outcome.out);
  CHECK(line.at("chunks") == 2);
  CHECK(line.at("makespan") == 8 * 3 + 3 * 3 / 2.0);
  CHECK(line.at("peak_activation") == std::vector<double>{5.5, 4.5, 3.5, 2.5});
}

TEST_CASE("schedule draws plain text when piped", "[tools][schedule]") {
  const auto outcome = run_schedule("--kind 1f1b --stages 2 --microbatches 3");
  REQUIRE(outcome.exit_code == 0);
  CHECK_THAT(outcome.out, ContainsSubstring("rank 0  F0 F1 ......B0--- F2 B1--- ...B2---") &&
                              ContainsSubstring("bubble rate     0.2500") && ContainsSubstring("valid"));
  CHECK(outcome.out.find('\x1b') == std::string::npos);
}

TEST_CASE("schedule writes CSV and SVG", "[tools][schedule]") {
  const auto piped = run_schedule("--kind zb-h1 --stages 3 --microbatches 4 --csv -");
  REQUIRE(piped.exit_code == 0);
  CHECK(sg::parse_csv(piped.out) == sg::pipeline_schedule(sg::ScheduleKind::zb_h1, {.ranks = 3, .microbatches = 4}));
  const auto folder = std::filesystem::temp_directory_path() / ("stepgraph-schedule-" + std::to_string(std::rand()));
  std::filesystem::create_directory(folder);
  const std::string csv = (folder / "s.csv").string(), svg = (folder / "s.svg").string();
  const auto files = run_schedule("--kind zb-h1 --stages 3 --microbatches 4 --json --csv " + csv + " --svg " + svg);
  CHECK(files.exit_code == 0);
  CHECK(sg::read_csv(csv) == sg::parse_csv(piped.out));
  std::ifstream file(svg);
  std::ostringstream text;
  text << file.rdbuf();
  CHECK_THAT(text.str(), StartsWith("<svg") && ContainsSubstring("2W3"));
  std::filesystem::remove_all(folder);
  CHECK(run_schedule("--kind zb-h1 --stages 3 --microbatches 4 --csv /nowhere/at/all.csv").exit_code == 2);
}

TEST_CASE("schedule reads the CSV files that it writes", "[tools][schedule]") {
  const sg::testing::TempFolder folder;
  const std::string csv = (folder / "s.csv").string(), again = (folder / "again.csv").string();
  const std::string kind = "--kind interleaved --stages 2 --microbatches 4 --chunks 2 --costs 1,2,3,0.5 --json";
  const auto made        = run_schedule(kind + " --csv " + csv);
  REQUIRE(made.exit_code == 0);
  const auto read = run_schedule("--from " + csv + " --costs 1,2,3,0.5 --json --csv " + again);
  CAPTURE(read.err);
  REQUIRE(read.exit_code == 0);
  const auto before = sg::parse_json(made.out), after = sg::parse_json(read.out);
  CHECK(after.at("kind") == "csv");
  CHECK(after.at("file") == csv);
  for (const char* field : {"stages", "microbatches", "chunks", "total_stages", "costs", "bubble_rate", "makespan",
                            "longest_span", "peak_activation", "valid", "weights_in_order"})
    CHECK(after.at(field) == before.at(field));
  CHECK(sg::testing::file_bytes(again) == sg::testing::file_bytes(csv));
  CHECK_THAT(run_schedule("--from " + csv).out, StartsWith(csv + ": 2 ranks, 4 stages, 4 microbatches;"));

  folder.put("deadlock.csv", "0F0,0B0\n1B0,1F0\n");
  folder.put("junk.csv", "0F0,0B0\nhello\n");
  std::filesystem::create_directory(folder / "folder.csv");
  const auto refused = [&](const std::string& arguments, const std::string& why) {
    const auto outcome = run_schedule(arguments);
    CAPTURE(arguments);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring(why));
  };
  refused("--from " + (folder / "deadlock.csv").string(), "1B0");
  refused("--from " + (folder / "junk.csv").string(), "row 2, column 1");
  refused("--from " + (folder / "folder.csv").string(), "is a folder");
  refused("--from " + (folder / "none.csv").string(), "there is no such file");
  refused("--from " + csv + " --kind 1f1b", "--kind: cannot be combined with --from (the file has the order)");
  refused("--from " + csv + " --stages 2", "--stages: cannot be combined with --from");
  refused("--from " + csv + " --microbatches 4", "--microbatches: cannot be combined with --from");
  refused("--from " + csv + " --chunks 2", "--chunks: cannot be combined with --from");
  refused("--kind 1f1b --stages 4", "--microbatches: missing");
  refused("--kind 1f1b --microbatches 4", "--stages: missing");
}

TEST_CASE("schedule makes V kinds with two chunks", "[tools][schedule]") {
  const auto outcome = run_schedule("--kind zb-v --stages 4 --microbatches 8 --json");
  REQUIRE(outcome.exit_code == 0);
  const auto line = sg::parse_json(outcome.out);
  CHECK(line.at("chunks") == 2);
  CHECK(line.at("total_stages") == 8);
  CHECK(std::abs(line.at("bubble_rate").as_real()) < 1e-12);
  CHECK(line.at("peak_activation") == std::vector<double>(4, 4));
  CHECK(run_schedule("--kind zb-v --stages 4 --microbatches 8 --chunks 2 --json").out == outcome.out);
}

TEST_CASE("schedule compares kinds in one table and one picture", "[tools][schedule]") {
  const sg::testing::TempFolder folder;
  const std::string svg = (folder / "all.svg").string(), dot = (folder / "all.dot").string();
  const std::string csv = (folder / "mine.csv").string(), numbers = " --stages 4 --microbatches 8";
  REQUIRE(run_schedule("--kind zb-h1" + numbers + " --csv " + csv).exit_code == 0);
  const std::string list = "--compare 1f1b,zb-h1,zb-v,v-min,interleaved," + csv + numbers + " --chunks 2";
  const auto table       = run_schedule(list + " --svg " + svg + " --dot " + dot);
  CAPTURE(table.err);
  REQUIRE(table.exit_code == 0);
  CHECK_THAT(table.out, StartsWith("kind ") && ContainsSubstring("bubble rate") &&
                            ContainsSubstring("peak activation") && ContainsSubstring("\n1f1b ") &&
                            ContainsSubstring(" 0.2727 ") && ContainsSubstring("\nzb-v ") &&
                            ContainsSubstring(" 0.0000 "));
  CHECK(std::count(table.out.begin(), table.out.end(), '\n') == 7);
  // One picture: six panels, one axis.
  const auto count = [](const std::string& text, const std::string& what) {
    int times = 0;
    for (std::size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++times;
    return times;
  };
  const std::string picture = sg::testing::file_bytes(svg);
  CHECK(count(picture, "<svg") == 1);
  CHECK(count(picture, ">rank 3<") == 6);
  CHECK(count(picture, "bubble rate") == 6);
  CHECK(count(picture, ">0</text>") == 1);
  CHECK(count(sg::testing::file_bytes(dot), "digraph") == 6);

  const auto lines = run_schedule(list + " --json");
  REQUIRE(lines.exit_code == 0);
  std::istringstream each(lines.out);
  std::vector<std::string> kinds;
  for (std::string text; std::getline(each, text);) {
    const auto line = sg::parse_json(text);
    CHECK(line.at("type") == "schedule");
    kinds.emplace_back(line.at("kind").text);
    // As alone.
    if (kinds.back() == "zb-v") CHECK(text + "\n" == run_schedule("--kind zb-v" + numbers + " --json").out);
    if (kinds.back() == "csv") CHECK(line.at("file") == csv);
  }
  CHECK(kinds == std::vector<std::string>{"1f1b", "zb-h1", "zb-v", "v-min", "interleaved", "csv"});
}

TEST_CASE("schedule writes the graph of a schedule", "[tools][schedule]") {
  const auto outcome = run_schedule("--kind v-half --stages 2 --microbatches 2 --dot -");
  REQUIRE(outcome.exit_code == 0);
  CHECK_THAT(outcome.out, StartsWith("digraph") && ContainsSubstring("v-half, 2 ranks, 4 stages, 2 microbatches"));
}

TEST_CASE("schedule searches for a schedule within a limit, and prints a bound", "[tools][schedule][search]") {
  const sg::testing::TempFolder folder;
  const std::string csv = (folder / "searched.csv").string();
  const std::string search =
      "--kind auto --stages 8 --microbatches 24 --costs 29.718,29.444,19.927,0.527 "
      "--retain 0.4376 --limit 16";
  const auto outcome = run_schedule(search + " --json --csv " + csv);
  REQUIRE(outcome.exit_code == 0);
  const auto line = sg::parse_json(outcome.out);
  CHECK(line.at("kind") == "auto");
  CHECK(line.at("chunks") == 1);
  CHECK(line.at("valid") == true);
  CHECK(line.at("limit") == 16);
  CHECK(line.at("weights_in_order") == true);
  const double rate = line.at("bubble_rate").as_real(), bound = line.at("lower_bound").as_real();
  CHECK(rate < 0.0029);  // the paper's ZB-2p
  CHECK(bound <= rate);
  CHECK(std::abs(line.at("distance").as_real() - (rate - bound)) < 1e-12);
  // The file is a schedule like any other.
  const auto again = run_schedule("--from " + csv + " --costs 29.718,29.444,19.927,0.527 --retain 0.4376 --json");
  REQUIRE(again.exit_code == 0);
  CHECK(sg::parse_json(again.out).at("bubble_rate") == line.at("bubble_rate"));
  CHECK(sg::parse_json(again.out).at("peak_activation") == line.at("peak_activation"));

  const auto text = run_schedule(search);
  CHECK(text.exit_code == 0);
  CHECK_THAT(text.out, ContainsSubstring("auto: 8 ranks, 8 stages, 24 microbatches") &&
                           ContainsSubstring(", limit 16") && ContainsSubstring("lower bound     0.0012 (proved") &&
                           ContainsSubstring("found by"));

  const auto any = run_schedule(
      "--compare 1f1b,zb-v,auto --stages 4 --microbatches 8 --limit 4 --chunks any --seed 3 "
      "--budget 1 --json");
  REQUIRE(any.exit_code == 0);
  std::istringstream lines(any.out);
  std::vector<double> rates;
  for (std::string one; std::getline(lines, one);) rates.push_back(sg::parse_json(one).at("bubble_rate").as_real());
  REQUIRE(rates.size() == 3);
  CHECK(rates[2] <= rates[1]);
  CHECK(rates[2] <= rates[0]);
}

TEST_CASE("schedule refuses impossible requests with exit code 2 and the reason", "[tools][schedule][refuses]") {
  for (const auto& [arguments, why] : {
           std::pair{"--kind 1f1p --stages 4 --microbatches 8",
                     "stepgraph schedule: unknown kind '1f1p' (known: round-robin, sequential, gpipe, 1f1b, "
                     "interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v, auto)"},
           std::pair{"--stages 4 --microbatches 8", "--kind: missing"},
           std::pair{"--limit 4", "--kind: missing"},
           std::pair{"--limit 4 --stages 4 --microbatches 8", "--kind: missing"},
           std::pair{"--kind 1f1b --stages 0 --microbatches 8", "--stages"},
           std::pair{"--kind 1f1b --stages four --microbatches 8", "--stages"},
           std::pair{"--kind 1f1b --stages 4 --microbatches -1", "--microbatches"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --chunks 2", "2 chunks (1;"},
           std::pair{"--kind interleaved --stages 4 --microbatches 6 --chunks 2", "(microbatches a multiple of 4)"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --limit 4", "--limit 4"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --budget 4", "--budget 4: nothing is searched"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --seed 4", "--seed 4: nothing is searched"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --chunks any", "--chunks any: not a number from 1"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --chunks 0", "--chunks 0: not a number from 1"},
           std::pair{"--kind auto --stages 4 --microbatches 8 --chunks 3", "--chunks 3: too many for auto"},
           std::pair{"--compare interleaved,auto --stages 4 --microbatches 8 --chunks 4",
                     "--chunks 4: too many for auto"},
           std::pair{"--kind auto --stages 4 --microbatches 8 --limit 0.5", "auto: a limit of 0.5 (at least 1"},
           std::pair{"--kind auto --stages 4 --microbatches 8 --budget 0", "--budget"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --retain 1.5", "--retain"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --costs 1,1,1", "F,I,W,COMM"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --costs 1,1,1,0,2", "F,I,W,COMM"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --costs 1,1,1,", "F,I,W,COMM"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --costs 1,1,1x,0", "F,I,W,COMM"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --costs 1,-1,1,0", "F,I,W,COMM"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --costs 1,nan,1,0", "F,I,W,COMM"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --costs 0,0,0,1", "all 0"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --json --csv -", "both write to stdout"},
           std::pair{"--kind gpipe --stages 100000 --microbatches 100000", "too many"},
           std::pair{"--kind v-min --stages 4 --microbatches 8 --chunks 3", "v-min: 3 chunks (2: "},
           std::pair{"--compare 1f1b,zb-h3 --stages 4 --microbatches 8", "unknown kind 'zb-h3'"},
           std::pair{"--compare 1f1b,,zb-h1 --stages 4 --microbatches 8", "a name is empty"},
           std::pair{"--compare 1f1b,1f1b --stages 4 --microbatches 8", "1f1b is given twice"},
           std::pair{"--compare 1f1b,interleaved --stages 4 --microbatches 6 --chunks 2",
                     "interleaved: 6 microbatches with 2 chunks on 4 ranks (microbatches a multiple of 4)"},
           std::pair{"--compare 1f1b,zb-v --stages 4", "--microbatches: missing"},
           std::pair{"--compare 1f1b --kind zb-v --stages 4 --microbatches 8",
                     "--kind: cannot be combined with --compare"},
           std::pair{"--compare 1f1b --from a.csv", "--from: cannot be combined with --compare"},
           std::pair{"--compare 1f1b --csv - --stages 4 --microbatches 8", "--csv: cannot be combined with --compare"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --json --dot -", "both write to stdout"},
           std::pair{"--kind 1f1b --stages 4 --microbatches 8 --svg a --dot a", "both write a (two files)"},
           std::pair{"--kind gpipe --stages 2 --microbatches 2 --chunks 1048576", "too many (at most 2^21 in all"},
       }) {
    CAPTURE(arguments);
    const auto outcome = run_schedule(arguments);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph schedule") && ContainsSubstring(why));
  }
}
