// plan-memory, and memory.limit_bytes in the commands on a config.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <regex>

#include "engine/base/error.hpp"
#include "tests/support/processes/command_run.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using sg::testing::json_lines;
using sg::testing::SmallRun;

namespace {

std::int64_t sum_of(const sg::JsonValue& line) {
  std::int64_t sum = 0;
  for (const char* part : {"parameters", "gradients", "optimizer", "activations", "slots", "other", "unused"})
    sum += line.at(part).as_integer();
  return sum;
}

}  // namespace

TEST_CASE("plan-memory has a line for each kind of rank, whose parts add up to its peak", "[tools][memory]") {
  const SmallRun small;
  const auto outcome = small.run("plan-memory", "--json --set layout.dp=2 --set layout.pp=2");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() == 2);
  CHECK(lines[0].at("ranks") == std::vector<int>{0, 1});
  CHECK(lines[1].at("ranks") == std::vector<int>{2, 3});
  for (const auto& line : lines) {
    CHECK(line.at("type") == "memory");
    CHECK(line.at("rank") == line.at("ranks")[0]);
    CHECK(sum_of(line) == line.at("peak_bytes").as_integer());
    CHECK(line.at("lower_bound_bytes").as_integer() <= line.at("peak_bytes").as_integer());
    CHECK(line.at("optimizer").as_integer() == 2 * line.at("parameters").as_integer());
    CHECK(line.at("node").is_string());
  }
  // Tokens, positions and layer 0 of width 16: embeddings, two norms, attention and MLP with their biases.
  CHECK(lines[0].at("parameters") == 4 * (256 * 16 + 8 * 16 + 4 * 16 + 12 * 16 * 16 + 9 * 16));

  const auto one = json_lines(small.run("plan-memory", "--json --rank 3 --set layout.dp=2 --set layout.pp=2").out);
  REQUIRE(one.size() == 1);
  CHECK(one[0].at("rank") == 3);
  CHECK(one[0].at("ranks") == std::vector<int>{3});
  CHECK(one[0].at("peak_bytes") == lines[1].at("peak_bytes"));

  // A single rank needs what a run allocates.
  const auto alone = json_lines(small.run("plan-memory", "--json").out).at(0);
  CHECK(alone.at("peak_bytes") == json_lines(small.run("graph", "--json").out).at(0).at("peak_bytes")[0]);
  const auto forward = json_lines(small.run("plan-memory", "--json --forward").out).at(0);
  CHECK(forward.at("gradients") == 0);
  CHECK(forward.at("parameters") == alone.at("parameters"));
  CHECK(forward.at("peak_bytes") == json_lines(small.run("graph", "--json --forward").out).at(0).at("peak_bytes")[0]);

  const auto table = small.run("plan-memory", "--set layout.dp=2 --set layout.pp=2");
  CHECK(table.exit_code == 0);
  CHECK_THAT(table.out, StartsWith("ranks  parameters ") && ContainsSubstring("\n0-1 ") &&
                            ContainsSubstring("\n2-3 ") && ContainsSubstring(" KiB ") &&
                            ContainsSubstring("peak: rank "));
  const auto refused = small.run("plan-memory", "--rank 1");
  CHECK(refused.exit_code == 2);
  CHECK_THAT(refused.err, ContainsSubstring("--rank 1: is not in the layout (0 to 0)"));
}

TEST_CASE("plan-memory and other commands count the workspaces of backend cuda, without a device",
          "[tools][memory][workspace]") {
  const SmallRun small;
  const std::string cuda = "--set backend=cuda ";
  const auto host        = json_lines(small.run("plan-memory", "--json").out).at(0);
  const auto outcome     = small.run("plan-memory", "--json " + cuda);
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const auto device            = json_lines(outcome.out).at(0);
  const std::int64_t workspace = device.at("workspace").as_integer(), peak = device.at("peak_bytes").as_integer();
  CHECK(host.at("workspace") == 0);
  CHECK(host.find("workspace_node") == nullptr);
  CHECK(workspace > 0);
  CHECK(device.at("workspace_node").is_string());
  CHECK(sum_of(host) == host.at("peak_bytes").as_integer());
  CHECK(sum_of(device) + workspace == peak);
  CHECK(peak == host.at("peak_bytes").as_integer() + workspace);
  CHECK(json_lines(small.run("graph", "--json " + cuda).out).at(0).at("peak_bytes")[0] == peak);
  CHECK(json_lines(small.run("verify", "--json " + cuda).out).at(0).at("peak_bytes")[0] == peak);
  for (const char* backend : {"gloo", "mpi"})
    CHECK(json_lines(small.run("plan-memory", sg::str("--json --set backend=", backend)).out).at(0).at("peak_bytes") ==
          host.at("peak_bytes"));

  const auto table = small.run("plan-memory", cuda);
  CHECK_THAT(table.out, ContainsSubstring("unused  workspace ") && ContainsSubstring("\nworkspace: rank 0, for '"));
  CHECK_THAT(small.run("plan-memory").out, !ContainsSubstring("workspace"));

  // Enough for the arena, but not for the workspaces.
  const std::string limit = sg::str("--set memory.limit_bytes=", peak - 1, " ");
  CHECK(small.run("plan-memory", limit).exit_code == 0);
  for (const char* command : {"plan-memory", "graph"}) {
    const auto refused = small.run(command, limit + cuda);
    CHECK(refused.exit_code == 2);
    CHECK_THAT(refused.err, ContainsSubstring(sg::str("memory.limit_bytes: rank 0 needs ", peak, " (")) &&
                                ContainsSubstring(", workspace "));
  }
}

TEST_CASE("with backend nccl, each rank needs what the row of its kind says", "[tools][memory][workspace][nccl]") {
  const SmallRun small;
  for (const char* layout : {"--set layout.dp=4 ", "--set layout.dp=2 --set layout.pp=2 ",
                             "--set layout.dp=3 --set shard.strategy=full --set batch.global=6 "}) {
    for (const char* exact : {"false", "true"}) {
      CAPTURE(layout, exact);
      const std::string more = sg::str("--json --set backend=nccl --set comm.exact=", exact, " ", layout);
      const auto outcome     = small.run("plan-memory", more);
      CAPTURE(outcome.err);
      REQUIRE(outcome.exit_code == 0);
      for (const auto& row : json_lines(outcome.out)) {
        for (const auto& rank : row.at("ranks").items) {
          const auto one = json_lines(small.run("plan-memory", sg::str(more, "--rank ", rank.as_integer())).out).at(0);
          CAPTURE(rank.as_integer());
          for (const char* bytes : {"workspace", "peak_bytes", "lower_bound_bytes"})
            CHECK(one.at(bytes) == row.at(bytes));
        }
      }
      const auto verified = small.run("verify", more);
      CAPTURE(verified.err);
      CHECK(verified.exit_code == 0);
    }
  }
}

TEST_CASE("a step that needs more memory than the limit is refused by every command, and the offered setting runs",
          "[tools][memory]") {
  const SmallRun small;
  const std::string batch = "--set batch.micro=4 --set layout.pp=2 ";
  const auto peaks        = json_lines(small.run("graph", "--json " + batch).out).at(0).at("peak_bytes");
  const auto most         = std::max(peaks[0].as_integer(), peaks[1].as_integer());
  const std::string limit = batch + sg::str("--set memory.limit_bytes=", most - 1, " ");
  const auto train        = small.run("train", limit);
  CHECK(train.exit_code == 2);
  CHECK(train.out.empty());
  CHECK_THAT(train.err, StartsWith("stepgraph train: memory.limit_bytes: rank ") &&
                            ContainsSubstring(sg::str(" needs ", most, " (")) && ContainsSubstring("parameters "));
  std::smatch offer;
  REQUIRE(std::regex_search(train.err, offer, std::regex(R"(\((\S+=\S+) needs ([0-9]+) \()")));
  const auto fits = small.run("train", sg::str(limit, "--json --steps 1 --set ", offer[1].str()));
  CAPTURE(fits.err);
  CHECK(fits.exit_code == 0);
  const auto plan   = json_lines(fits.out).at(1);
  std::int64_t used = 0;
  for (const auto& peak : plan.at("peak_bytes").items) used = std::max(used, peak.as_integer());
  CHECK(used == std::stoll(offer[2]));
  CHECK(used < most);

  for (const char* command : {"verify", "graph"}) {
    const auto outcome = small.run(command, limit);
    CHECK(outcome.exit_code == 2);
    CHECK_THAT(outcome.err, ContainsSubstring("memory.limit_bytes: rank "));
  }
  const std::string tiny = "--set memory.limit_bytes=1000";
  for (const auto& [command, more] : {std::pair{"eval", ""}, std::pair{"generate", "--prompt 1 "}}) {
    const auto outcome = small.run(command, more + tiny);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("; the limit is 1000 (") && ContainsSubstring("a larger layout.tp"));
  }
  // The table is printed before the error.
  const auto table = small.run("plan-memory", "--json " + tiny);
  CHECK(table.exit_code == 2);
  CHECK(json_lines(table.out).size() == 1);
  CHECK_THAT(table.err, ContainsSubstring("stepgraph plan-memory: memory.limit_bytes: rank 0 needs "));
}
