#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "graphs/step/offload/homes.hpp"

// Which units are updated where, so that link, host and device end together.
namespace stepgraph {

// The weights of a unit on one rank, as far as their update is concerned.
struct UpdateUnit {
  std::string name            = {};
  std::int64_t elements       = 0;
  std::int64_t state_bytes    = 0;  // of master and moments: stay on the device, or travel both ways
  std::int64_t gradient_bytes = 0;  // travel down for an update on the host
  std::int64_t home_bytes     = 0;  // of gradients with homes in host memory: travel up for an update on the device
  std::int64_t value_bytes    = 0;  // travel up after it
};

// A choice for each unit, and when each resource is done with all of it, in seconds from the moment when updates begin.
struct UpdateBalance {
  std::vector<UpdateMode> modes    = {};
  std::vector<bool> keeps_gradient = {};  // by unit: its gradient stays on the device instead of in its home
  double h2d_s                     = 0;
  double d2h_s                     = 0;
  double host_s                    = 0;
  double device_s                  = 0;
  std::int64_t resident_bytes      = 0;
  [[nodiscard]] double bound_s() const noexcept;          // the longest of them
  [[nodiscard]] std::string_view bound() const noexcept;  // "h2d", "d2h", "host" or "device"
};

// The memory of the device that may be filled.
struct UpdateRoom {
  std::int64_t states    = 0;  // of resident units
  std::int64_t gradients = 0;  // of streamed units
};

// `units` in the order in which the next step needs their weights. The first ones stay resident, as many as fit
// room.states: then the forward pass can begin at once. Each other unit goes where it ends first, so that the
// resources end together. Gradients of streamed units stay on the device, as many as fit room.gradients.
[[nodiscard]] UpdateBalance balance_updates(std::span<const UpdateUnit> units, const OffloadRates& rates,
                                            const UpdateRoom& room = {});

}  // namespace stepgraph
