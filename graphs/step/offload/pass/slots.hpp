#pragma once
#include <string>
#include <vector>

#include "graphs/step/offload/pass/uses.hpp"

// Memory for the buffers of a use. Internal to graphs/step/offload.
namespace stepgraph::offload {

// Gives each use that needs one a slot, and its buffers their places in it. A slot is a buffer that uses of one
// class take one after another; it is as large as its largest tenant. Uses of a class take HomePlan::slots of them in
// turn; there are more only where more uses overlap. Each use of a staged unit has a slot of its own: a host update
// then never waits for another one. Slots on the host share no memory unless HomePlan::shares_staging. `out` gets the
// buffers.
[[nodiscard]] std::vector<Buffer> assign_slots(Graph& out, const HomeTable& table, std::vector<Use>& uses,
                                               const HomePlan& plan);

// By use: the place after which it is filled; none: at the beginning of the rank. Fills of a rank are in the order of
// uses, and each is as early as its slot and its homes allow. Staged units are filled about `depth` layers ahead.
[[nodiscard]] std::vector<std::uint32_t> fill_places(const HomeTable& table, const std::vector<Use>& uses, int depth);

}  // namespace stepgraph::offload
