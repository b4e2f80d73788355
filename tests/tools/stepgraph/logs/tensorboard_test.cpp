#include "tools/stepgraph/logs/tensorboard.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>
#include <set>

#include "engine/base/error.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/event_file.hpp"

namespace sg  = stepgraph;
namespace cli = stepgraph::cli;
using sg::testing::Event;
using sg::testing::EventValue;
using sg::testing::parse_events;

namespace {

// In the order of their names, in which TensorBoard reads them.
std::vector<std::vector<Event>> files_of(const std::filesystem::path& folder) {
  std::set<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.insert(entry.path());
  std::vector<std::vector<Event>> files;
  for (const auto& path : paths) files.push_back(parse_events(sg::testing::file_bytes(path)));
  return files;
}

}  // namespace

TEST_CASE("the reader of event files computes CRC-32C", "[tools][log]") {
  CHECK(sg::testing::crc32c("123456789") == 0xe3069283U);  // RFC 3720, B.4 and the catalogue of CRCs
  CHECK(sg::testing::crc32c(std::string(32, '\0')) == 0x8a9136aaU);
}

TEST_CASE("an event file has the values of steps and evaluations", "[tools][log]") {
  const sg::testing::TempFolder folder;
  const std::string target = (folder / "runs/one").string();
  {
    cli::TensorboardFile file(target, 0);
    file.add(
        cli::StepRecord{.step = 0, .loss = 5.25, .rate = 1e-3, .grad_norm = 1.5, .tokens_per_s = 1e6, .seconds = 1});
    file.add(cli::EvalRecord{.step = std::int64_t{1} << 40, .loss = 4.5, .seconds = 2});
  }
  const auto files = files_of(target);
  REQUIRE(files.size() == 1);
  const std::vector<Event>& events = files[0];
  REQUIRE(events.size() == 4);
  CHECK(std::filesystem::directory_iterator(target)->path().filename().string().starts_with("events.out.tfevents."));
  CHECK(events[0].file_version == "brain.Event:2");
  CHECK(events[1].session_status == 1);
  CHECK(events[1].step == 0);
  CHECK(events[2].step == 0);
  CHECK(events[2].values ==
        std::vector<EventValue>{
            {"train/loss", 5.25F}, {"train/rate", 1e-3F}, {"train/grad_norm", 1.5F}, {"train/tokens_per_s", 1e6F}});
  CHECK(events[3].step == std::int64_t{1} << 40);
  CHECK(events[3].values == std::vector<EventValue>{{"eval/loss", 4.5F}});
  for (const Event& event : events) CHECK(event.wall_time > 1.6e9);
}

TEST_CASE("a resumed run adds an event file that begins with a start mark at its first step", "[tools][log]") {
  const sg::testing::TempFolder folder;
  cli::TensorboardFile(folder.path().string(), 0).add(cli::StepRecord{.step = 9});
  cli::TensorboardFile(folder.path().string(), 7).add(cli::StepRecord{.step = 7});
  const auto files = files_of(folder.path());
  REQUIRE(files.size() == 2);
  CHECK(files[0].at(2).step == 9);
  CHECK(files[1].at(1).session_status == 1);
  CHECK(files[1].at(1).step == 7);
  CHECK(files[1].at(2).step == 7);
}

TEST_CASE("a folder for event files that cannot be made is refused", "[tools][log]") {
  const sg::testing::TempFolder folder;
  folder.put("file", "x");
  CHECK_THROWS_AS(cli::TensorboardFile((folder / "file/runs").string(), 0), sg::Error);
}

TEST_CASE("the reader of event files refuses damaged ones", "[tools][log][refuses]") {
  const sg::testing::TempFolder folder;
  cli::TensorboardFile(folder.path().string(), 3).add(cli::StepRecord{.step = 3});
  std::string bytes = sg::testing::file_bytes(std::filesystem::directory_iterator(folder.path())->path());
  CHECK(parse_events(bytes).size() == 3);
  CHECK_THROWS(parse_events(bytes.substr(0, bytes.size() - 1)));
  bytes[bytes.size() / 2] ^= 1;
  CHECK_THROWS(parse_events(bytes));
}
