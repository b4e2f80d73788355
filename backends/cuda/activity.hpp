#pragma once
#include <cstdint>
#include <vector>

namespace stepgraph {

// When something ran on a device, by one clock of the process.
struct CudaInterval {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns   = 0;
};

// Records when each kernel, copy and fill runs on this process's devices while it lives, those of CUDA graphs one by
// one too. By CUPTI, which comes with the CUDA Toolkit, is loaded when this is first made, and makes what it records
// take somewhat longer; and what runs after it too: CUPTI stays where it is. One at a time.
class CudaActivity {
 public:
  CudaActivity();  // throws Error(backend) where there is no CUPTI, it refuses, or another one lives
  ~CudaActivity();
  CudaActivity(const CudaActivity&)            = delete;
  CudaActivity& operator=(const CudaActivity&) = delete;

  // What has run since it was made or last asked, in no order; wait for the devices first. Throws Error(backend) where
  // some of it was lost.
  [[nodiscard]] std::vector<CudaInterval> take();
};

}  // namespace stepgraph
