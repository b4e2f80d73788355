#include "backends/process/flight.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <chrono>
#include <filesystem>
#include <set>

#include "engine/base/error.hpp"
#include "tests/backends/process/processes.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using sg::testing::error_of;
using sg::testing::file_bytes;
using sg::testing::TempFolder;

namespace {

sg::Flight flight(int rank, std::vector<sg::Wait> waits, int size = 4) {
  sg::Flight flight{.rank = rank, .size = size, .line = "rank 2 is gone"};
  flight.progress = {sg::Phase::run, 3, 17, 0, std::move(waits), "F \"mb0\"\n"};
  flight.lanes    = {{"compute", "gemm", {{"first", 1.5}, {"second", 0.25}}}, {"tp", "", {}}};
  return flight;
}

void write_all(const TempFolder& folder, const std::vector<sg::Flight>& flights) {
  for (const sg::Flight& one : flights) sg::write_flight(folder.path().string(), one);
}

}  // namespace

TEST_CASE("a report is written as JSON and as a table, and read again", "[backends][process]") {
  const TempFolder folder;
  const std::string inner = (folder / "a/b").string();  // it is made
  sg::write_flight(inner, flight(1, {{2, "all_reduce g0"}, {3, "recv"}}, 8));
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(inner)) names.insert(entry.path().filename().string());
  CHECK(names == std::set<std::string>{"rank-1.json", "rank-1.txt"});

  const sg::FlightReport report = sg::read_flights(inner);
  REQUIRE(report.flights.size() == 1);
  CHECK(report.size == 8);
  CHECK(report.flights[0].rank == 1);
  CHECK(report.flights[0].line == "rank 2 is gone");
  CHECK(report.flights[0].progress == flight(1, {{2, "all_reduce g0"}, {3, "recv"}}).progress);
  CHECK(report.missing == std::vector<int>{0, 2, 3, 4, 5, 6, 7});

  const std::string table = file_bytes(inner + "/rank-1.txt");
  CHECK_THAT(table, ContainsSubstring("rank 1 of 8: rank 2 is gone\n"));
  CHECK_THAT(table, ContainsSubstring("waits for rank 2 in 'all_reduce g0'"));
  CHECK_THAT(table, ContainsSubstring(
                        "\ncompute\n      1.50 s ago  first\n      250 ms ago  second\n         running  gemm\n"));
  CHECK_THAT(file_bytes(inner + "/rank-1.json"), ContainsSubstring("\"ago_s\":0.25"));
}

TEST_CASE("a report replaces an older one", "[backends][process]") {
  const TempFolder folder;
  write_all(folder, {flight(0, {}), flight(0, {{1, "recv"}})});
  CHECK(sg::read_flights(folder.path().string()).flights.at(0).progress.waits.size() == 1);
}

TEST_CASE("reports tell which rank waits for which, and which are missing", "[backends][process]") {
  const TempFolder folder;
  write_all(folder,
            {flight(0, {{1, "recv x"}}), flight(1, {{2, "recv y"}}), flight(3, {{0, "recv z"}, {2, "recv w"}})});
  const sg::FlightReport report = sg::read_flights(folder.path().string());
  CHECK(report.missing == std::vector<int>{2});
  CHECK(report.awaited == std::vector<int>{2});
  CHECK(report.cycles.empty());
  const std::string text = sg::to_text(report);
  CHECK_THAT(text, ContainsSubstring("3 of 4 ranks have reported\nmissing: rank 2\n"));
  CHECK_THAT(text, ContainsSubstring("ranks 0, 1, 3 say: rank 2 is gone\n"));
  CHECK_THAT(
      text, ContainsSubstring("rank 1: run 3, 17 nodes done") && ContainsSubstring("; waits for rank 2 in 'recv y'\n"));
  CHECK_THAT(text, ContainsSubstring("waits end at rank 2, which is missing\n"));
}

TEST_CASE("a rank that others wait for and that waits for none is named", "[backends][process]") {
  const TempFolder folder;
  sg::Flight busy             = flight(1, {});
  busy.progress.num_computing = 1;
  write_all(folder, {flight(0, {{1, "recv"}}, 2)});
  busy.size = 2;
  write_all(folder, {busy});
  CHECK_THAT(sg::to_text(sg::read_flights(folder.path().string())),
             ContainsSubstring("computes 1") && ContainsSubstring("waits end at rank 1, which waits for none"));
}

TEST_CASE("cycles of waits are found", "[backends][process][flight]") {
  const TempFolder folder;
  for (sg::Flight one : {flight(0, {{1, "a"}}), flight(1, {{2, "b"}}), flight(2, {{1, "c"}}), flight(3, {{3, "d"}})}) {
    one.line = "deadlock: ...";
    write_all(folder, {one});
  }
  const sg::FlightReport report = sg::read_flights(folder.path().string());
  CHECK(report.cycles == std::vector<std::vector<sg::Verdict::Link>>{{{1, {2, "b"}}, {2, {1, "c"}}}, {{3, {3, "d"}}}});
  CHECK(report.awaited.empty());
  CHECK_THAT(sg::to_text(report),
             ContainsSubstring("cycle: rank 1 waits for rank 2 in 'b', rank 2 waits for rank 1 in 'c'\n"));
}

TEST_CASE("ranks in one operation are no cycle, and the waits end at one that is missing",
          "[backends][process][flight]") {
  const TempFolder folder;
  // Rank 5 of 8 was killed; none of the reports names it.
  const std::string op = "all_reduce gradient layer2 s1 mb0";
  for (const int rank : {0, 1, 2, 3, 4}) write_all(folder, {flight(rank, {}, 8)});
  write_all(folder, {flight(6, {{7, op}}, 8), flight(7, {{6, op}}, 8)});
  const sg::FlightReport report = sg::read_flights(folder.path().string());
  CHECK(report.cycles.empty());
  CHECK(report.awaited == std::vector<int>{2, 5});  // rank 2 is gone by the lines
  const std::string text = sg::to_text(report);
  CHECK_THAT(text, !ContainsSubstring("cycle:"));
  CHECK_THAT(text, ContainsSubstring("waits end at rank 2, which is gone or silent\n"
                                     "waits end at rank 5, which is missing\n"));
}

TEST_CASE("there is no cycle where a rank is missing or silent", "[backends][process][flight]") {
  const TempFolder folder;
  const auto with_line = [](sg::Flight one, const std::string& line) {
    one.line = line;
    return one;
  };
  for (const int rank : {0, 1})
    write_all(folder, {with_line(flight(rank, {{1 - rank, rank == 0 ? "a" : "b"}}, 3), "rank 2 is silent (for 1 s)")});
  sg::FlightReport report = sg::read_flights(folder.path().string());
  CHECK(report.cycles.empty());
  CHECK(report.awaited == std::vector<int>{2});
  write_all(folder, {flight(2, {{0, "c"}}, 3)});  // it was stopped, and went on
  report = sg::read_flights(folder.path().string());
  CHECK(report.cycles.empty());
  CHECK_THAT(sg::to_text(report), ContainsSubstring("waits end at rank 2, which is gone or silent\n"));
}

TEST_CASE("waits can end in an operation that all its ranks have entered", "[backends][process][flight]") {
  const TempFolder folder;
  for (sg::Flight one : {flight(0, {{1, "recv"}}, 3), flight(1, {{2, "sum"}}, 3), flight(2, {{1, "sum"}}, 3)}) {
    one.line = "rank 1 is stuck (it finishes no node)";
    write_all(folder, {one});
  }
  const sg::FlightReport report = sg::read_flights(folder.path().string());
  CHECK(report.cycles.empty());
  CHECK(report.awaited == std::vector<int>{1, 2});
  CHECK_THAT(sg::to_text(report),
             ContainsSubstring("waits end at rank 1, which is in one operation with those that it waits for\n"));
}

TEST_CASE("long chains of waits are followed", "[backends][process]") {
  const TempFolder folder;
  constexpr int size = 300;
  for (int rank = 0; rank + 1 < size; ++rank) {
    sg::Flight one = flight(rank, {{rank + 1, "recv"}}, size);
    one.line       = "rank 299 is gone";
    write_all(folder, {one});
  }
  const sg::FlightReport report = sg::read_flights(folder.path().string());
  CHECK(report.awaited == std::vector<int>{size - 1});
  CHECK(report.missing == std::vector<int>{size - 1});
  CHECK(report.cycles.empty());
}

TEST_CASE("files that are not reports are named, and the others are used", "[backends][process]") {
  const TempFolder folder;
  write_all(folder, {flight(0, {})});
  const std::string whole = file_bytes(folder / "rank-0.json");
  folder.put("rank-1.json", whole.substr(0, whole.size() / 2));
  folder.put("rank-2.json", "{}");
  folder.put("rank-3.json", whole);  // of rank 0
  folder.put("rank-9.json", "[1]");
  folder.put("notes.json", "{");
  const sg::FlightReport report = sg::read_flights(folder.path().string());
  CHECK(report.flights.size() == 1);
  CHECK(report.missing == std::vector<int>{1, 2, 3});
  REQUIRE(report.unread.size() == 4);
  CHECK_THAT(report.unread[0], ContainsSubstring("rank-1.json: "));
  CHECK_THAT(report.unread[2], ContainsSubstring("rank-3.json: the report of another rank"));
}

TEST_CASE("a folder without reports, or with those of two jobs, is refused", "[backends][process]") {
  const TempFolder folder;
  CHECK_THAT(error_of([&] { static_cast<void>(sg::read_flights(folder.path().string())); }),
             ContainsSubstring("has no report"));
  CHECK_THAT(error_of([&] { static_cast<void>(sg::read_flights((folder / "absent").string())); }),
             ContainsSubstring("absent: "));
  write_all(folder, {flight(0, {}, 2), flight(1, {}, 3)});
  CHECK_THAT(error_of([&] { static_cast<void>(sg::read_flights(folder.path().string())); }),
             ContainsSubstring("reports of different jobs"));
}

TEST_CASE("reports of an earlier job in the folder are not mixed with those of the last one", "[backends][process]") {
  const TempFolder folder;
  const auto of = [](const std::string& job, sg::Flight one, const std::string& line) {
    one.job  = job;
    one.line = line;
    return one;
  };
  write_all(folder, {of("first", flight(0, {}, 3), "old"), of("first", flight(1, {}, 3), "old")});
  for (const char* name : {"rank-0.json", "rank-1.json"})
    fs::last_write_time(folder / name, fs::last_write_time(folder / name) - std::chrono::hours(1));
  write_all(folder, {of("second", flight(0, {}, 2), "new")});
  const sg::FlightReport report = sg::read_flights(folder.path().string());
  CHECK(report.size == 2);
  REQUIRE(report.flights.size() == 1);
  CHECK(report.flights[0].line == "new");
  CHECK(report.missing == std::vector<int>{1});
  CHECK(report.older == std::vector<int>{1});
  CHECK_THAT(sg::to_text(report), ContainsSubstring("not used, of another job: rank 1\n"));
}

TEST_CASE("a report that cannot be written leaves nothing behind", "[backends][process]") {
  const TempFolder folder;
  const fs::path file = folder.put("file", "x");
  CHECK_THAT(error_of([&] { sg::write_flight(file.string(), flight(0, {})); }),
             ContainsSubstring("file: cannot be made"));
  fs::create_directory(folder / "rank-0.json");  // in the way
  CHECK_THAT(error_of([&] { sg::write_flight(folder.path().string(), flight(0, {})); }),
             ContainsSubstring("rank-0.json: cannot be written"));
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.path())) names.insert(entry.path().filename().string());
  CHECK(names == std::set<std::string>{"file", "rank-0.json"});
}
