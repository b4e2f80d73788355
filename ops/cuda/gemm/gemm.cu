#include "ops/cuda/gemm/gemm.hpp"

#include <array>
#include <cstdint>
#include <span>
#include <type_traits>

#include "ops/cuda/common/launch.cuh"
#include "ops/cuda/common/workspace_bytes.hpp"
#include "ops/cuda/gemm/choice.cuh"

namespace stepgraph::cuda {
namespace {

template <class T>
inline constexpr cudaDataType_t data_type = CUDA_R_32F;
template <>
inline constexpr cudaDataType_t data_type<double> = CUDA_R_64F;
template <>
inline constexpr cudaDataType_t data_type<bf16> = CUDA_R_16BF;
template <>
inline constexpr cudaDataType_t data_type<f16> = CUDA_R_16F;

// The largest power of two that divides an address, up to 16, the widest load. A different memory plan therefore does
// not change the choice, since arenas are aligned at least that much.
std::uint32_t alignment(const void* address) {
  const auto bits = reinterpret_cast<std::uintptr_t>(address) | 16;
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}

template <class Value>
void set(Call& call, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  check_blas(cublasLtMatmulDescSetAttribute(&call.operation, attribute, &value, sizeof(value)), "describing a product");
}

void set(cublasLtMatrixLayoutOpaque_t& layout, cudaDataType_t type, std::int64_t rows, std::int64_t cols) {
  check_blas(
      cublasLtMatrixLayoutInit(&layout, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols), rows),
      "describing a matrix");
}

template <class T>
std::span<std::byte> bytes_at(T* elements, std::int64_t count) {
  return {reinterpret_cast<std::byte*>(elements), static_cast<std::size_t>(count) * sizeof(T)};
}

template <class T>
cublasComputeType_t compute_type(const DeviceQueue& queue) {
  if (std::is_same_v<T, double>) return CUBLAS_COMPUTE_64F;
  return std::is_same_v<T, float> && queue.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

template <class T, class Sum>
std::size_t library_share(const Product<T, Sum>& product) {
  return static_cast<std::size_t>(library_workspace_bytes(product.m, product.n, product.k, sizeof(Wide<T>)));
}

// A second matrix of an epilogue, with the layout of the output.
template <class T>
struct Beside {
  const T* read = nullptr;
  T* written    = nullptr;  // at most one of both is set
};

// Returns false if the library has no algorithm.
template <class T, class Sum>
bool enqueue(const DeviceQueue& queue, const Product<T, Sum>& product, cublasLtEpilogue_t epilogue, Sum* out,
             const Beside<T>& of_epilogue) {
  using Scale          = Wide<T>;
  const auto [m, n, k] = std::array{product.m, product.n, product.k};
  const bool adds      = product.c.base != nullptr;
  const Scale one = 1, carried = adds ? 1 : 0;
  const cublasComputeType_t compute = compute_type<T>(queue);
  const T* const beside             = of_epilogue.written == nullptr ? of_epilogue.read : of_epilogue.written;

  Call call{.b              = product.b.data,
            .a              = product.a.data,
            .base           = adds ? product.c.base : out,
            .one            = &one,
            .carried        = &carried,
            .written        = bytes_at(out, m * n),
            .written_beside = bytes_at(of_epilogue.written, of_epilogue.written == nullptr ? 0 : m * n)};
  check_blas(cublasLtMatmulDescInit(&call.operation, compute, data_type<Scale>), "describing a product");
  const auto side = [](bool transposed) { return static_cast<std::int32_t>(transposed ? CUBLAS_OP_T : CUBLAS_OP_N); };
  set(call, CUBLASLT_MATMUL_DESC_TRANSA, side(product.b.transposed));
  set(call, CUBLASLT_MATMUL_DESC_TRANSB, side(product.a.transposed));
  set(call, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::uint32_t>(epilogue));
  if (product.bias != nullptr) set(call, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(product.bias));
  if (beside != nullptr) {
    set(call, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<const void*>(beside));
    set(call, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, product.n);
  }
  set(call.first, data_type<T>, product.b.transposed ? k : n, product.b.transposed ? n : k);
  set(call.second, data_type<T>, product.a.transposed ? m : k, product.a.transposed ? k : m);
  set(call.out, data_type<Sum>, n, m);

  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  return enqueue_call(queue,
                      {.device       = device,
                       .type         = data_type<T>,
                       .out_type     = data_type<Sum>,
                       .compute      = compute,
                       .m            = m,
                       .n            = n,
                       .k            = k,
                       .a_transposed = product.a.transposed,
                       .b_transposed = product.b.transposed,
                       .adds         = adds,
                       .in_place     = adds && product.c.base == out,
                       .epilogue     = static_cast<std::uint32_t>(epilogue),
                       .alignments   = {alignment(call.a), alignment(call.b), alignment(call.base), alignment(out),
                                        alignment(product.bias), alignment(beside)},
                       .workspace    = library_share(product)},
                      call);
}

// Rows of an epilogue's second matrix must be multiples of 16 bytes.
template <class T>
bool fits_beside(const Product<T>& product, const T* beside) {
  return product.n * sizeof(T) % 16 == 0 && alignment(beside) == 16;
}

// (base +) bias in every row.
template <class T, class Sum>
__global__ void put_bias(const T* bias, std::int64_t size, std::int64_t n, Sum* out, const Sum* base) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= size) return;
  using W = decltype(widen(Sum{}));
  W value = base == nullptr ? W(0) : widen(base[i]);
  if (bias != nullptr) value += widen(bias[i % n]);
  out[i] = narrow_to<Sum>(value);
}

template <class T, class Sum>
void enqueue_bias(const DeviceQueue& queue, const Product<T, Sum>& product) {
  constexpr std::int64_t threads = 256;
  const std::int64_t size        = product.m * product.n;
  put_bias<<<blocks_for(size, threads), threads, 0, stream_of(queue)>>>(native(product.bias), size, product.n,
                                                                        native(product.c.out), native(product.c.base));
  check_launch("put_bias");
}

}  // namespace

template <class T, class Sum>
void multiply(const DeviceQueue& queue, const Product<T, Sum>& product) {
  if (product.m == 0 || product.n == 0) return;
  if (product.k == 0) return enqueue_bias(queue, product);
  const cublasLtEpilogue_t epilogue = product.bias == nullptr ? CUBLASLT_EPILOGUE_DEFAULT : CUBLASLT_EPILOGUE_BIAS;
  // The library does not support a bias for double.
  if (!(std::is_same_v<T, double> && product.bias != nullptr) &&
      enqueue<T, Sum>(queue, product, epilogue, product.c.out, {}))
    return;
  Product<T, Sum> plain = product;
  if (product.bias != nullptr) {
    enqueue_bias(queue, product);
    plain.bias   = nullptr;
    plain.c.base = plain.c.out;
    if (enqueue<T, Sum>(queue, plain, CUBLASLT_EPILOGUE_DEFAULT, plain.c.out, {})) return;
  }
  throw Error(ErrorKind::backend,
              str("cuda: cuBLASLt has no algorithm for a product of ", product.m, "x", product.k, " and ", product.k,
                  "x", product.n, product.a.transposed ? ", the first transposed" : "",
                  product.b.transposed ? ", the second transposed" : "", ", with ", library_share(product),
                  " bytes of workspace"));
}

template <class T>
bool multiply_gelu(const DeviceQueue& queue, const Product<T>& product, T* y) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    return false;
  } else {
    const bool kept = y != product.c.out;
    if (product.m == 0 || product.n == 0 || product.k == 0) return false;
    if (kept && !fits_beside(product, product.c.out)) return false;
    const auto gelu   = static_cast<std::uint32_t>(kept ? CUBLASLT_EPILOGUE_GELU_AUX : CUBLASLT_EPILOGUE_GELU);
    const auto biased = static_cast<std::uint32_t>(product.bias == nullptr ? 0 : CUBLASLT_EPILOGUE_BIAS);
    return enqueue<T, T>(queue, product, static_cast<cublasLtEpilogue_t>(gelu | biased), y,
                         {.written = kept ? product.c.out : nullptr});
  }
}

template <class T>
bool multiply_gelu_gradient(const DeviceQueue& queue, const Product<T>& product, const T* x) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    return false;
  } else {
    if (product.m == 0 || product.n == 0 || product.k == 0 || !fits_beside(product, x)) return false;
    return enqueue<T, T>(queue, product, CUBLASLT_EPILOGUE_DGELU, product.c.out, {.read = x});
  }
}

template void multiply(const DeviceQueue&, const Product<float>&);
template void multiply(const DeviceQueue&, const Product<double>&);
template void multiply(const DeviceQueue&, const Product<bf16>&);
template void multiply(const DeviceQueue&, const Product<bf16, float>&);
template void multiply(const DeviceQueue&, const Product<f16>&);
template void multiply(const DeviceQueue&, const Product<f16, float>&);
template bool multiply_gelu_gradient(const DeviceQueue&, const Product<float>&, const float*);
template bool multiply_gelu_gradient(const DeviceQueue&, const Product<double>&, const double*);
template bool multiply_gelu_gradient(const DeviceQueue&, const Product<bf16>&, const bf16*);
template bool multiply_gelu_gradient(const DeviceQueue&, const Product<f16>&, const f16*);
template bool multiply_gelu(const DeviceQueue&, const Product<float>&, float*);
template bool multiply_gelu(const DeviceQueue&, const Product<double>&, double*);
template bool multiply_gelu(const DeviceQueue&, const Product<bf16>&, bf16*);
template bool multiply_gelu(const DeviceQueue&, const Product<f16>&, f16*);

}  // namespace stepgraph::cuda
