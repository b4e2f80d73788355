#pragma once
#include "engine/run/device.hpp"

namespace stepgraph::cuda {

// Whether this build has CUDA kernels. The kernels are declared in any case; check before calling:
//   if constexpr (cuda::built) {
//     if (const DeviceQueue* queue = context.device()) return cuda::gelu(*queue, x, y, size);
//   }
#ifdef STEPGRAPH_WITH_CUDA
inline constexpr bool built = true;
#else
inline constexpr bool built = false;
#endif

}  // namespace stepgraph::cuda
