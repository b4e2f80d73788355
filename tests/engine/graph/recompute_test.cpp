#include "engine/graph/recompute.hpp"

#include <array>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <random>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "ops/transfers/collectives.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

using Role   = sg::RecomputePlace::Role;
using Places = std::map<sg::Node, sg::RecomputePlace>;

constexpr std::int64_t elements = 4;

// Every byte that a node writes depends on every byte that it reads, so one wrong byte changes all later results.
void mix(const sg::Context& context, std::array<std::size_t, 3> counts) {
  std::uint64_t state = 1;
  const auto take     = [&](std::span<const std::int64_t> values) {
    for (const std::int64_t value : values) {
      state = (state ^ static_cast<std::uint64_t>(value)) * 6364136223846793005u + 1442695040888963407u;
      state ^= state >> 29;
    }
  };
  for (std::size_t i = 0; i < counts[0]; ++i) take(context.read<std::int64_t>(i));
  for (std::size_t i = 0; i < counts[2]; ++i) take(context.accumulate<std::int64_t>(i));
  const auto put = [&](std::span<std::int64_t> values) {
    for (std::int64_t& value : values) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      value = static_cast<std::int64_t>(state >> 1);
    }
  };
  for (std::size_t i = 0; i < counts[1]; ++i) put(context.write<std::int64_t>(i));
  for (std::size_t i = 0; i < counts[2]; ++i) put(context.accumulate<std::int64_t>(i));
}

// A graph whose nodes have a role in recomputation.
struct Made {
  sg::Graph graph = sg::Graph(1);
  Places places   = {};

  sg::Buffer buffer(const std::string& name, sg::Lifetime lifetime = sg::Lifetime::step) {
    return graph.buffer({.name = name, .size_bytes = 8 * elements, .type = sg::DType::i64, .lifetime = lifetime});
  }
  sg::Buffer kept(const std::string& name) { return buffer(name, sg::Lifetime::persistent); }
  sg::Node add(sg::RecomputePlace place, sg::NodeSpec spec) {
    const std::array counts{spec.reads.view().size(), spec.writes.view().size(), spec.accumulates.view().size()};
    if (!spec.lane) spec.lane = sg::Lane{sg::Rank{0}, sg::LaneKind::compute};
    const sg::Node node = graph.add(spec, [counts](const sg::Context& context) { mix(context, counts); });
    places[node]        = place;
    return node;
  }
  [[nodiscard]] sg::Graph recompute() const {
    return sg::recompute(graph, [&](sg::Node node) {
      const auto found = places.find(node);
      return found == places.end() ? sg::RecomputePlace{} : found->second;
    });
  }
};

// The contents of the persistent buffers after two steps in planned memory.
std::vector<std::int64_t> results(const sg::Graph& graph, sg::Executor& executor) {
  const sg::MemoryPlan plan = sg::plan_memory(graph);
  CHECK(sg::find_flaws({graph, plan}).empty());
  sg::LoopbackWorld world(1);
  const sg::Program program(sg::RunnableGraph(graph, plan), world);
  executor.run(program);
  executor.run(program);
  std::vector<std::int64_t> out;
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    if (graph.spec(sg::Buffer{i}).lifetime != sg::Lifetime::persistent) continue;
    const auto values = program.memory().span<std::int64_t>(sg::Buffer{i});
    out.insert(out.end(), values.begin(), values.end());
  }
  return out;
}

std::vector<std::string> names_of(const sg::Graph& graph) {
  std::vector<std::string> names;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) names.emplace_back(graph.name(sg::Node{i}));
  return names;
}

sg::Buffer buffer_at(const sg::Graph& graph, const std::string& node, std::size_t access) {
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    if (graph.name(sg::Node{i}) == node) return graph.access(sg::Node{i}, access).buffer;
  }
  return {};
}

constexpr sg::RecomputePlace outside{}, region{Role::region, 0}, reader{Role::reader, 0};

}  // namespace

TEST_CASE("nodes are recomputed right before their first reader, and other readers keep the old data",
          "[engine][recompute]") {
  Made made;
  const auto x = made.kept("x"), y = made.kept("y"), z = made.kept("z");
  const auto a = made.buffer("a"), b = made.buffer("b"), c = made.buffer("c"), d = made.buffer("d");
  made.add(region, {.name = "first", .reads = x, .writes = a});
  made.add(region, {.name = "in place", .accumulates = a});
  made.add(region, {.name = "second", .reads = a, .writes = {b, c}});
  made.add(region, {.name = "not needed", .reads = b, .writes = d});
  made.add(outside, {.name = "next", .reads = {b, d}, .writes = y});
  made.add(reader, {.name = "early", .reads = y, .accumulates = z});
  made.add(reader, {.name = "back", .reads = {b, c}, .accumulates = z});
  const sg::Graph again = made.recompute();
  CHECK(names_of(again) == std::vector<std::string>{"first", "in place", "second", "not needed", "next",
                                                    "recompute first", "recompute in place", "recompute second",
                                                    "early", "back"});
  CHECK(buffer_at(again, "next", 0) == b);
  CHECK(buffer_at(again, "recompute first", 0) == x);
  CHECK(buffer_at(again, "back", 0) == buffer_at(again, "recompute second", 1));
  CHECK(buffer_at(again, "back", 1) == buffer_at(again, "recompute second", 2));
  CHECK(buffer_at(again, "recompute in place", 0) == buffer_at(again, "recompute first", 1));
  CHECK(again.spec(buffer_at(again, "back", 0)).name == "recompute b");
  sg::Executor executor({.threads = 1});
  CHECK(results(again, executor) == results(made.graph, executor));
}

TEST_CASE("a reader that works in place uses the recomputed buffer", "[engine][recompute]") {
  Made made;
  const auto x = made.kept("x"), y = made.kept("y"), z = made.kept("z"), a = made.buffer("a");
  made.add(region, {.name = "first", .reads = x, .writes = a});
  made.add(outside, {.name = "next", .reads = a, .writes = y});
  made.add(reader, {.name = "turn", .accumulates = a});
  made.add(reader, {.name = "back", .reads = a, .accumulates = z});
  sg::Executor executor({.threads = 1});
  const sg::Graph again   = made.recompute();
  const sg::Buffer second = buffer_at(again, "recompute first", 1);
  CHECK(second != a);
  CHECK(buffer_at(again, "turn", 0) == second);
  CHECK(buffer_at(again, "back", 0) == second);
  CHECK(results(again, executor) == results(made.graph, executor));

  // If another node reads the changed buffer, the reader keeps the original buffer.
  made.add(outside, {.name = "last", .reads = a, .accumulates = z});
  CHECK(made.recompute() == made.graph);
}

TEST_CASE("a message is not sent again, and the order given by tokens is kept", "[engine][recompute]") {
  Made made;
  made.graph      = sg::Graph(2);
  const auto pair = made.graph.group({.name = "pair", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  const auto make = [&](int rank, const char* name) {
    return made.graph.buffer({.name = name, .rank = sg::Rank{rank}, .size_bytes = 32, .type = sg::DType::i64});
  };
  const auto sent = make(0, "sent"), received = make(1, "received"), a = make(1, "a"), b = make(1, "b");
  const auto token = made.graph.token(sg::Rank{1}, "turn");
  const sg::Lane lane{sg::Rank{1}, sg::LaneKind::compute};
  made.add(outside, {.name = "write", .lane = sg::Lane{sg::Rank{0}, sg::LaneKind::compute}, .writes = sent});
  const auto message = sg::send_recv(made.graph, {.name  = "message",
                                                  .group = pair,
                                                  .from  = sg::Rank{0},
                                                  .to    = sg::Rank{1},
                                                  .in    = [&] { return sg::AccessList(sent); },
                                                  .out   = [&] { return sg::AccessList(received); }});
  for (const sg::Node part : message) made.places[part] = region;
  made.add(region, {.name = "use", .lane = lane, .reads = received, .writes = a, .accumulates = token});
  made.add(reader, {.name = "back", .lane = lane, .reads = a, .writes = b, .accumulates = token});
  const sg::Graph again = made.recompute();
  CHECK(names_of(again).size() == names_of(made.graph).size() + 1);
  CHECK(buffer_at(again, "recompute use", 0) == received);
  CHECK(buffer_at(again, "recompute use", 2) == token);
  CHECK(buffer_at(again, "back", 0) != a);
  CHECK(buffer_at(again, "back", 2) == token);
}

TEST_CASE("a recomputed collective is issued after earlier parts, in the same order on all members",
          "[engine][recompute]") {
  Made made;
  made.graph       = sg::Graph(2);
  const auto group = made.graph.group({.name = "all", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  std::map<sg::Rank, sg::Buffer> a, b, c;
  for (const sg::Rank rank : {sg::Rank{0}, sg::Rank{1}}) {
    for (auto* buffers : {&a, &b, &c})
      (*buffers)[rank] = made.graph.buffer({.name = "m", .rank = rank, .size_bytes = 32, .type = sg::DType::i64});
  }
  const auto reduce = [&](const char* name, std::map<sg::Rank, sg::Buffer>& buffers, sg::RecomputePlace place) {
    for (const sg::Node part : sg::all_reduce(
             made.graph, {.name = name, .group = group, .in = [&](sg::Rank r) { return sg::AccessList(buffers[r]); }}))
      made.places[part] = place;
  };
  const auto compute = [&](const char* name, sg::RecomputePlace place, const auto& accesses) {
    for (const sg::Rank rank : {sg::Rank{0}, sg::Rank{1}}) {
      sg::NodeSpec spec = accesses(rank);
      spec.name         = name;
      spec.lane         = sg::Lane{rank, sg::LaneKind::compute};
      made.add(place, spec);
    }
  };
  compute("make", region, [&](sg::Rank r) { return sg::NodeSpec{.writes = a[r]}; });
  reduce("sum", a, region);
  compute("other", outside, [&](sg::Rank r) { return sg::NodeSpec{.writes = b[r]}; });
  reduce("between", b, outside);
  compute("back", reader, [&](sg::Rank r) { return sg::NodeSpec{.reads = {a[r], b[r]}, .writes = c[r]}; });
  reduce("after", c, outside);
  const sg::Graph again = made.recompute();
  CHECK(sg::find_flaws(again).empty());
  std::vector<std::vector<std::pair<std::int32_t, std::string>>> issued(2);
  for (std::uint32_t i = 0; i < again.num_nodes(); ++i) {
    if (!again.has_part(sg::Node{i})) continue;
    const auto part = again.part(sg::Node{i});
    issued[static_cast<std::size_t>(sg::index(again.rank(sg::Node{i})))].emplace_back(part.issue, part.message);
  }
  const std::vector<std::pair<std::int32_t, std::string>> expected{
      {0, "sum"}, {1, "between"}, {2, "recompute sum"}, {3, "after"}};
  CHECK(issued[0] == expected);
  CHECK(issued[1] == expected);
  for (const sg::Rank rank : {sg::Rank{0}, sg::Rank{1}}) {
    const sg::Graph alone = sg::slice(made.graph, rank);
    CHECK(sg::recompute(alone, [&](sg::Node node) -> sg::RecomputePlace {
            if (alone.name(node) == "make" || alone.name(node) == "sum") return region;
            return alone.name(node) == "back" ? reader : outside;
          }) == sg::slice(again, rank));
  }
}

TEST_CASE("a region whose inputs were overwritten is refused, with node and buffer", "[engine][recompute]") {
  const auto refuses = [](const Made& made, const std::string& why) {
    CHECK_THROWS_MATCHES(made.recompute(), sg::Error, MessageMatches(ContainsSubstring(why)));
    try {
      (void)made.recompute();
    } catch (const sg::Error& error) {
      CHECK(error.kind() == sg::ErrorKind::graph);
    }
  };
  const std::string gone =
      " cannot run again before rank 0 compute 'back': buffer 'x', which it reads, has been overwritten since (inputs "
      "of a region from outside must not change)";
  Made over;
  const auto x = over.buffer("x"), a = over.buffer("a"), y = over.kept("y");
  over.add(outside, {.name = "begin", .writes = x});
  over.add(region, {.name = "first", .reads = x, .writes = a});
  Made in_place = over, partly = over, fine = over;
  over.add(outside, {.name = "write over", .writes = x.range(8, 8)});
  over.add(reader, {.name = "back", .reads = a, .writes = y});
  refuses(over, "recompute: rank 0 compute 'first'" + gone);

  in_place.add(region, {.name = "in place", .reads = a, .accumulates = x});
  in_place.add(reader, {.name = "back", .reads = x, .writes = y});
  refuses(in_place, "recompute: rank 0 compute 'in place'" + gone);

  partly.add(region, {.name = "some of it", .writes = x.range(0, 8)});
  partly.add(region, {.name = "second", .reads = x, .writes = a});
  partly.add(reader, {.name = "back", .reads = a, .writes = y});
  refuses(partly,
          "recompute: rank 0 compute 'second' cannot run again before rank 0 compute 'back': buffer 'x', which it "
          "reads, was written partly by its region and partly outside");

  fine.add(reader, {.name = "back", .reads = a, .writes = y});
  fine.add(outside, {.name = "write over later", .writes = x});
  CHECK(fine.recompute().num_nodes() == fine.graph.num_nodes() + 1);
}

TEST_CASE("random graphs compute the same with recomputation, also with in-place accesses", "[engine][recompute]") {
  sg::Executor executor({.threads = 2});
  int repeated = 0, refused = 0;
  for (std::uint32_t seed = 0; seed < 1000u / static_cast<unsigned>(sg::testing::scale()); ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int bound) { return static_cast<int>(random() % static_cast<unsigned>(bound)); };
    Made made;
    std::vector<sg::Buffer> buffers;
    for (int i = 0; i < 6; ++i) {
      const bool old = i == 3;  // keeps the data of the previous step
      buffers.push_back(old ? made.kept("old") : made.buffer(sg::str("b", i)));
      if (!old) made.add(outside, {.name = "begin", .writes = buffers.back()});
    }
    const auto some = [&](int i) -> sg::Access {
      const sg::Buffer buffer = buffers[static_cast<std::size_t>(i)];
      const int part          = below(6);
      return part < 4 ? sg::Access(buffer) : buffer.range(part == 4 ? 0 : 16, 16);
    };
    const int nodes = 12 + below(10);
    for (int i = 0; i < nodes; ++i) {
      const bool late = (i >= nodes / 2) != (below(10) == 0);  // sometimes a reader comes before its region
      // Regions write buffers 0 to 3 and other nodes mostly the rest. Otherwise most graphs would be refused.
      const int who = below(4);
      const sg::RecomputePlace place =
          who == 3 ? outside : sg::RecomputePlace{late ? Role::reader : Role::region, who % 2};
      const int written = place.role == Role::outside && below(3) > 0 ? 4 + below(2) : below(4);
      const int read    = (written + 1 + below(5)) % 6;
      sg::NodeSpec spec{.name = sg::str("n", i), .reads = some(read)};
      if (below(4) > 0) spec.lane = sg::Lane{sg::Rank{0}, below(2) ? sg::LaneKind::compute : sg::LaneKind::tp};
      spec.writes.push_back(made.kept("result"));
      if (below(3) == 0) {
        spec.accumulates.push_back(some(written));
      } else if (below(4) > 0) {
        spec.writes.push_back(some(written));
      }
      made.add(place, spec);
    }
    try {
      const sg::Graph again = made.recompute();
      repeated += again.num_nodes() > made.graph.num_nodes();
      CHECK(results(again, executor) == results(made.graph, executor));
    } catch (const sg::Error& error) {
      CHECK_THAT(error.what(), ContainsSubstring("recompute: "));
      ++refused;
    }
  }
  CAPTURE(repeated, refused);
  CHECK(repeated * sg::testing::scale() > 80);
  CHECK(refused * sg::testing::scale() > 100);
}
