#pragma once
#include <cstdint>

// The shape parameters that CPU and CUDA attention kernels share. Internal to ops/.
namespace stepgraph {

struct AttentionShape {
  std::int64_t seq       = 1;
  std::int64_t heads     = 1;
  std::int64_t kv_heads  = 1;
  std::int64_t head_size = 1;
  double scale           = 1;

  [[nodiscard]] std::int64_t qkv_row() const { return (heads + 2 * kv_heads) * head_size; }
  [[nodiscard]] std::int64_t out_row() const { return heads * head_size; }
};

}  // namespace stepgraph
