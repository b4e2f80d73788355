#include "engine/draw/dot.hpp"

#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <regex>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/plan/memory_plan.hpp"

namespace sg = stepgraph;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::LaneKind;
using sg::Rank;
using sg::str;

namespace {

std::string dot_of(const sg::Graph& graph, const sg::DotOptions& options = {.detail = sg::Detail::op}) {
  std::ostringstream out;
  sg::write_dot(graph, out, options);
  return out.str();
}

std::size_t count(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  return static_cast<std::size_t>(
      std::distance(std::sregex_iterator(text.begin(), text.end(), regex), std::sregex_iterator()));
}
std::size_t num_boxes(const std::string& dot) { return count(dot, "\n    b[0-9]+ \\[label"); }
// Every node statement: boxes, legend, title and caption.
std::size_t num_statements(const std::string& dot) { return count(dot, "\n *(b|legend|title|caption)[0-9a-z_]* \\["); }

std::string caption_of(const std::string& dot) {
  std::smatch found;
  return std::regex_search(dot, found, std::regex("\n  caption \\[[^\n]*label=\"([^\"]*)\"")) ? found[1].str() : "";
}

bool has_graphviz() { return std::system("dot -V >/dev/null 2>&1") == 0; }

// A folder that is removed when the test ends.
struct Folder {
  Folder() : path(fs::temp_directory_path() / str("stepgraph_dot_test_", ::getpid())) { fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
  [[nodiscard]] std::string file(const char* name) const { return (path / name).string(); }
  [[nodiscard]] std::size_t num_files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(path), fs::directory_iterator()));
  }
  fs::path path;
};

// Replaces PATH during its lifetime.
struct OtherPath {
  explicit OtherPath(const std::string& path) : before(std::getenv("PATH")) { ::setenv("PATH", path.c_str(), 1); }
  ~OtherPath() { ::setenv("PATH", before.c_str(), 1); }
  std::string before;
};

std::string contents(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path).rdbuf();
  return out.str();
}

// Two ranks, two layers: weights are gathered on one lane, used on another, then updated for the next run.
sg::Graph gathering() {
  sg::Graph graph(2);
  const sg::Group dp = graph.group({.name = "dp", .ranks = {Rank{0}, Rank{1}}});
  for (const Rank rank : {Rank{0}, Rank{1}}) {
    const sg::Buffer x = graph.buffer({.name = "x", .rank = rank, .size_bytes = 3 << 20});
    for (int layer = 0; layer < 2; ++layer) {
      const sg::Buffer shard =
          graph.buffer({.name = "shard", .rank = rank, .size_bytes = 512, .lifetime = sg::Lifetime::persistent});
      const sg::Buffer full = graph.buffer({.name = "full", .rank = rank, .size_bytes = 1024});
      graph.add({.name   = str("all_gather layer", layer),
                 .lane   = graph.lane(rank, LaneKind::gather),
                 .reads  = {shard},
                 .writes = {full},
                 .part   = sg::PartSpec{.group = dp, .op = sg::PartOp::all_gather},
                 .labels = {.stage = 0, .layer = layer, .phase = "F"}});
      graph.add({.name        = str("F layer", layer),
                 .lane        = graph.lane(rank, LaneKind::compute),
                 .reads       = {full},
                 .accumulates = {x},
                 .cost        = {.flops = 2.5e9},
                 .labels      = {.stage = 0, .layer = layer, .phase = "F"}},
                [] {});
      graph.add({.name        = str("update layer", layer),
                 .reads       = {x},
                 .accumulates = {shard},
                 .kind        = sg::NodeKind::host,
                 .labels      = {.stage = 0, .layer = layer, .phase = "update"}},
                [] {});
    }
  }
  return graph;
}

// Shaped like a training step: stages over ranks, microbatches forward and backward, layers of ops.
sg::Graph training(int stages, int replicas, int microbatches, int layers, int ops) {
  sg::Graph graph(stages * replicas);
  for (int r = 0; r < stages * replicas; ++r) {
    const Rank rank{r};
    const sg::Buffer weights =
        graph.buffer({.name = "weights", .rank = rank, .size_bytes = 4096, .lifetime = sg::Lifetime::persistent});
    const sg::Buffer x = graph.buffer({.name = "x", .rank = rank, .size_bytes = 4096});
    for (const char* phase : {"F", "B"}) {
      for (int mb = 0; mb < microbatches; ++mb) {
        for (int layer = 0; layer < layers; ++layer) {
          for (int op = 0; op < ops; ++op) {
            const LaneKind lane = op + 1 == ops ? LaneKind::tp : LaneKind::compute;
            graph.add({.name        = str(phase, " mb", mb, " layer", layer, " op", op),
                       .lane        = graph.lane(rank, lane),
                       .reads       = {weights},
                       .accumulates = {x},
                       .cost        = {.flops = 1e6},
                       .labels      = {r / replicas, mb, layer, phase}},
                      [] {});
          }
        }
      }
    }
    graph.add({.name = "update", .lane = graph.lane(rank, LaneKind::compute), .reads = {x}, .writes = {weights}},
              [] {});
  }
  return graph;
}

// Only nodes: `per_rank` on each rank, on the given number of lanes, in separate chains.
sg::Graph plain(int num_ranks, int per_rank, int num_lanes) {
  sg::Graph graph(num_ranks);
  for (int r = 0; r < num_ranks; ++r) {
    std::vector<sg::Buffer> buffers;
    for (int i = 0; i < 7; ++i) buffers.push_back(graph.buffer({.rank = Rank{r}, .size_bytes = 64}));
    for (int i = 0; i < per_rank; ++i) {
      sg::NodeSpec spec{.name = str("node ", i), .accumulates = {buffers[static_cast<std::size_t>(i * i % 7)]}};
      // Adjacent ranks differ.
      if (num_lanes > 0) spec.lane = graph.lane(Rank{r}, static_cast<LaneKind>((i + r * r) % (1 + r % num_lanes)));
      graph.add(spec, [] {});
    }
  }
  return graph;
}

}  // namespace

TEST_CASE("the same graph gives the same DOT", "[engine][dot]") {
  const auto detail = GENERATE(sg::Detail::stage, sg::Detail::layer, sg::Detail::op);
  CHECK(dot_of(gathering(), {.detail = detail}) == dot_of(gathering(), {.detail = detail}));
  CHECK(dot_of(training(2, 2, 2, 2, 3), {.detail = detail}) == dot_of(training(2, 2, 2, 2, 3), {.detail = detail}));
}

TEST_CASE("every rank is a cluster, every lane a cluster in it, and nodes without a lane are in the rank's",
          "[engine][dot]") {
  const std::string dot = dot_of(gathering());
  for (const char* name : {"cluster_rank0", "cluster_rank0_gather", "cluster_rank0_compute", "cluster_rank1",
                           "cluster_rank1_gather", "cluster_rank1_compute"}) {
    CAPTURE(name);
    CHECK(count(dot, str("subgraph ", name, " \\{")) == 1);
  }
  CHECK(count(dot, "subgraph ") == 6);
  CHECK(count(dot, "label=\"rank 1, stage 0\"") == 1);
}

TEST_CASE("a box says its name, the bytes it writes and its flops", "[engine][dot]") {
  const std::string dot = dot_of(gathering());
  CHECK_THAT(dot, ContainsSubstring(">F layer1<") || ContainsSubstring("<F layer1<"));
  CHECK_THAT(dot, ContainsSubstring("3.0 MiB"));
  CHECK_THAT(dot, ContainsSubstring("2.5 GFLOP"));
  CHECK_THAT(dot, ContainsSubstring("1.0 KiB"));
  CHECK_THAT(dot, ContainsSubstring("512 B"));
}

TEST_CASE("transfers are rows of their lanes, and boxes say between which spaces", "[engine][dot][offload]") {
  sg::Graph graph;
  const auto buffer = [&](const char* name, sg::Space space) {
    return graph.buffer({.name = name, .size_bytes = 4096, .space = space});
  };
  const sg::Buffer slot = buffer("slot", sg::Space::device), home = buffer("home", sg::Space::pinned),
                   file = buffer("file", sg::Space::disk);
  const auto add        = [&](const char* name, LaneKind lane, sg::Buffer from, sg::Buffer to, sg::NodeKind kind) {
    graph.add({.name = name, .lane = graph.lane(Rank{0}, lane), .reads = {from}, .writes = {to}, .kind = kind}, [] {});
  };
  add("read", LaneKind::disk, file, home, sg::NodeKind::host);
  add("load", LaneKind::h2d, home, slot, sg::NodeKind::copy);
  add("F", LaneKind::compute, slot, slot, sg::NodeKind::compute);
  add("store", LaneKind::d2h, slot, home, sg::NodeKind::copy);
  add("update", LaneKind::host, home, home, sg::NodeKind::host);
  for (const auto detail : {sg::Detail::stage, sg::Detail::op}) {
    const std::string dot = dot_of(graph, {.detail = detail});
    for (const char* lane : {"disk", "h2d", "d2h", "host", "compute"})
      CHECK(count(dot, str("subgraph cluster_rank0_", lane, " \\{")) == 1);
    for (const char* spaces :
         {"<BR/>disk to pinned", "<BR/>pinned to device", "<BR/>device to pinned", "<BR/>in pinned"})
      CHECK_THAT(dot, ContainsSubstring(spaces));
    CHECK_THAT(dot, !ContainsSubstring("in device"));
  }
}

TEST_CASE("edges into the next run are dashed and can be left out; an edge from a node to itself is not drawn",
          "[engine][dot]") {
  const sg::Graph graph = gathering();
  const std::string dot = dot_of(graph);
  std::size_t expected  = 0;
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    for (const std::uint32_t before : graph.edges().before_loop({node})) expected += before != node;
  }
  REQUIRE(expected > 0);
  CHECK(count(dot, "\n  b[0-9]+ -> b[0-9]+ \\[style=dashed") == expected);
  CHECK(count(dot_of(graph, {.detail = sg::Detail::op, .loop_edges = false}), "dashed") == 0);
  CHECK(count(dot, "\n  (b[0-9]+) -> \\1 ") == 0);
}

TEST_CASE("at op detail every derived edge is drawn once", "[engine][dot]") {
  const sg::Graph graph = training(2, 1, 2, 2, 3);
  const std::string dot = dot_of(graph, {.detail = sg::Detail::op, .loop_edges = false});
  CHECK(num_boxes(dot) == graph.num_nodes());
  CHECK(count(dot, "\n  b[0-9]+ -> b[0-9]+ ") == graph.edges().preds.size());
}

TEST_CASE("an edge that is only a lane's order is lighter than one between conflicting accesses", "[engine][dot]") {
  sg::Graph graph(1);
  const sg::Buffer a = graph.buffer({.size_bytes = 4}), b = graph.buffer({.size_bytes = 4});
  const sg::Lane lane = graph.lane(Rank{0}, LaneKind::compute);
  graph.add({.name = "first", .lane = lane, .writes = {a}}, [] {});
  graph.add({.name = "second", .lane = lane, .writes = {b}}, [] {});
  graph.add({.name = "third", .lane = lane, .reads = {b}}, [] {});
  const std::string dot = dot_of(graph, {.detail = sg::Detail::op, .loop_edges = false});
  CHECK(count(dot, "b0 -> b1 \\[color=\"#A6A6A6\"") == 1);
  CHECK(count(dot, "b1 -> b2 \\[penwidth") == 1);
}

TEST_CASE("the parts of one communication are joined by a dotted line without a head", "[engine][dot]") {
  const std::string dot = dot_of(gathering());
  CHECK(count(dot, "\n  b[0-9]+ -> b[0-9]+ \\[style=dotted[^\n]*dir=none") == 2);
  CHECK(count(dot_of(gathering(), {.detail = sg::Detail::op, .rank = Rank{1}}), "dotted") == 0);
}

TEST_CASE("a message is drawn from its sender to its receiver, in the order of issue", "[engine][dot]") {
  sg::Graph graph(2);
  const sg::Group pair = graph.group({.ranks = {Rank{0}, Rank{1}}});
  // The receiver comes first in the graph, and declares its first receive last.
  for (const int turn : {1, 0}) {
    graph.add({.name   = str("recv ", turn),
               .lane   = graph.lane(Rank{1}, LaneKind::pp_recv),
               .writes = {graph.buffer({.rank = Rank{1}, .size_bytes = 8})},
               .part   = sg::PartSpec{.group = pair, .op = sg::PartOp::recv, .peer = Rank{0}, .issue = turn}});
  }
  for (const int turn : {0, 1}) {
    graph.add({.name  = str("send ", turn),
               .lane  = graph.lane(Rank{0}, LaneKind::pp_send),
               .reads = {graph.buffer({.rank = Rank{0}, .size_bytes = 8})},
               .part  = sg::PartSpec{.group = pair, .op = sg::PartOp::send, .peer = Rank{1}, .issue = turn}});
  }
  const std::string dot = dot_of(graph, {.detail = sg::Detail::op, .loop_edges = false});  // a cycle: still drawn
  const auto id         = [&](const char* name) {
    std::smatch found;
    REQUIRE(std::regex_search(dot, found, std::regex(str("(b[0-9]+) \\[label=<", name, "<"))));
    return found[1].str();
  };
  CHECK(count(dot, str(id("send 0"), " -> ", id("recv 0"), " \\[style=dotted")) == 1);
  CHECK(count(dot, str(id("send 1"), " -> ", id("recv 1"), " \\[style=dotted")) == 1);
  CHECK(count(dot, "\n  b[^\n]*dir=none") == 0);
}

TEST_CASE("coarser details have fewer boxes, with counts", "[engine][dot]") {
  const sg::Graph graph   = training(2, 1, 2, 3, 4);
  const std::string layer = dot_of(graph, {.detail = sg::Detail::layer});
  const std::string stage = dot_of(graph, {.detail = sg::Detail::stage});
  // Per rank: 2 lanes x 2 phases x 2 microbatches (x 3 layers), and the unlabelled update.
  CHECK(num_boxes(layer) == 2 * (2 * 2 * 2 * 3 + 1));
  CHECK(num_boxes(stage) == 2 * (2 * 2 * 2 + 1));
  CHECK_THAT(layer, ContainsSubstring("layer 2<BR/>3 nodes"));
  CHECK_THAT(stage, ContainsSubstring("F mb1<") && ContainsSubstring("layers 0-2<BR/>9 nodes"));
  CHECK_THAT(caption_of(stage), ContainsSubstring("by stage") && !ContainsSubstring("drawn as one"));
}

TEST_CASE("a drawing shows stages unless it is told otherwise", "[engine][dot]") {
  const sg::Graph graph = training(2, 1, 2, 3, 4);
  CHECK(dot_of(graph, {}) == dot_of(graph, {.detail = sg::Detail::stage}));
}

TEST_CASE("nodes without labels share a box by lane, op and kind", "[engine][dot]") {
  sg::Graph graph(1);
  for (int i = 0; i < 12; ++i) {
    sg::NodeSpec spec{.kind = i % 2 == 0 ? sg::NodeKind::copy : sg::NodeKind::host, .op = i % 3 == 0 ? "move" : ""};
    if (i >= 8) spec.lane = graph.lane(Rank{0}, LaneKind::h2d);
    graph.add(spec, [] {});
  }
  CHECK(num_boxes(dot_of(graph, {.detail = sg::Detail::layer})) == 4 + 3);  // copies on the lane stay apart
}

TEST_CASE("at stage detail ten thousand nodes make at most 300 boxes, and the caption says what was merged",
          "[engine][dot]") {
  struct Shape {
    const char* name;
    std::function<sg::Graph()> make;
    const char* merged;  // null: it fits without merging
  };
  const auto shape = GENERATE(
      Shape{"64 ranks on ten lanes", [] { return plain(64, 157, 10); }, "ranges of"},
      Shape{"one rank without lanes", [] { return plain(1, 10000, 0); }, nullptr},
      Shape{"1000 ranks without lanes", [] { return plain(1000, 10, 0); }, "neighbouring ranks that do the same"},
      Shape{"1000 ranks on four lanes", [] { return plain(1000, 10, 4); }, "ranges of"},
      Shape{"16 stages", [] { return training(16, 1, 4, 8, 10); }, nullptr},
      Shape{"8 stages of 8 replicas", [] { return training(8, 8, 4, 4, 5); }, "neighbouring ranks that do the same"},
      Shape{"64 stages", [] { return training(64, 1, 4, 4, 5); }, "microbatches, phases"},
      Shape{"200 stages", [] { return training(200, 1, 2, 2, 6); }, "microbatches, phases, stages, ranges of"});
  CAPTURE(shape.name);
  const sg::Graph graph = shape.make();
  REQUIRE(graph.num_nodes() >= 9500);
  const std::string dot = dot_of(graph, {.detail = sg::Detail::stage, .title = "title"});
  CHECK(num_boxes(dot) > 0);
  CHECK(num_statements(dot) <= sg::max_drawn_boxes);
  CHECK_THAT(caption_of(dot), ContainsSubstring(str(graph.num_nodes(), " nodes in ", num_boxes(dot), " box")));
  if (shape.merged == nullptr) {
    CHECK_THAT(caption_of(dot), !ContainsSubstring("drawn as one"));
  } else {
    CHECK_THAT(caption_of(dot), ContainsSubstring("drawn as one: ") && ContainsSubstring(shape.merged));
  }
}

TEST_CASE("a picture has a reasonable aspect ratio", "[engine][dot]") {
  struct Shape {
    const char* name;
    std::function<sg::Graph()> make;
    sg::Detail detail;
  };
  const auto shape =
      GENERATE(Shape{"a chain of 500 nodes", [] { return training(1, 1, 5, 10, 5); }, sg::Detail::op},
               Shape{"500 nodes side by side", [] { return plain(1, 500, 0); }, sg::Detail::op},
               Shape{"100 ranks with little to do", [] { return plain(100, 2, 0); }, sg::Detail::op},
               Shape{"a step of 16 stages", [] { return training(16, 1, 4, 8, 10); }, sg::Detail::stage});
  CAPTURE(shape.name);
  const std::string dot = dot_of(shape.make(), {.detail = shape.detail});
  std::smatch size;
  REQUIRE(std::regex_search(dot, size, std::regex("bb=\"0,0,([0-9.]+),([0-9.]+)\"")));
  const double aspect = std::stod(size[1]) / std::stod(size[2]);
  CHECK(aspect > 0.25);
  CHECK(aspect < 4);
}

TEST_CASE("names with any characters are escaped", "[engine][dot]") {
  sg::Graph graph(1);
  graph.add({.name = "\"quo\\ted\" <b>&{x|y}"}, [] {});
  graph.add({.name = "two\nlines\t\x01"}, [] {});
  graph.add({.name = "\xc3\xa9\xff\xed\xa0\x80"}, [] {});  // a letter, a stray byte, half a surrogate
  graph.add({.name = std::string(200, 'x')}, [] {});
  graph.add({.name = ""}, [] {});
  const std::string dot = dot_of(graph, {.detail = sg::Detail::op, .title = "a \"title\" \\N"});
  CHECK_THAT(dot, ContainsSubstring("&quot;quo&#92;ted&quot;") && ContainsSubstring("&lt;b&gt;&amp;{x|y}"));
  CHECK_THAT(dot, ContainsSubstring("two lines ?"));
  CHECK_THAT(dot, ContainsSubstring("\xc3\xa9????"));
  CHECK_THAT(dot, ContainsSubstring("a &quot;title&quot; &#92;N"));
  CHECK_THAT(dot, ContainsSubstring("node 4"));
  CHECK(dot.find('\\') == std::string::npos);
  if (!has_graphviz()) SKIP("needs Graphviz's dot");
  const Folder folder;
  sg::write_svg(graph, folder.file("names.svg"), {.detail = sg::Detail::op});
  CHECK_THAT(contents(folder.file("names.svg")), ContainsSubstring("&lt;b&gt;&amp;{x|y}"));
}

TEST_CASE("one rank can be drawn alone, and an absent rank is refused", "[engine][dot]") {
  const sg::Graph graph = gathering();
  const std::string dot = dot_of(graph, {.detail = sg::Detail::op, .rank = Rank{1}});
  CHECK(num_boxes(dot) == graph.num_nodes() / 2);
  CHECK(count(dot, "cluster_rank0") == 0);
  CHECK(num_boxes(dot_of(sg::slice(graph, Rank{1}))) == graph.num_nodes() / 2);
  CHECK_THROWS_MATCHES(dot_of(graph, {.detail = sg::Detail::op, .rank = Rank{2}}), sg::Error,
                       MessageMatches(ContainsSubstring("rank 2") && ContainsSubstring("0 to 1")));
  CHECK_THROWS_MATCHES(dot_of(graph, {.rank = Rank{-1}}), sg::Error, MessageMatches(ContainsSubstring("0 to 1")));
  CHECK_THROWS_MATCHES(dot_of(sg::slice(graph, Rank{1}), {.rank = Rank{0}}), sg::Error,
                       MessageMatches(ContainsSubstring("holds only rank 1")));
}

TEST_CASE("the legend names only what occurs", "[engine][dot]") {
  const std::string dot = dot_of(gathering());
  CHECK_THAT(dot, ContainsSubstring("xlabel=\"all_gather\"") && ContainsSubstring("xlabel=\"host\""));
  CHECK_THAT(dot, !ContainsSubstring("xlabel=\"send\"") && !ContainsSubstring("xlabel=\"copy\""));
}

TEST_CASE("Graphviz draws every detail of every shape without complaint", "[engine][dot]") {
  if (!has_graphviz()) SKIP("needs Graphviz's dot");
  const auto detail = GENERATE(sg::Detail::stage, sg::Detail::layer, sg::Detail::op);
  const Folder folder;
  const std::string dot = folder.file("step.dot"), said = folder.file("said.txt");
  for (const sg::Graph& graph :
       {gathering(), training(2, 2, 2, 2, 3), plain(3, 40, 0), plain(5, 20, 3), sg::Graph(1)}) {
    sg::write_dot(graph, dot, {.detail = detail});
    CHECK(std::system(str("dot -Tsvg -o ", folder.file("step.svg"), " ", dot, " 2> ", said).c_str()) == 0);
    CHECK(contents(said) == "");
    CHECK(count(contents(folder.file("step.svg")), "<title>b[0-9]+</title>") == num_boxes(contents(dot)));
  }
}

SCENARIO("a picture that cannot be made leaves no partial file", "[engine][dot]") {
  const Folder folder;
  const std::string svg = folder.file("step.svg");
  std::ofstream(svg) << "the picture of yesterday";
  GIVEN("no Graphviz") {
    const OtherPath path("/nonexistent");
    THEN("the error says what to install, and the old picture stays") {
      CHECK_THROWS_MATCHES(sg::write_svg(gathering(), svg), sg::Error,
                           MessageMatches(ContainsSubstring("install Graphviz")));
      CHECK(contents(svg) == "the picture of yesterday");
      CHECK(folder.num_files() == 1);
    }
  }
  GIVEN("a Graphviz that fails half way") {
    fs::create_directory(folder.path / "bin");
    std::ofstream(folder.file("bin/dot")) << "#!/bin/sh\necho half\necho 'out of ink' >&2\nexit 3\n";
    fs::permissions(folder.file("bin/dot"), fs::perms::owner_all);
    const OtherPath path(str(folder.file("bin"), ":", std::getenv("PATH")));
    THEN("the error quotes Graphviz, and the old picture stays") {
      CHECK_THROWS_MATCHES(sg::write_svg(gathering(), svg), sg::Error,
                           MessageMatches(ContainsSubstring("status 3") && ContainsSubstring("out of ink")));
      CHECK(contents(svg) == "the picture of yesterday");
      CHECK(folder.num_files() == 2);
    }
  }
  GIVEN("a folder that does not exist") {
    THEN("the error names the file") {
      CHECK_THROWS_MATCHES(sg::write_svg(gathering(), folder.file("no/step.svg")), sg::Error,
                           MessageMatches(ContainsSubstring("no/step.svg")));
      CHECK_THROWS_MATCHES(sg::write_dot(gathering(), folder.file("no/step.dot")), sg::Error,
                           MessageMatches(ContainsSubstring("no/step.dot")));
    }
  }
  GIVEN("options that do not fit") {
    THEN("nothing is written") {
      CHECK_THROWS_AS(sg::write_dot(gathering(), svg, {.detail = sg::Detail::op, .rank = Rank{7}}), sg::Error);
      CHECK(contents(svg) == "the picture of yesterday");
      CHECK(folder.num_files() == 1);
    }
  }
}

TEST_CASE("a memory plan's edges are drawn dashed, and explained", "[engine][dot]") {
  sg::Graph graph;
  const auto a = graph.buffer({.name = "a", .size_bytes = 64}), b = graph.buffer({.name = "b", .size_bytes = 64});
  const auto compute = graph.lane(sg::Rank{0}, sg::LaneKind::compute),
             host    = graph.lane(sg::Rank{0}, sg::LaneKind::host);
  graph.add({.name = "make a", .lane = compute, .writes = {a}});
  graph.add({.name = "use a", .lane = compute, .reads = {a}});
  for (const char* name : {"wait", "wait more"}) graph.add({.name = name, .lane = host});
  graph.add({.name = "make b", .lane = host, .writes = {b}});
  const auto plan = sg::plan_memory(graph);
  REQUIRE(plan.num_reuse_edges() == 1);
  std::ostringstream with, without;
  sg::write_dot({graph, plan}, with, {.detail = sg::Detail::op});
  sg::write_dot(graph, without, {.detail = sg::Detail::op});
  CHECK_THAT(with.str(), ContainsSubstring("style=dashed, color=\"#C0504D\"") && ContainsSubstring("reuses memory"));
  CHECK_THAT(without.str(), !ContainsSubstring("reuses memory"));
  const auto other = sg::plan_memory(sg::Graph());
  CHECK_THROWS_WITH(sg::write_dot({graph, other}, with), ContainsSubstring("plan is for 0 nodes"));
}

TEST_CASE("an edge that the caller adds is drawn as added, not as the issue order of a world", "[engine][dot]") {
  sg::Graph graph;
  graph.add({.name = "first"});
  graph.add({.name = "second"});
  sg::Edges edges = graph.edges();
  REQUIRE(edges.preds.empty());
  edges.preds      = {0};
  edges.pred_begin = {0, 0, 1};
  std::ostringstream drawing;
  sg::write_dot({graph, edges}, drawing, {.detail = sg::Detail::op});
  CHECK_THAT(drawing.str(), ContainsSubstring("added") && !ContainsSubstring("issued before"));
}
