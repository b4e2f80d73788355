#pragma once
#include <cuda_runtime_api.h>

namespace stepgraph::cuda {

// A function of the CUDA driver, as of CUDA 12.0; null if the driver does not have it. The driver is not linked, so
// that the program also starts without one.
template <class Function>
[[nodiscard]] Function driver_function(const char* name) noexcept {
  void* found                             = nullptr;
  cudaDriverEntryPointQueryResult outcome = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned version              = 12000;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &outcome);
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
  return status == cudaSuccess && outcome == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}

}  // namespace stepgraph::cuda
