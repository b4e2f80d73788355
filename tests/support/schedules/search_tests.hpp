#pragma once
#include <catch2/catch_test_macros.hpp>
#include <random>

#include "graphs/schedule/search/timer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/schedules/search_setting.hpp"

// Names that tests of the parts of the search use.
namespace stepgraph::testing::search_tests {

using search::Rows;
using search::RowTimer;
using search::Setting;
using testing::draw;
using testing::random_setting;

}  // namespace stepgraph::testing::search_tests
