#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <map>
#include <set>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/graphs/rank_sets.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using sg::testing::Random;

namespace {

// Reachability as a matrix: before[b][a].
using Closure = std::vector<std::vector<bool>>;

Closure close(Closure before) {
  const std::size_t size = before.size();
  for (std::size_t k = 0; k < size; ++k) {
    for (std::size_t b = 0; b < size; ++b) {
      if (!before[b][k]) continue;
      for (std::size_t a = 0; a < size; ++a) {
        if (before[k][a]) before[b][a] = true;
      }
    }
  }
  return before;
}

std::set<std::int64_t> bytes(const sg::Region& region) {
  std::set<std::int64_t> all;
  for (std::int64_t row = 0; row < region.count; ++row) {
    for (std::int64_t i = 0; i < region.length; ++i) all.insert(region.offset + row * region.stride + i);
  }
  return all;
}

bool conflict(const sg::Graph& graph, sg::Node a, sg::Node b) {
  for (std::size_t i = 0; i < graph.num_accesses(a); ++i) {
    const auto x = graph.access(a, i);
    for (std::size_t k = 0; k < graph.num_accesses(b); ++k) {
      const auto y = graph.access(b, k);
      if (x.buffer != y.buffer || (!sg::writes(x.mode) && !sg::writes(y.mode))) continue;
      const auto mine = bytes(x.region), theirs = bytes(y.region);
      if (std::any_of(mine.begin(), mine.end(), [&](std::int64_t byte) { return theirs.contains(byte); })) return true;
    }
  }
  return false;
}

bool same_lane(const sg::Graph& graph, sg::Node a, sg::Node b) {
  return graph.lane(a) && graph.lane(a) == graph.lane(b);
}

// The required order of every pair, over `runs` runs of the graph in a row.
Closure wanted(const sg::Graph& graph, std::uint32_t runs) {
  const std::uint32_t size = graph.num_nodes();
  Closure before(size * runs, std::vector<bool>(size * runs));
  for (std::uint32_t b = 0; b < size * runs; ++b) {
    for (std::uint32_t a = 0; a < b; ++a) {
      const sg::Node x{a % size}, y{b % size};
      before[b][a] = conflict(graph, x, y) || same_lane(graph, x, y);
    }
  }
  return close(before);
}

Closure derived(const sg::Graph& graph, std::uint32_t runs) {
  const std::uint32_t size = graph.num_nodes();
  Closure before(size * runs, std::vector<bool>(size * runs));
  for (std::uint32_t run = 0; run < runs; ++run) {
    for (std::uint32_t node = 0; node < size; ++node) {
      for (const std::uint32_t p : graph.edges().before({node})) before[run * size + node][run * size + p] = true;
      if (run == 0) continue;
      for (const std::uint32_t p : graph.edges().before_loop({node}))
        before[run * size + node][(run - 1) * size + p] = true;
    }
  }
  return close(before);
}

// The graph with its nodes added in another order that keeps the order of related nodes. `was[i]`: the old number of
// node i.
sg::Graph reordered(const sg::Graph& graph, Random& random, std::vector<std::uint32_t>& was) {
  const std::uint32_t size = graph.num_nodes();
  std::vector<std::uint32_t> waiting(size, 0);
  std::vector<std::vector<std::uint32_t>> after(size);
  for (std::uint32_t b = 0; b < size; ++b) {
    for (std::uint32_t a = 0; a < b; ++a) {
      const sg::Node x{a}, y{b};
      // Parts of one rank stay in order too: their issue positions depend on it.
      const bool parts = graph.has_part(x) && graph.has_part(y) && graph.rank(x) == graph.rank(y);
      if (!parts && !conflict(graph, x, y) && !same_lane(graph, x, y)) continue;
      ++waiting[b];
      after[a].push_back(b);
    }
  }
  sg::Graph out(graph.num_ranks());
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) (void)out.buffer(graph.spec(sg::Buffer{i}));
  for (std::uint32_t i = 0; i < graph.num_groups(); ++i) (void)out.group(graph.spec(sg::Group{i}));
  std::vector<std::uint32_t> ready;
  for (std::uint32_t i = 0; i < size; ++i) {
    if (waiting[i] == 0) ready.push_back(i);
  }
  was.clear();
  while (!ready.empty()) {
    std::swap(ready[random.below(ready.size())], ready.back());
    const std::uint32_t node = ready.back();
    ready.pop_back();
    was.push_back(node);
    out.add(graph.spec(sg::Node{node}));
    for (const std::uint32_t next : after[node]) {
      if (--waiting[next] == 0) ready.push_back(next);
    }
  }
  return out;
}

using EdgeSet = std::set<std::pair<std::uint32_t, std::uint32_t>>;

EdgeSet edge_set(const sg::Graph& graph, const std::vector<std::uint32_t>& was, bool loop) {
  EdgeSet set;
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    for (const std::uint32_t p : loop ? graph.edges().before_loop({node}) : graph.edges().before({node}))
      set.emplace(was[p], was[node]);
  }
  return set;
}

std::vector<std::uint32_t> identity(std::uint32_t size) {
  std::vector<std::uint32_t> all(size);
  for (std::uint32_t i = 0; i < size; ++i) all[i] = i;
  return all;
}

}  // namespace

TEST_CASE("derived edges have exactly the transitive closure of all conflicts", "[engine][derive]") {
  const int graphs = 400 / sg::testing::scale();
  for (int seed = 1; seed <= graphs; ++seed) {
    CAPTURE(seed);
    const sg::Graph graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), {.min_nodes = 5, .max_nodes = 40});
    const Closure closure = wanted(graph, 1);
    REQUIRE(derived(graph, 1) == closure);
    for (std::uint32_t b = 0; b < graph.num_nodes(); ++b) {
      for (std::uint32_t a = 0; a < graph.num_nodes(); ++a) {
        if (sg::reaches(graph, {a}, {b}) != closure[b][a]) FAIL("reaches(" << a << ", " << b << ")");
      }
    }
  }
}

TEST_CASE("loop edges order several runs in a row like one long graph", "[engine][derive][loop]") {
  const int graphs = 250 / sg::testing::scale();
  for (int seed = 1; seed <= graphs; ++seed) {
    CAPTURE(seed);
    const sg::Graph graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), {.min_nodes = 4, .max_nodes = 16});
    REQUIRE(derived(graph, 3) == wanted(graph, 3));
  }
}

TEST_CASE("an edge from a node with a lane is never implied by others", "[engine][derive]") {
  const int graphs = 300 / sg::testing::scale();
  for (int seed = 1; seed <= graphs; ++seed) {
    CAPTURE(seed);
    const sg::Graph graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), {.min_nodes = 5, .max_nodes = 40});
    for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
      for (const std::uint32_t a : graph.edges().before({node})) {
        if (!graph.lane(sg::Node{a})) continue;
        for (const std::uint32_t p : graph.edges().before({node})) {
          if (p != a && sg::reaches(graph, {a}, {p})) FAIL(a << " -> " << node << " is implied through " << p);
        }
      }
    }
  }
}

TEST_CASE("the order in which unrelated nodes are added does not change the edges", "[engine][derive]") {
  const int graphs = 300 / sg::testing::scale();
  for (int seed = 1; seed <= graphs; ++seed) {
    CAPTURE(seed);
    const sg::Graph graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), {.min_nodes = 5, .max_nodes = 40});
    Random random(static_cast<std::uint64_t>(seed));
    std::vector<std::uint32_t> was;
    const sg::Graph other = reordered(graph, random, was);
    REQUIRE(other.num_nodes() == graph.num_nodes());
    for (const bool loop : {false, true})
      REQUIRE(edge_set(other, was, loop) == edge_set(graph, identity(graph.num_nodes()), loop));
  }
}

TEST_CASE("a slice is the nodes of its ranks with the edges of these ranks", "[engine][slice]") {
  const int graphs = 200 / sg::testing::scale();
  for (int seed = 1; seed <= graphs; ++seed) {
    CAPTURE(seed);
    const sg::Graph graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), sg::testing::RandomGraphOptions::medium());
    for (const sg::RankSet& ranks : sg::testing::rank_sets(graph.num_ranks())) {
      CAPTURE(to_string(ranks));
      const sg::Graph part = sg::slice(graph, ranks);
      std::vector<std::uint32_t> ids;
      for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
        if (ranks.contains(graph.rank({node}))) ids.push_back(node);
      }
      REQUIRE(part.num_nodes() == ids.size());
      for (std::uint32_t i = 0; i < ids.size(); ++i) {
        for (const bool loop : {false, true}) {
          const auto mine  = loop ? part.edges().before_loop({i}) : part.edges().before({i});
          const auto whole = loop ? graph.edges().before_loop({ids[i]}) : graph.edges().before({ids[i]});
          REQUIRE(mine.size() == whole.size());
          for (std::size_t k = 0; k < mine.size(); ++k) REQUIRE(ids[mine[k]] == whole[k]);
        }
      }
      REQUIRE(sg::slice(part, ranks) == part);
      REQUIRE(part.ranks() == ranks);
    }
  }
}
