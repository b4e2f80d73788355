// Which units are updated on the device, on the host, or stay resident.
#include "graphs/step/offload/choose/balance.hpp"

#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <utility>

#include "engine/base/error.hpp"

namespace sg = stepgraph;

namespace {

constexpr sg::OffloadRates usual{.h2d_bytes_per_s = 46e9, .d2h_bytes_per_s = 46e9, .host_elements_per_s = 2.1e9};

std::vector<sg::UpdateUnit> layers(int count) {
  constexpr std::int64_t elements = 30'000'000;
  return std::vector<sg::UpdateUnit>(static_cast<std::size_t>(count), {.name           = "layer",
                                                                       .elements       = elements,
                                                                       .state_bytes    = 12 * elements,
                                                                       .gradient_bytes = 4 * elements,
                                                                       .value_bytes    = 2 * elements});
}

auto count(const sg::UpdateBalance& balance, sg::UpdateMode mode) { return std::ranges::count(balance.modes, mode); }

}  // namespace

TEST_CASE("updates are divided so that link and host end together", "[graphs][offload]") {
  const auto units     = layers(60);
  const auto balance   = sg::balance_updates(units, usual);
  const double longest = balance.bound_s(), host = balance.host_s, down = balance.d2h_s;
  // With a share x on the host: host x / 2.1e9, down (4 x + 12 (1 - x)) / 46e9. Equal at x = 0.402.
  CHECK(count(balance, sg::UpdateMode::host) >= 23);
  CHECK(count(balance, sg::UpdateMode::host) <= 25);
  CHECK(count(balance, sg::UpdateMode::resident) == 0);
  CHECK(std::min(host, down) > 0.93 * longest);
  // No other division is better by more than one unit's time.
  for (int num_host = 0; num_host <= 60; ++num_host) {
    const double elements = 30e6, on_host = num_host * elements, streamed = (60 - num_host) * elements;
    const double other = std::max(on_host / 2.1e9, (4 * on_host + 12 * streamed) / 46e9);
    CHECK(longest <= other + 12 * elements / 46e9);
  }
  // Both kinds are spread over the step: neither resource waits for its first unit long.
  const auto first = [&](sg::UpdateMode mode) {
    return std::ranges::find(balance.modes, mode) - balance.modes.begin();
  };
  CHECK(first(sg::UpdateMode::host) < 4);
  CHECK(first(sg::UpdateMode::streamed) < 4);
}

TEST_CASE("the first units stay resident, as many as fit", "[graphs][offload]") {
  const auto units   = layers(10);
  const auto balance = sg::balance_updates(units, usual, {.states = 3 * units[0].state_bytes + 1});
  CHECK(balance.resident_bytes == 3 * units[0].state_bytes);
  for (std::size_t i = 0; i < 10; ++i) CHECK((balance.modes[i] == sg::UpdateMode::resident) == (i < 3));
  CHECK(sg::balance_updates(units, usual, {.states = 10 * units[0].state_bytes}).bound_s() == 0);
}

TEST_CASE("a slow host gets no update, and a slow link all of them", "[graphs][offload]") {
  const auto units          = layers(8);
  auto rates                = usual;
  rates.host_elements_per_s = 0;
  const auto streamed       = sg::balance_updates(units, rates);
  CHECK(count(streamed, sg::UpdateMode::streamed) == 8);
  CHECK(streamed.bound() == "h2d");
  CHECK(streamed.bound_s() == Catch::Approx(8 * 12 * 30e6 / 46e9));
  rates                 = usual;
  rates.h2d_bytes_per_s = rates.d2h_bytes_per_s = 1e9;
  const auto host                               = sg::balance_updates(units, rates);
  CHECK(count(host, sg::UpdateMode::host) == 8);
  CHECK(host.bound() == "d2h");
  rates.d2h_bytes_per_s = 0;
  CHECK_THROWS_AS(sg::balance_updates(units, rates), sg::Error);
}

TEST_CASE("gradients with homes travel up for updates on the device, unless they stay", "[graphs][offload]") {
  auto units = layers(10);
  for (auto& unit : units) unit.home_bytes = std::exchange(unit.gradient_bytes, 0);
  auto rates                = usual;
  rates.host_elements_per_s = 0;
  const auto fetched        = sg::balance_updates(units, rates);
  CHECK(fetched.h2d_s == Catch::Approx(10 * 16 * 30e6 / 46e9));
  CHECK(std::ranges::count(fetched.keeps_gradient, true) == 0);
  const auto kept = sg::balance_updates(units, rates, {.gradients = 4 * units[0].home_bytes + 1});
  CHECK(std::ranges::count(kept.keeps_gradient, true) == 4);
  CHECK(kept.h2d_s == Catch::Approx((10 * 16 - 4 * 4) * 30e6 / 46e9));
  // Units that the host updates leave theirs at home.
  const auto mixed = sg::balance_updates(units, usual, {.gradients = 100 * units[0].home_bytes});
  for (std::size_t i = 0; i < 10; ++i) CHECK(mixed.keeps_gradient[i] == (mixed.modes[i] == sg::UpdateMode::streamed));
}
