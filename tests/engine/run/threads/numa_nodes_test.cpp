#include "engine/run/threads/numa_nodes.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "engine/run/threads/affinity.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/variable.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Nodes = std::vector<sg::NumaNode>;

namespace {

std::vector<int> first_processors(int count) {
  std::vector<int> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

TEST_CASE("text describes NUMA nodes as lists of processors", "[engine][numa]") {
  const std::vector<int> allowed = first_processors(16);
  CHECK(sg::parse_numa_nodes("0/1", allowed) == Nodes{{{0}}, {{1}}});
  CHECK(sg::parse_numa_nodes("0-3;4-7", allowed) == Nodes{{{0, 1, 2, 3}}, {{4, 5, 6, 7}}});
  CHECK(sg::parse_numa_nodes("0,2,8-10/1", allowed) == Nodes{{{0, 2, 8, 9, 10}}, {{1}}});
  CHECK(sg::parse_numa_nodes("0-6:2/1-7:2", allowed) == Nodes{{{0, 2, 4, 6}}, {{1, 3, 5, 7}}});
  CHECK(sg::parse_numa_nodes("9,3", allowed) == Nodes{{{3, 9}}});
  CHECK(sg::parse_numa_nodes("0-3/4/5;6", allowed).size() == 4);
  CHECK(sg::parse_numa_nodes("4-5", std::vector<int>{4, 5}) == Nodes{{{4, 5}}});
}

TEST_CASE("text that describes no NUMA nodes is refused by name", "[engine][numa]") {
  const std::string text = GENERATE("on", "0-", "-1", "0/", "/0", "0//1", "0,", "3-1", "0-3:0", "0:2", "0x1", "0 1",
                                    "0-7:", "99999999999", "auto/0", "0-1-2", "1.5");
  CAPTURE(text);
  const std::string error = sg::testing::error_of([&] {
    (void)sg::parse_numa_nodes(text, std::vector<int>{0, 1, 2, 3});
  });
  CHECK_THAT(error, ContainsSubstring("STEPGRAPH_NUMA: '" + text + "' is not off, auto or lists of processors: '") &&
                        ContainsSubstring("(such as 0-7/8-15: a list for each NUMA node"));
}

TEST_CASE("processors that the process may not use, or that are in two lists, are refused", "[engine][numa]") {
  const std::vector<int> allowed{0, 1, 2, 6};
  const auto error = [&](const char* text) {
    return sg::testing::error_of([&] { (void)sg::parse_numa_nodes(text, allowed); });
  };
  CHECK(error("0-1/2-3") ==
        "STEPGRAPH_NUMA: '0-1/2-3' has processor 3, which this process may not use (it may use 0-2,6)");
  CHECK_THAT(error("0-2147483647"), ContainsSubstring("has processor 3, which this process may not use"));
  CHECK(error("0-1/1-2") == "STEPGRAPH_NUMA: '0-1/1-2' has processor 1 twice (each processor in one list)");
  CHECK(error("0,0") == "STEPGRAPH_NUMA: '0,0' has processor 0 twice (each processor in one list)");
}

TEST_CASE("the system's folder describes nodes by number, without processors that are not allowed", "[engine][numa]") {
  const sg::testing::TempFolder folder;
  const auto put = [&](const std::string& node, const std::string& list) {
    std::filesystem::create_directory(folder / node);
    folder.put(node + "/cpulist", list);
  };
  put("node0", "0-3,8-11\n");
  put("node2", "\n");  // memory alone
  put("node10", "12-15\n");
  put("node3", "4-7\n");
  folder.put("possible", "0-10\n");
  CHECK(sg::numa_nodes_in(folder.path(), first_processors(16)) ==
        Nodes{{{0, 1, 2, 3, 8, 9, 10, 11}}, {{4, 5, 6, 7}}, {{12, 13, 14, 15}}});
  CHECK(sg::numa_nodes_in(folder.path(), std::vector<int>{2, 9, 13}) == Nodes{{{2, 9}}, {{13}}});
  CHECK(sg::numa_nodes_in(folder / "absent", std::vector<int>{2, 9}) == Nodes{{{2, 9}}});
  put("node4", "x\n");
  CHECK_THAT(sg::testing::error_of([&] { (void)sg::numa_nodes_in(folder.path(), first_processors(16)); }),
             ContainsSubstring("has 'x', which is not a list of processors"));
}

TEST_CASE("STEPGRAPH_NUMA chooses no nodes, those of the machine, or described ones", "[engine][numa]") {
  const std::vector<int> allowed = sg::allowed_processors();
  REQUIRE_FALSE(allowed.empty());
  for (const char* const value : {"off", ""}) {
    const sg::testing::Variable numa("STEPGRAPH_NUMA", value);
    CHECK(sg::chosen_numa_nodes().empty());
  }
  {
    const sg::testing::Variable numa("STEPGRAPH_NUMA", "auto");
    const Nodes found = sg::chosen_numa_nodes(), all = sg::numa_nodes_in("/sys/devices/system/node", allowed);
    CHECK(found == (all.size() > 1 ? all : Nodes{}));
  }
  {
    const sg::testing::Variable numa("STEPGRAPH_NUMA", std::to_string(allowed.front()));
    CHECK(sg::chosen_numa_nodes() == Nodes{{{allowed.front()}}});
  }
  const sg::testing::Variable numa("STEPGRAPH_NUMA", std::to_string(allowed.back() + 1));
  CHECK_THAT(sg::testing::error_of([] { (void)sg::chosen_numa_nodes(); }),
             ContainsSubstring("which this process may not use (it may use " + sg::processor_list(allowed) + ")"));
}

TEST_CASE("a set of processors can have numbers above 1024", "[engine][numa]") {
  const std::vector<int> processors{0, 63, 64, 1023, 1024, 5000};
  CHECK(sg::Affinity(processors).processors() == processors);
  CHECK(sg::processor_list(processors) == "0,63-64,1023-1024,5000");
  CHECK(sg::processor_list({}).empty());
}
