// The conformance suite on a device that does at once what is enqueued, and whose memory is only read and written by
// copy.
#include <catch2/catch_test_macros.hpp>

#include "tests/support/conformance/world_conformance_check.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/worlds/eager_world.hpp"

#if !defined(STEPGRAPH_WITH_CUDA)  // there ops would enqueue kernels of another device

namespace sg = stepgraph;

TEST_CASE("a world on a device passes the conformance suite", "[backends][device][conformance]") {
  sg::testing::world_conformance([](int ranks) { return sg::testing::EagerWorld(ranks); },
                                 {.rank_order   = true,
                                  .large_bytes  = (1 << 20) / sg::testing::scale(),
                                  .num_random   = sg::testing::cases(4),
                                  .step_timeout = std::chrono::seconds(20) * sg::testing::scale()});
}
#endif
