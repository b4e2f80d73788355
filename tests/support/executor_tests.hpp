#pragma once
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <chrono>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/worlds/waiting_world.hpp"

// Names that all tests of the executor use.
namespace stepgraph::testing::executor_tests {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using testing::error_of;
using testing::WaitingWorld;

inline constexpr Rank r0{0};

}  // namespace stepgraph::testing::executor_tests
