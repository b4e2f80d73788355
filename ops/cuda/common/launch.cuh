#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "engine/base/error.hpp"
#include "engine/run/device.hpp"
#include "ops/tape/number.hpp"

// Shared by the kernels of ops/cuda/.
namespace stepgraph::cuda {

inline cudaStream_t stream_of(const DeviceQueue& queue) { return static_cast<cudaStream_t>(queue.stream); }

// After a launch: throws Error(backend) if it failed.
inline void check_launch(std::string_view kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess)
    throw Error(ErrorKind::backend, str("cuda: launching ", kernel, ": ", cudaGetErrorString(status)));
}

inline void check_cuda(cudaError_t status, std::string_view doing) {
  if (status != cudaSuccess) throw Error(ErrorKind::backend, str("cuda: ", doing, ": ", cudaGetErrorString(status)));
}

// CUDA's own element type: bf16 and f16 have the same bits there.
template <class T>
struct NativeType {
  using type = T;
};
template <>
struct NativeType<bf16> {
  using type = __nv_bfloat16;
};
template <>
struct NativeType<f16> {
  using type = __half;
};
template <class T>
using Native = typename NativeType<T>::type;

template <class T>
Native<T>* native(T* elements) {
  return reinterpret_cast<Native<T>*>(elements);
}
template <class T>
const Native<T>* native(const T* elements) {
  return reinterpret_cast<const Native<T>*>(elements);
}

// Widens to the compute type: float, or double for double.
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }
template <class T>
__device__ T narrow_to(float x);
template <>
__device__ inline float narrow_to<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 narrow_to<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half narrow_to<__half>(float x) {
  return __float2half_rn(x);
}
template <class T>
__device__ T narrow_to(double x);
template <>
__device__ inline double narrow_to<double>(double x) {
  return x;
}

// Multiprocessors of the current device. Only for uses whose results do not depend on the number.
inline int num_multiprocessors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "asking for multiprocessors");
  return count;
}

inline unsigned blocks_for(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace stepgraph::cuda
