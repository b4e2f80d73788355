#include "backends/cuda/devices.hpp"

#include "backends/cuda/check.hpp"

namespace stepgraph {

std::vector<CudaDevice> cuda_devices() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting devices");
  std::vector<CudaDevice> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, i), str("looking at device ", i));
    devices.push_back({properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                       properties.totalGlobalMem});
  }
  return devices;
}

std::string describe_cuda() {
  int runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  std::string text = str("CUDA ", runtime / 1000, ".", runtime % 1000 / 10, ": ");
  try {
    const auto devices = cuda_devices();
    if (devices.empty()) return text + "no device";
    for (std::size_t i = 0; i < devices.size(); ++i) {
      const CudaDevice& device = devices[i];
      text += str(i > 0 ? "; " : "", device.name, ", compute capability ", device.major, ".", device.minor, ", ",
                  device.memory_bytes >> 30, " GiB");
    }
    return text;
  } catch (const Error& error) {
    return text + error.what();
  }
}

}  // namespace stepgraph
