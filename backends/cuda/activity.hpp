#pragma once
#include <cstdint>
#include <vector>

namespace stepgraph {

// When a piece of work ran on a device, on one clock of the process.
struct CudaInterval {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns   = 0;
};

// While it lives, records when each kernel, copy and fill runs on this process's devices, including those inside CUDA
// graphs. Uses CUPTI, which comes with the CUDA Toolkit and is loaded on first use. CUPTI slows down the work that it
// records and, because it stays loaded, later work too. At most one object at a time.
class CudaActivity {
 public:
  CudaActivity();  // throws Error(backend) if CUPTI is missing or fails, or another CudaActivity exists
  ~CudaActivity();
  CudaActivity(const CudaActivity&)            = delete;
  CudaActivity& operator=(const CudaActivity&) = delete;

  // Everything that has run since construction or the last call, in no order. Wait for the devices first. Throws
  // Error(backend) if records were lost.
  [[nodiscard]] std::vector<CudaInterval> take();
};

}  // namespace stepgraph
