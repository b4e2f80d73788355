#include "engine/look/trace.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/recorder.hpp"
#include "graphs/files/json_value.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/worlds/still_world.hpp"
#include "tools/bench/overhead/shapes.hpp"
#include "tools/examples/sharded_step.hpp"

namespace sg = stepgraph;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::JsonValue;

namespace {

constexpr sg::Rank r0{0}, r1{1};

std::string trace(const sg::Graph& graph, std::span<const sg::Timeline> timelines,
                  const sg::TraceOptions& options = {}) {
  std::ostringstream out;
  sg::write_trace(graph, timelines, out, options);
  return out.str();
}

sg::Timeline record(const sg::Graph& graph, int threads = 2) {
  sg::testing::StillWorld world(graph.num_ranks());
  sg::Executor executor({.threads = threads});
  sg::Recorder recorder;
  executor.run(graph, world, &recorder);
  return recorder.timeline();
}

std::vector<JsonValue> events(const JsonValue& file, const std::string& phase) {
  std::vector<JsonValue> out;
  for (const JsonValue& event : file.at("traceEvents").items) {
    if (event.at("ph") == phase) out.push_back(event);
  }
  return out;
}

std::int64_t ns(const JsonValue& microseconds) { return std::llround(microseconds.as_real() * 1000); }

std::uint32_t node_of(const JsonValue& slice) {
  return static_cast<std::uint32_t>(slice.at("args").at("node").as_integer());
}

using Row = std::pair<std::int64_t, std::int64_t>;  // pid, tid
Row row(const JsonValue& event) { return {event.at("pid").as_integer(), event.at("tid").as_integer()}; }

// Checks the rules of the format and our own; empty if all hold.
std::string broken_rule(const JsonValue& file) {
  std::set<std::int64_t> processes, named_processes;
  std::set<Row> named_rows;
  for (const JsonValue& event : events(file, "M")) {
    if (event.at("name") == "process_name") named_processes.insert(event.at("pid").as_integer());
    if (event.at("name") == "thread_name" && !named_rows.insert(row(event)).second) return "a row is named twice";
  }
  std::map<Row, std::vector<std::pair<std::int64_t, std::int64_t>>> rows;
  for (const JsonValue& event : events(file, "X")) {
    const std::int64_t begin = ns(event.at("ts")), length = ns(event.at("dur"));
    if (begin < 0 || length < 0) return "a slice has a negative time: " + sg::json_line(event);
    if (!event.at("name").is_string() || !event.at("cat").is_string()) return "a slice has no name or kind";
    if (!named_rows.contains(row(event))) return "a row has no name: " + sg::json_line(event);
    rows[row(event)].emplace_back(begin, begin + length);
    processes.insert(event.at("pid").as_integer());
  }
  for (auto& [where, slices] : rows) {
    std::sort(slices.begin(), slices.end());
    for (std::size_t i = 1; i < slices.size(); ++i) {
      if (slices[i].first < slices[i - 1].second) return "slices overlap in row " + std::to_string(where.second);
    }
  }
  struct Ends {
    std::vector<JsonValue> from, to;
  };
  std::map<std::int64_t, Ends> arrows;
  for (const JsonValue& event : events(file, "s")) arrows[event.at("id").as_integer()].from.push_back(event);
  for (const JsonValue& event : events(file, "f")) {
    if (event.at("bp") != "e") return "an arrow's head is not bound to its slice";
    arrows[event.at("id").as_integer()].to.push_back(event);
  }
  for (const auto& [id, ends] : arrows) {
    if (ends.from.size() != 1 || ends.to.size() != 1) return "arrow " + std::to_string(id) + " has not two ends";
    if (ns(ends.from[0].at("ts")) > ns(ends.to[0].at("ts"))) return "an arrow goes back in time";
    if (ends.from[0].at("name") != ends.to[0].at("name") || ends.from[0].at("cat") != ends.to[0].at("cat"))
      return "the ends of an arrow differ";
    for (const JsonValue& end : {ends.from[0], ends.to[0]}) {
      const std::int64_t at = ns(end.at("ts"));
      const auto& slices    = rows[row(end)];
      const auto after      = std::upper_bound(slices.begin(), slices.end(), std::pair(at, INT64_MAX));
      if (after == slices.begin() || std::prev(after)->second < at) return "an arrow ends beside all slices";
    }
  }
  for (const JsonValue& event : events(file, "C")) {
    processes.insert(event.at("pid").as_integer());
    if (ns(event.at("ts")) < 0 || event.at("args").at("bytes").as_integer() < 0) return "a negative counter";
  }
  return std::includes(named_processes.begin(), named_processes.end(), processes.begin(), processes.end())
             ? ""
             : "a process has no name";
}

}  // namespace

TEST_CASE("a recorded step's trace keeps the rules of the format", "[engine][trace]") {
  const sg::ShardedStep step = sg::sharded_step({.ranks = 8, .layers = 4, .width = 16, .batch = 4});
  const sg::Timeline t       = record(step.graph);
  const JsonValue file       = sg::parse_json(trace(step.graph, {&t, 1}, {.title = "a step"}));
  CHECK(broken_rule(file) == "");
  CHECK(file.at("otherData").at("title") == "a step");
  const auto slices = events(file, "X");
  REQUIRE(slices.size() == step.graph.num_nodes());
  CHECK_FALSE(events(file, "s").empty());
  CHECK_FALSE(events(file, "C").empty());
  for (const JsonValue& slice : slices) {
    const sg::Node node{node_of(slice)};
    CHECK(slice.at("pid") == sg::index(step.graph.rank(node)));
    CHECK(slice.at("name") == step.graph.name(node));
    CHECK(std::abs(slice.at("ts").as_real() - t.nodes[node.id].begin_s * 1e6) < 0.0006);
  }
}

TEST_CASE("traces of random graphs keep the rules of the format", "[engine][trace]") {
  for (int seed = 1; seed <= sg::testing::cases(40); ++seed) {
    CAPTURE(seed);
    const sg::Graph graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), sg::testing::RandomGraphOptions::medium());
    const std::vector<sg::Timeline> steps{record(graph, 3), record(graph, 2)};
    const std::string text = trace(graph, steps);
    REQUIRE(broken_rule(sg::parse_json(text)) == "");
    REQUIRE(trace(graph, steps) == text);
  }
}

TEST_CASE("a slice shows what is known about its node, and nothing else", "[engine][trace]") {
  sg::Graph graph(2);
  const sg::Group pair = graph.group({.name = "pair", .ranks = {r0, r1}});
  const sg::Buffer x = graph.buffer({.rank = r0, .size_bytes = 64}), y = graph.buffer({.rank = r1, .size_bytes = 64});
  graph.add({.name   = "F",
             .lane   = graph.lane(r0, sg::LaneKind::compute),
             .writes = {x},
             .op     = "linear",
             .cost   = {.flops = 3e9, .bytes_moved = 0.5, .bytes_sent = 7},
             .labels = {.stage = 1, .microbatch = 0, .layer = 5, .phase = "forward"}});
  const auto end = [&](sg::PartOp op, sg::Rank peer) {
    return sg::PartSpec{.group = pair, .op = op, .type = sg::DType::u8, .peer = peer, .message = "act"};
  };
  graph.add({.name  = "",
             .lane  = graph.lane(r0, sg::LaneKind::pp_send),
             .reads = {x},
             .part  = end(sg::PartOp::send, r1),
             .kind  = sg::NodeKind::communicate});
  graph.add({.name   = "recv",
             .lane   = graph.lane(r1, sg::LaneKind::pp_recv),
             .writes = {y},
             .part   = end(sg::PartOp::recv, r0),
             .kind   = sg::NodeKind::communicate});
  graph.add({.rank = r1});
  const sg::Timeline t{{{0, 1e-6, 0}, {2e-6, 3.5e-6, 0}, {2e-6, 3.5e-6, 0}, {1e-9, 1.001e-6, 1}}, 3.5e-6};
  const JsonValue file = sg::parse_json(trace(graph, {&t, 1}));
  CHECK(broken_rule(file) == "");
  std::map<std::uint32_t, JsonValue> slices;
  for (const JsonValue& slice : events(file, "X")) slices[node_of(slice)] = slice;
  CHECK(slices[0] ==
        sg::parse_json(R"({"ph": "X", "pid": 0, "tid": 1, "name": "F", "cat": "compute", "ts": 0.0, "dur": 1.0,
      "args": {"op": "linear", "stage": 1, "microbatch": 0, "layer": 5, "phase": "forward", "bytes": 0.5,
               "bytes_sent": 7, "flops": 3000000000, "node": 0}})"));
  CHECK(slices[1] == sg::parse_json(R"({"ph": "X", "pid": 0, "tid": 5, "name": "send", "cat": "communicate", "ts": 2.0,
      "dur": 1.5, "args": {"op": "send", "group": "pair", "peer": 1, "message": "act", "bytes": 64, "node": 1}})"));
  CHECK(slices[3] ==
        sg::parse_json(R"({"ph": "X", "pid": 1, "tid": 111, "name": "node 3", "cat": "compute", "ts": 0.001,
      "dur": 1.0, "args": {"node": 3}})"));

  // F -> send inside the rank; send -> recv between ranks.
  std::set<std::pair<std::string, Row>> from, to;
  for (const JsonValue& event : events(file, "s")) from.emplace(event.at("name").as_string(), row(event));
  for (const JsonValue& event : events(file, "f")) to.emplace(event.at("name").as_string(), row(event));
  CHECK(from == decltype(from){{"edge", {0, 1}}, {"message", {0, 5}}});
  CHECK(to == decltype(to){{"edge", {0, 5}}, {"message", {1, 106}}});
}

TEST_CASE("nodes without a lane take as many rows as run at once", "[engine][trace]") {
  sg::Graph graph;
  for (int i = 0; i < 4; ++i) graph.add({.name = std::to_string(i), .rank = r0});
  // 0 and 1 overlap, 2 takes the first row again, 3 the second.
  const sg::Timeline t{{{0, 2e-6}, {1e-6, 3e-6}, {2e-6, 5e-6}, {3e-6, 4e-6}}, 5e-6};
  const JsonValue file = sg::parse_json(trace(graph, {&t, 1}));
  CHECK(broken_rule(file) == "");
  std::map<std::string, std::int64_t> rows;
  for (const JsonValue& slice : events(file, "X")) rows[slice.at("name").as_string()] = slice.at("tid").as_integer();
  CHECK(rows == std::map<std::string, std::int64_t>{{"0", 11}, {"1", 12}, {"2", 11}, {"3", 12}});
  std::vector<std::string> names;
  for (const JsonValue& event : events(file, "M")) {
    if (event.at("name") == "thread_name") names.push_back(event.at("args").at("name").as_string());
  }
  CHECK(names == std::vector<std::string>{"other 1", "other 2"});
}

TEST_CASE("slices of a lane do not overlap even if the clocks disagree", "[engine][trace]") {
  sg::Graph graph;
  const sg::Lane lane = graph.lane(r0, sg::LaneKind::compute);
  for (int i = 0; i < 3; ++i) graph.add({.name = std::to_string(i), .lane = lane});
  const sg::Timeline t{{{0, 2e-6}, {1.99e-6, 1.995e-6}, {1.998e-6, 5e-6}}, 5e-6};
  const JsonValue file = sg::parse_json(trace(graph, {&t, 1}));
  CHECK(broken_rule(file) == "");
  std::vector<std::int64_t> ends;
  for (const JsonValue& slice : events(file, "X")) ends.push_back(ns(slice.at("ts")) + ns(slice.at("dur")));
  CHECK(ends == std::vector<std::int64_t>{2000, 2000, 5000});
}

TEST_CASE("names with any characters come through", "[engine][trace]") {
  const std::vector<std::pair<std::string, std::string>> names = {
      {"quote \" backslash \\ slash /", "quote \" backslash \\ slash /"},
      {std::string("line\nreturn\rtab\tbell\a nul") + '\0' + "del\x7f",
       std::string("line\nreturn\rtab\tbell\a nul") + '\0' + "del\x7f"},
      {"größe 层 \xF0\x9F\x9A\x80", "größe 层 \xF0\x9F\x9A\x80"},
      {"broken \xff\xc3( \xed\xa0\x80", "broken \uFFFD\uFFFD( \uFFFD\uFFFD\uFFFD"},
      {"</script>", "</script>"}};
  sg::Graph graph;
  const sg::Lane lane = graph.lane(r0, sg::LaneKind::compute);
  sg::Timeline t;
  for (const auto& [name, shown] : names) {
    graph.add({.name = name, .lane = lane, .op = name, .labels = {.phase = name}});
    t.nodes.push_back({t.makespan_s, t.makespan_s + 1});
    t.makespan_s += 1;
  }
  const JsonValue file = sg::parse_json(trace(graph, {&t, 1}, {.title = names[0].first}));
  const auto slices    = events(file, "X");
  REQUIRE(slices.size() == names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    CHECK(slices[i].at("name") == names[i].second);
    CHECK(slices[i].at("args").at("op") == names[i].second);
    CHECK(slices[i].at("args").at("phase") == names[i].second);
  }
  CHECK(file.at("otherData").at("title") == names[0].first);
}

TEST_CASE("several steps follow each other, and a row numbers them", "[engine][trace]") {
  sg::Graph graph;
  graph.add({.name = "a", .lane = graph.lane(r0, sg::LaneKind::compute)});
  const std::vector<sg::Timeline> steps = {{{{1e-6, 2e-6}}, 2e-6}, {{{0, 5e-6}}, 5e-6}, {{{0, 1e-6}}, 1e-6}};
  const JsonValue file                  = sg::parse_json(trace(graph, steps));
  CHECK(broken_rule(file) == "");
  std::map<std::string, std::vector<double>> begins;
  for (const JsonValue& slice : events(file, "X"))
    begins[slice.at("name").as_string()].push_back(slice.at("ts").as_real());
  CHECK(begins == std::map<std::string, std::vector<double>>{
                      {"a", {1, 2, 7}}, {"step 0", {0}}, {"step 1", {2}}, {"step 2", {7}}});
}

TEST_CASE("nodes that did not run have no slice, and arrows and counters can be left out", "[engine][trace]") {
  const sg::Graph graph = sg::sharded_step({.ranks = 2, .layers = 2, .width = 4, .batch = 1}).graph;
  sg::Timeline t        = record(graph);
  const JsonValue bare  = sg::parse_json(trace(graph, {&t, 1}, {.flows = false, .counters = false}));
  CHECK(broken_rule(bare) == "");
  CHECK(events(bare, "X").size() == graph.num_nodes());
  for (const char* phase : {"s", "f", "C"}) CHECK(events(bare, phase).empty());
  sg::Timeline odd = t;  // not from a real run: successors of nodes that did not run
  for (std::size_t i = 0; i < odd.nodes.size(); i += 3) odd.nodes[i] = {};
  CHECK(broken_rule(sg::parse_json(trace(graph, {&odd, 1}))) == "");
  for (std::size_t i = 1; i < t.nodes.size(); ++i) t.nodes[i] = {};
  const JsonValue failed = sg::parse_json(trace(graph, {&t, 1}));
  CHECK(broken_rule(failed) == "");
  CHECK(events(failed, "X").size() == 1);
  CHECK(events(failed, "s").empty());
  CHECK(broken_rule(sg::parse_json(trace(graph, {}))) == "");
}

TEST_CASE("a trace file is written completely or not at all", "[engine][trace]") {
  const fs::path folder = fs::temp_directory_path() / "stepgraph_trace_test";
  fs::remove_all(folder);
  fs::create_directories(folder);
  const std::string path = (folder / "trace.json").string();
  const sg::Graph graph  = sg::token_graph(sg::chain(10));
  const sg::Timeline t   = record(graph);
  sg::write_trace(graph, t, path);
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  CHECK(text.str() == trace(graph, {&t, 1}));

  CHECK_THROWS_MATCHES(sg::write_trace(graph, sg::Timeline{}, path), sg::Error,
                       MessageMatches(ContainsSubstring("0 nodes") && ContainsSubstring("has 10")));
  std::ostringstream still;
  still << std::ifstream(path).rdbuf();
  CHECK(still.str() == text.str());
  CHECK(std::distance(fs::directory_iterator(folder), fs::directory_iterator()) == 1);
  try {
    sg::write_trace(graph, t, (folder / "no" / "trace.json").string());
    FAIL("it was written");
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::backend);
    CHECK_THAT(error.what(), ContainsSubstring("trace.json: cannot be created: No such file or directory"));
  }
  if (fs::exists("/dev/full")) CHECK_THROWS_AS(sg::write_trace(graph, t, "/dev/full"), sg::Error);
  fs::remove_all(folder);
}
