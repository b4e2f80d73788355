#include "backends/cuda/devices.hpp"

#include "backends/cuda/check.hpp"

namespace stepgraph {
namespace {

std::string version_text(int version) { return str(version / 1000, ".", version % 1000 / 10); }

// Throws with the cause and the remedies.
void check_count(cudaError_t status) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // reported here: clears it
  int driver = 0, runtime = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  static_cast<void>(cudaRuntimeGetVersion(&runtime));
  std::string why = str(cudaGetErrorString(status), " (use a working GPU");
  if (status == cudaErrorInsufficientDriver) {
    why = str(
        driver == 0 ? "no NVIDIA driver was found" : str("the NVIDIA driver knows CUDA up to ", version_text(driver)),
        " (install a driver for CUDA ", version_text(runtime), " or newer, and use a GPU");
  } else if (status == cudaErrorNoDevice) {
    why = "no device found (use an NVIDIA GPU that CUDA_VISIBLE_DEVICES does not hide";
  }
  throw Error(ErrorKind::backend, str("cuda: counting devices: ", why, "; or use backend loopback)"));
}

}  // namespace

std::vector<CudaDevice> cuda_devices() {
  int count = 0;
  check_count(cudaGetDeviceCount(&count));
  std::vector<CudaDevice> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, i), [&] { return str("looking at device ", i); });
    devices.push_back({properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                       properties.totalGlobalMem});
  }
  return devices;
}

std::string describe_cuda() {
  int runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  std::string text = str("CUDA ", version_text(runtime), ": ");
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
