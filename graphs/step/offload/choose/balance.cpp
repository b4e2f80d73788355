#include "graphs/step/offload/choose/balance.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

double seconds(std::int64_t amount, double per_s) {
  return per_s > 0 ? static_cast<double>(amount) / per_s : std::numeric_limits<double>::infinity();
}

UpdateBalance with_unit(UpdateBalance so_far, const UpdateUnit& unit, UpdateMode mode, bool keeps_gradient,
                        const OffloadRates& rates) {
  const bool on_device = mode != UpdateMode::host;
  if (on_device && !keeps_gradient) so_far.h2d_s += seconds(unit.home_bytes, rates.h2d_bytes_per_s);
  if (on_device && rates.device_elements_per_s > 0) {
    so_far.device_s += seconds(unit.elements, rates.device_elements_per_s);
  }
  if (mode == UpdateMode::resident) so_far.resident_bytes += unit.state_bytes;
  if (mode == UpdateMode::streamed) {
    so_far.h2d_s += seconds(unit.state_bytes, rates.h2d_bytes_per_s);
    so_far.d2h_s += seconds(unit.state_bytes, rates.d2h_bytes_per_s);
  }
  if (mode == UpdateMode::host) {
    so_far.d2h_s += seconds(unit.gradient_bytes, rates.d2h_bytes_per_s);
    so_far.host_s += seconds(unit.elements, rates.host_elements_per_s);
    so_far.h2d_s += seconds(unit.value_bytes, rates.h2d_bytes_per_s);
  }
  so_far.modes.push_back(mode);
  so_far.keeps_gradient.push_back(keeps_gradient);
  return so_far;
}

}  // namespace

double UpdateBalance::bound_s() const noexcept { return std::max({h2d_s, d2h_s, host_s, device_s}); }

std::string_view UpdateBalance::bound() const noexcept {
  const std::array<std::pair<double, std::string_view>, 4> all{
      {{h2d_s, "h2d"}, {d2h_s, "d2h"}, {host_s, "host"}, {device_s, "device"}}};
  return std::ranges::max_element(all, {}, [](const auto& each) { return each.first; })->second;
}

UpdateBalance balance_updates(std::span<const UpdateUnit> units, const OffloadRates& rates, const UpdateRoom& room) {
  if (rates.h2d_bytes_per_s <= 0 || rates.d2h_bytes_per_s <= 0 || rates.host_elements_per_s < 0) {
    throw Error(ErrorKind::config,
                str("offload: rates of ", rates.h2d_bytes_per_s, " and ", rates.d2h_bytes_per_s, " bytes/s, ",
                    rates.host_elements_per_s, " elements/s (rates of copies above 0)"));
  }
  UpdateBalance best;
  bool resident               = true;  // the units that stay are the first ones, without gaps
  std::int64_t gradients_left = room.gradients;
  for (const UpdateUnit& unit : units) {
    resident = resident && best.resident_bytes + unit.state_bytes <= room.states;
    if (resident) {
      best = with_unit(std::move(best), unit, UpdateMode::resident, false, rates);
      continue;
    }
    const bool keeps       = unit.home_bytes > 0 && unit.home_bytes <= gradients_left;
    UpdateBalance streamed = with_unit(best, unit, UpdateMode::streamed, keeps, rates);
    UpdateBalance host     = with_unit(std::move(best), unit, UpdateMode::host, false, rates);
    const bool streams     = streamed.bound_s() <= host.bound_s();
    best                   = streams ? std::move(streamed) : std::move(host);
    if (streams && keeps) gradients_left -= unit.home_bytes;
  }
  return best;
}

}  // namespace stepgraph
