#include "engine/run/threads/numa_places.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <numeric>
#include <vector>

#include "engine/run/threads/first_touch.hpp"

namespace sg = stepgraph;
using sg::NodeRange;
using Nodes = std::vector<sg::NumaNode>;

namespace {

// A machine whose nodes have so many processors each.
Nodes machine(const std::vector<int>& sizes) {
  Nodes nodes;
  int next = 0;
  for (const int size : sizes) {
    nodes.emplace_back();
    for (int i = 0; i < size; ++i) nodes.back().processors.push_back(next++);
  }
  return nodes;
}

std::vector<NodeRange> nodes_of_ranks(int num_ranks, const Nodes& nodes) {
  std::vector<NodeRange> found;
  for (int i = 0; i < num_ranks; ++i) found.push_back(sg::nodes_of_rank(i, num_ranks, nodes));
  return found;
}

}  // namespace

TEST_CASE("ranks are dealt to NUMA nodes in order, and each node has ranks", "[engine][numa]") {
  const int num_nodes = GENERATE(1, 2, 4), num_ranks = GENERATE(range(1, 17));
  CAPTURE(num_nodes, num_ranks);
  const Nodes nodes = machine(std::vector<int>(static_cast<std::size_t>(num_nodes), 8));
  std::vector<int> ranks(static_cast<std::size_t>(num_nodes));
  int next = 0;
  for (const NodeRange of : nodes_of_ranks(num_ranks, nodes)) {
    if (num_ranks <= num_nodes) CHECK(of.first == next);  // no node has two ranks
    CHECK((of.first == next || of.first == next - 1));
    CHECK(of.count >= 1);
    next = of.end();
    for (int node = of.first; node < of.end(); ++node) ++ranks[static_cast<std::size_t>(node)];
  }
  CHECK(next == num_nodes);
  const auto [least, most] = std::minmax_element(ranks.begin(), ranks.end());
  CHECK(*least >= 1);
  CHECK(*most - *least <= 1);
}

TEST_CASE("ranks of a described machine have these NUMA nodes", "[engine][numa]") {
  const Nodes two = machine({8, 8}), four = machine({4, 4, 4, 4});
  CHECK(nodes_of_ranks(1, two) == std::vector<NodeRange>{{0, 2}});
  CHECK(nodes_of_ranks(2, two) == std::vector<NodeRange>{{0, 1}, {1, 1}});
  CHECK(nodes_of_ranks(4, two) == std::vector<NodeRange>{{0, 1}, {0, 1}, {1, 1}, {1, 1}});
  CHECK(nodes_of_ranks(1, four) == std::vector<NodeRange>{{0, 4}});
  CHECK(nodes_of_ranks(2, four) == std::vector<NodeRange>{{0, 2}, {2, 2}});
  CHECK(nodes_of_ranks(3, four) == std::vector<NodeRange>{{0, 1}, {1, 1}, {2, 2}});
  // By processors, where nodes have more and fewer.
  CHECK(sg::deal(10, machine({8, 2})) == std::vector<int>{8, 2});
  CHECK(sg::deal(2, machine({15, 1})) == std::vector<int>{1, 1});
  CHECK(sg::deal(7, machine({4, 4})) == std::vector<int>{4, 3});
  CHECK(sg::deal(16, machine({1, 1, 14})) == std::vector<int>{1, 1, 14});
  CHECK(sg::deal(3, machine({1, 1, 14})) == std::vector<int>{1, 1, 1});
}

TEST_CASE("threads are numbered by NUMA node", "[engine][numa]") {
  const sg::NumaPlaces places(6, machine({8, 4}));
  CHECK(places.binds());
  CHECK(places.num_nodes() == 2);
  CHECK(places.num_threads() == 6);
  CHECK(places.node(0).num_threads == 4);
  CHECK(places.node(1).first_thread == 4);
  CHECK(places.node(1).num_threads == 2);
  CHECK(places.all().num_threads == 6);
  for (int thread = 0; thread < 6; ++thread) CHECK(places.node_of_thread(thread) == (thread < 4 ? 0 : 1));
  CHECK(NodeRange{0, 1}.together({2, 2}) == NodeRange{0, 4});
  CHECK(NodeRange{1, 2}.together({2, 1}) == NodeRange{1, 2});
}

TEST_CASE("without NUMA nodes, and with fewer threads than nodes, no thread is bound", "[engine][numa]") {
  for (const sg::NumaPlaces& places : {sg::NumaPlaces(3), sg::NumaPlaces(3, machine({4, 4, 4, 4}))}) {
    CHECK_FALSE(places.binds());
    CHECK(places.num_nodes() == 1);
    CHECK(places.all().num_threads == 3);
    CHECK(places.node_of_thread(2) == 0);
    CHECK(places.nodes_of_rank(1, 2) == NodeRange{});
  }
  CHECK(sg::NumaPlaces(4, machine({4, 4, 4, 4})).binds());
}

TEST_CASE("each NUMA node of a rank has its part of the pages of each buffer", "[engine][numa]") {
  using Bytes                = std::vector<sg::TouchedBytes>;
  constexpr std::size_t page = 4096;
  const auto pages           = [&](std::size_t num_pages, const Bytes& buffers, const Nodes& nodes) {
    return sg::nodes_of_pages(num_pages * page, page, buffers, nodes);
  };
  using Found = std::vector<int>;
  CHECK(pages(4, {{0, 4 * page}}, machine({8})) == Found{0, 0, 0, 0});
  CHECK(pages(4, {{0, 4 * page}}, machine({8, 8})) == Found{0, 0, 1, 1});
  CHECK(pages(8, {{0, 4 * page}, {4 * page, 4 * page}}, machine({8, 8})) == Found{0, 0, 1, 1, 0, 0, 1, 1});
  CHECK(pages(4, {{0, 4 * page}}, machine({3, 1})) == Found{0, 0, 0, 1});
  CHECK(pages(8, {{0, 8 * page}}, machine({1, 1, 1, 1})) == Found{0, 0, 1, 1, 2, 2, 3, 3});
  // Of buffers that share pages the largest one counts, in any order.
  CHECK(pages(6, {{0, 6 * page}, {0, 2 * page}}, machine({1, 1})) == Found{0, 0, 0, 1, 1, 1});
  CHECK(pages(6, {{0, 2 * page}, {0, 6 * page}}, machine({1, 1})) == Found{0, 0, 0, 1, 1, 1});
  // Parts that end inside a page, and small buffers in one page.
  CHECK(pages(3, {{0, 3 * page}}, machine({1, 1})) == Found{0, 0, 1});
  CHECK(pages(1, {{0, 64}, {64, 64}}, machine({1, 1})) == Found{0});
  CHECK(pages(2, {}, machine({1, 1})) == Found{0, 0});
}
