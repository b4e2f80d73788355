#pragma once
#include "ops/cuda/layers/residual.hpp"
#include "ops/shared/dropout_mask.hpp"

namespace stepgraph::cuda {

// The kernel argument for a site's dropout. The step is the node's read number `step`; the kernel reads it on the
// device.
[[nodiscard]] inline Drop device_drop(const DropoutSite& site, const Context& context, std::size_t step,
                                      std::int64_t first_element) {
  const DropoutMask any = site.mask_at(0);  // only its key depends on the step
  return {.key     = site.key,
          .dropped = any.dropped,
          .scale   = any.scale,
          .step    = context.read<std::int64_t>(step).data(),
          .first   = first_element};
}

}  // namespace stepgraph::cuda
