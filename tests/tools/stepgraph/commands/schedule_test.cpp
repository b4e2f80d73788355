#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <filesystem>

#include "graphs/schedule/csv.hpp"
#include "graphs/schedule/kinds.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

namespace {

sg::testing::Outcome run_schedule(const std::string& arguments) {
  return sg::testing::run_stepgraph("schedule " + arguments);
}

// The JSON lines of a run that succeeds and prints nothing else.
std::vector<sg::JsonValue> lines_of(const std::string& arguments) {
  const auto outcome = run_schedule(arguments + " --json");
  CAPTURE(arguments, outcome.err);
  REQUIRE(outcome.exit_code == 0);
  return sg::testing::json_lines(outcome.out);
}

sg::JsonValue line_of(const std::string& arguments) {
  const auto lines = lines_of(arguments);
  REQUIRE(lines.size() == 1);
  return lines.front();
}

void check_refused(const std::string& arguments, const std::string& why) {
  CAPTURE(arguments);
  const auto outcome = run_schedule(arguments);
  CHECK(outcome.exit_code == 2);
  CHECK(outcome.out.empty());
  CHECK_THAT(outcome.err, StartsWith("stepgraph schedule") && ContainsSubstring(why));
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
  const auto line = line_of("--kind interleaved --stages 4 --microbatches 8 --chunks 2 --costs 1,1,1,0 --retain 0.5");
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
  const sg::testing::TempFolder folder;
  const std::string csv = (folder / "s.csv").string(), svg = (folder / "s.svg").string();
  const auto files = run_schedule("--kind zb-h1 --stages 3 --microbatches 4 --json --csv " + csv + " --svg " + svg);
  CHECK(files.exit_code == 0);
  CHECK(sg::read_csv(csv) == sg::parse_csv(piped.out));
  CHECK_THAT(sg::testing::file_bytes(svg), StartsWith("<svg") && ContainsSubstring("2W3"));
  CHECK(run_schedule("--kind zb-h1 --stages 3 --microbatches 4 --csv /nowhere/at/all.csv").exit_code == 2);
}

TEST_CASE("schedule reads the CSV files that it writes", "[tools][schedule]") {
  const sg::testing::TempFolder folder;
  const std::string csv = (folder / "s.csv").string(), again = (folder / "again.csv").string();
  const std::string kind = "--kind interleaved --stages 2 --microbatches 4 --chunks 2 --costs 1,2,3,0.5";
  const auto before      = line_of(kind + " --csv " + csv),
             after       = line_of("--from " + csv + " --costs 1,2,3,0.5 --csv " + again);
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
  check_refused("--from " + (folder / "deadlock.csv").string(), "1B0");
  check_refused("--from " + (folder / "junk.csv").string(), "row 2, column 1");
  check_refused("--from " + (folder / "folder.csv").string(), "is a folder");
  check_refused("--from " + (folder / "none.csv").string(), "there is no such file");
  check_refused("--from " + csv + " --kind 1f1b", "--kind: cannot be combined with --from (the file has the order)");
  check_refused("--from " + csv + " --stages 2", "--stages: cannot be combined with --from");
  check_refused("--from " + csv + " --microbatches 4", "--microbatches: cannot be combined with --from");
  check_refused("--from " + csv + " --chunks 2", "--chunks: cannot be combined with --from");
  check_refused("--kind 1f1b --stages 4", "--microbatches: missing");
  check_refused("--kind 1f1b --microbatches 4", "--stages: missing");
}

TEST_CASE("schedule makes V kinds with two chunks", "[tools][schedule]") {
  const auto line = line_of("--kind zb-v --stages 4 --microbatches 8");
  CHECK(line.at("chunks") == 2);
  CHECK(line.at("total_stages") == 8);
  CHECK(std::abs(line.at("bubble_rate").as_real()) < 1e-12);
  CHECK(line.at("peak_activation") == std::vector<double>(4, 4));
  CHECK(line_of("--kind zb-v --stages 4 --microbatches 8 --chunks 2") == line);
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

  std::vector<std::string> kinds;
  for (const sg::JsonValue& line : lines_of(list)) {
    CHECK(line.at("type") == "schedule");
    kinds.emplace_back(line.at("kind").text);
    if (kinds.back() == "zb-v") CHECK(line == line_of("--kind zb-v" + numbers));  // as alone
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
  const auto line = line_of(search + " --csv " + csv);
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
  const auto again = line_of("--from " + csv + " --costs 29.718,29.444,19.927,0.527 --retain 0.4376");
  CHECK(again.at("bubble_rate") == line.at("bubble_rate"));
  CHECK(again.at("peak_activation") == line.at("peak_activation"));

  const auto text = run_schedule(search);
  CHECK(text.exit_code == 0);
  CHECK_THAT(text.out, ContainsSubstring("auto: 8 ranks, 8 stages, 24 microbatches") &&
                           ContainsSubstring(", limit 16") && ContainsSubstring("lower bound     0.0012 (proved") &&
                           ContainsSubstring("found by"));

  const std::string any =
      "--compare 1f1b,zb-v,auto --stages 4 --microbatches 8 --limit 4 --chunks any --seed 3 --budget 1";
  std::vector<double> rates;
  for (const sg::JsonValue& one : lines_of(any)) rates.push_back(one.at("bubble_rate").as_real());
  REQUIRE(rates.size() == 3);
  CHECK(rates[2] <= rates[1]);
  CHECK(rates[2] <= rates[0]);
  CHECK_THAT(run_schedule(any).out, ContainsSubstring("peak activation  lower bound  above it\n") &&
                                        ContainsSubstring("     0.0000    0.0000\n"));
}

TEST_CASE("schedule marks kinds above the limit in a comparison, and says when time ran out",
          "[tools][schedule][search]") {
  const auto table = run_schedule("--compare 1f1b,v-min,auto --stages 6 --microbatches 8 --limit 4 --budget 1");
  REQUIRE(table.exit_code == 0);
  CHECK_THAT(table.out, ContainsSubstring(" 6 > 4"));
  CHECK(std::count(table.out.begin(), table.out.end(), '>') == 1);
  const auto late =
      run_schedule("--kind auto --stages 40 --microbatches 80 --costs 1,1.2,0.6,0.1 --budget 0.001 --json");
  CHECK(late.exit_code == 0);
  CHECK_THAT(late.err, ContainsSubstring("auto: the search was cut short by its budget of 0.001 s"));
  CHECK(sg::parse_json(late.out).at("out_of_time") == true);
}

TEST_CASE("schedule takes costs of each rank and of each stage", "[tools][schedule][search]") {
  const std::string numbers = " --stages 2 --microbatches 4 --costs ";
  const auto alike          = line_of("--kind 1f1b" + numbers + "1,2,1,0.5");
  const auto by_rank        = line_of("--kind 1f1b" + numbers + "1,2,1,0.5/1,2,1,0.5");
  CHECK(by_rank.at("makespan") == alike.at("makespan"));
  CHECK(by_rank.at("costs").items.size() == 2);
  CHECK(by_rank.at("costs").items[1] == alike.at("costs"));
  CHECK(line_of("--kind 1f1b" + numbers + "1,2,1,0.5/2,2,1,0.5").at("longest_span").as_real() >
        alike.at("longest_span").as_real());
  // The last stage has a head: rank 0 has it in V placement, and a small first stage.
  const std::string stages = "0.5,0.5,0.5,0/1,1,1,0/1,1,1,0/1.5,1.5,1.5,0";
  const auto lines         = lines_of("--compare zb-v,auto --chunks 2" + numbers + stages);
  REQUIRE(lines.size() == 2);
  CHECK(lines[1].at("longest_span").as_real() <= lines[0].at("longest_span").as_real() * (1 + 1e-12));
  // Costs of four stages leave nothing to search with one chunk.
  const auto any = run_schedule("--kind auto --chunks any" + numbers + stages);
  CHECK_THAT(any.out, ContainsSubstring("(proved for two chunks, looped or V placement;"));
  check_refused("--kind 1f1b" + numbers + "1,1,1,0/1,1,1,0/1,1,1,0", "3 costs for 2 ranks and 2 stages");
  check_refused("--kind 1f1b" + numbers + "1,1,1,0/", "--costs '': four numbers");
}

TEST_CASE("schedule refuses impossible requests with exit code 2 and the reason", "[tools][schedule][refuses]") {
  for (const auto& [arguments, why] : {
           std::pair{"--kind 1f1p --stages 4 --microbatches 8",
                     "stepgraph schedule: unknown kind '1f1p' (did you mean 1f1b? known: round-robin, sequential, "
                     "gpipe, 1f1b, "
                     "interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v, auto)"},
           std::pair{"--kind zbv --stages 4 --microbatches 8", "unknown kind 'zbv' (did you mean zb-v? "},
           std::pair{"--kind atuo --stages 4 --microbatches 8", "unknown kind 'atuo' (did you mean auto? "},
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
           std::pair{"--kind auto --stages 4 --microbatches 8 --limit 0.5", "--limit 0.5: at least 1"},
           std::pair{"--kind auto --stages 4 --microbatches 8 --limit 0", "--limit 0: at least 1"},
           std::pair{"--kind auto --stages 4 --microbatches 8 --limit 8GiB",
                     "--limit 8GiB: not a number of microbatches (4, 2.5; bytes are for pipeline.limit"},
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
    // One thread reads the arguments: AddressSanitizer watches all refusals.
    static int seen = 0;
    if (sg::testing::sanitizer() == sg::testing::Sanitizer::thread && sg::testing::left_out(seen, 8)) continue;
    check_refused(arguments, why);
  }
}
