#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#if defined(STEPGRAPH_WITH_CUDA)
#include "backends/cuda/devices.hpp"
#include "engine/base/error.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("CUDA devices are listed, or their absence is a backend error", "[backends][cuda]") {
  try {
    const auto devices = sg::cuda_devices();
    for (const auto& device : devices) CHECK(device.memory_bytes > 0);
    CHECK_THAT(sg::describe_cuda(), ContainsSubstring(devices.empty() ? "no device" : "compute capability"));
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::backend);
    CHECK_THAT(error.what(),
               ContainsSubstring("cuda: counting devices: ") && ContainsSubstring("or use backend loopback"));
    CHECK_THAT(sg::describe_cuda(), ContainsSubstring(error.what()));
  }
}
#endif
