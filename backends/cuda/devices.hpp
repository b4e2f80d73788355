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

// The CUDA devices of this machine. Throws Error(backend) if the driver is missing or too old, or no device is
// accessible.
[[nodiscard]] std::vector<CudaDevice> cuda_devices();

// The CUDA version of the build and the devices of this machine, in one line. Never throws.
[[nodiscard]] std::string describe_cuda();

}  // namespace stepgraph
