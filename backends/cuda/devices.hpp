#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace stepgraph {

struct CudaDevice {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int num_multiprocessors  = 0;
  std::size_t memory_bytes = 0;
};

// The CUDA devices of this machine. Throws Error(backend) when the driver says no: none there, too old, out of reach.
[[nodiscard]] std::vector<CudaDevice> cuda_devices();

// What was built in and what is here, in a line; never throws.
[[nodiscard]] std::string describe_cuda();

}  // namespace stepgraph
