#include "backends/nccl/device_choice.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <vector>

#include "engine/base/error.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::nccl::choose_device;

TEST_CASE("a process over NCCL takes the GPU of its place on the machine", "[backends][nccl]") {
  const std::vector<int> all, some{2, 0}, twice{1, 1};
  CHECK(choose_device(0, all, 4, false).device == 0);
  CHECK(choose_device(3, all, 4, false).device == 3);
  CHECK_FALSE(choose_device(3, all, 4, false).shared);
  CHECK(choose_device(0, some, 4, false).device == 2);
  CHECK(choose_device(1, some, 4, false).device == 0);
  CHECK(choose_device(1, twice, 2, false).device == 1);
  CHECK(choose_device(1, twice, 2, false).shared);
  CHECK(choose_device(0, twice, 2, false).shared);
}

TEST_CASE("processes share a GPU only if NCCL takes them for several machines", "[backends][nccl]") {
  const std::vector<int> all, one{0};
  CHECK(choose_device(1, all, 1, true).device == 0);
  CHECK(choose_device(1, all, 1, true).shared);
  CHECK_THROWS_MATCHES(choose_device(1, all, 1, false), sg::Error,
                       MessageMatches(ContainsSubstring("no GPU for process 1 of this machine (LOCAL_RANK): 1 is "
                                                        "visible (one for each process")));
  CHECK_THROWS_MATCHES(choose_device(0, all, 0, true), sg::Error, MessageMatches(ContainsSubstring("0 are visible")));
  CHECK_THROWS_MATCHES(choose_device(2, one, 4, false), sg::Error,
                       MessageMatches(ContainsSubstring("the list has 1 (one for each process")));
  CHECK_THROWS_MATCHES(choose_device(0, std::vector<int>{7}, 4, false), sg::Error,
                       MessageMatches(ContainsSubstring("no device 7 (this machine has 4)")));
}
