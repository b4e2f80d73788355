#include "ops/cuda/gemm.hpp"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>

#include "ops/cuda/launch.cuh"

namespace stepgraph::cuda {
namespace {

void check_blas(cublasStatus_t status, std::string_view doing) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ErrorKind::backend, str("cuda: ", doing, ": ", cublasLtGetStatusString(status)));
}

template <class T>
inline constexpr cudaDataType_t data_type = CUDA_R_32F;
template <>
inline constexpr cudaDataType_t data_type<double> = CUDA_R_64F;
template <>
inline constexpr cudaDataType_t data_type<bf16> = CUDA_R_16BF;
template <>
inline constexpr cudaDataType_t data_type<f16> = CUDA_R_16F;

// The largest power of two that divides an address, as far as it makes a difference: no load has more bytes. So where
// memory is planned otherwise, in arenas that are aligned so far, the choice stays.
std::uint32_t alignment(const void* address) {
  const auto bits = reinterpret_cast<std::uintptr_t>(address) | 16;
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}

// --- the choice of an algorithm --------------------------------------------------------------------------------------

// What it depends on.
struct Problem {
  int device;
  int type, out_type;  // cudaDataType_t
  std::int64_t m, n, k;
  bool a_transposed, b_transposed;
  std::uint32_t epilogue;
  std::array<std::uint32_t, 6> alignments;  // of a, b, base, out, bias and what is kept beside
  std::size_t workspace;

  [[nodiscard]] auto all() const {
    return std::tie(device, type, out_type, m, n, k, a_transposed, b_transposed, epilogue, alignments, workspace);
  }
  bool operator<(const Problem& other) const { return all() < other.all(); }
};

// One product as the library takes it. Its matrices are column by column, so that ours are their transposes:
// c^T = b^T a^T. All on the stack: nothing is allocated.
struct Call {
  cublasLtMatmulDescOpaque_t operation = {};
  cublasLtMatrixLayoutOpaque_t first = {}, second = {}, out = {};
};

template <class Value>
void set(Call& call, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  check_blas(cublasLtMatmulDescSetAttribute(&call.operation, attribute, &value, sizeof(value)), "describing a product");
}

void set(cublasLtMatrixLayoutOpaque_t& layout, cudaDataType_t type, std::int64_t rows, std::int64_t cols) {
  check_blas(
      cublasLtMatrixLayoutInit(&layout, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols), rows),
      "describing a matrix");
}

// The library's first choice; none: it has nothing for the problem.
std::optional<cublasLtMatmulAlgo_t> ask_library(cublasLtHandle_t library, const Problem& problem, Call& call) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check_blas(cublasLtMatmulPreferenceInit(&preference), "describing a preference");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check_blas(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
               "describing a preference");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(problem.workspace));
  // Parts of a sum meet in the workspace, in the type they are summed in, or there is one part.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem.alignments[1]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem.alignments[0]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem.alignments[2]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem.alignments[3]);
  std::array<cublasLtMatmulHeuristicResult_t, 4> found;
  int num_found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(library, &call.operation, &call.first, &call.second, &call.out, &call.out,
                                     &preference, static_cast<int>(found.size()), found.data(), &num_found);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) check_blas(status, "choosing an algorithm for a product");
  for (int i = 0; i < num_found; ++i) {
    const auto& each = found[static_cast<std::size_t>(i)];
    if (each.state == CUBLAS_STATUS_SUCCESS && each.workspaceSize <= problem.workspace) return each.algo;
  }
  return std::nullopt;
}

// Of all threads: what was chosen once is used ever after.
std::optional<cublasLtMatmulAlgo_t> algorithm(cublasLtHandle_t library, const Problem& problem, Call& call) {
  static std::mutex mutex;
  static std::map<Problem, std::optional<cublasLtMatmulAlgo_t>> chosen;
  const std::lock_guard lock(mutex);
  const auto found = chosen.find(problem);
  if (found != chosen.end()) return found->second;
  return chosen.emplace(problem, ask_library(library, problem, call)).first->second;
}

// --- products --------------------------------------------------------------------------------------------------------

// False: the library has nothing for it. `beside` is what the epilogue keeps, where it does.
template <class T, class Sum>
bool enqueue(const DeviceQueue& queue, const Product<T, Sum>& product, cublasLtEpilogue_t epilogue, Sum* out,
             T* beside) {
  using Scale              = Wide<T>;
  constexpr bool in_double = std::is_same_v<T, double>;
  const auto library       = static_cast<cublasLtHandle_t>(queue.blas);
  const Sum* base          = product.c.base == nullptr ? out : product.c.base;
  int device               = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");

  Call call;
  check_blas(
      cublasLtMatmulDescInit(&call.operation, in_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, data_type<Scale>),
      "describing a product");
  const auto side = [](bool transposed) { return static_cast<std::int32_t>(transposed ? CUBLAS_OP_T : CUBLAS_OP_N); };
  set(call, CUBLASLT_MATMUL_DESC_TRANSA, side(product.b.transposed));
  set(call, CUBLASLT_MATMUL_DESC_TRANSB, side(product.a.transposed));
  set(call, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::uint32_t>(epilogue));
  if (product.bias != nullptr) set(call, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(product.bias));
  if (beside != nullptr) {
    set(call, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(beside));
    set(call, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, product.n);
  }
  const auto [m, n, k] = std::array{product.m, product.n, product.k};
  set(call.first, data_type<T>, product.b.transposed ? k : n, product.b.transposed ? n : k);
  set(call.second, data_type<T>, product.a.transposed ? m : k, product.a.transposed ? k : m);
  set(call.out, data_type<Sum>, n, m);

  const Problem problem{.device       = device,
                        .type         = data_type<T>,
                        .out_type     = data_type<Sum>,
                        .m            = m,
                        .n            = n,
                        .k            = k,
                        .a_transposed = product.a.transposed,
                        .b_transposed = product.b.transposed,
                        .epilogue     = static_cast<std::uint32_t>(epilogue),
                        .alignments   = {alignment(product.a.data), alignment(product.b.data), alignment(base),
                                         alignment(out), alignment(product.bias), alignment(beside)},
                        .workspace    = queue.workspace.size()};
  const auto chosen = algorithm(library, problem, call);
  if (!chosen) return false;
  const Scale one = 1, carried = product.c.base == nullptr ? 0 : 1;
  check_blas(cublasLtMatmul(library, &call.operation, &one, product.b.data, &call.first, product.a.data, &call.second,
                            &carried, base, &call.out, out, &call.out, &*chosen, queue.workspace.data(),
                            queue.workspace.size(), stream_of(queue)),
             "a product");
  return true;
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
  // The library adds no bias to double.
  if (!(std::is_same_v<T, double> && product.bias != nullptr) &&
      enqueue<T, Sum>(queue, product, epilogue, product.c.out, nullptr))
    return;
  Product<T, Sum> plain = product;
  if (product.bias != nullptr) {
    enqueue_bias(queue, product);
    plain.bias   = nullptr;
    plain.c.base = plain.c.out;
    if (enqueue<T, Sum>(queue, plain, CUBLASLT_EPILOGUE_DEFAULT, plain.c.out, nullptr)) return;
  }
  throw Error(ErrorKind::backend,
              str("cuda: cuBLASLt has no algorithm for a product of ", product.m, "x", product.k, " and ", product.k,
                  "x", product.n, product.a.transposed ? ", the first transposed" : "",
                  product.b.transposed ? ", the second transposed" : "", ", with ", queue.workspace.size(),
                  " bytes of workspace"));
}

template <class T>
bool multiply_gelu(const DeviceQueue& queue, const Product<T>& product, T* y) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    return false;
  } else {
    // What is kept beside must have rows of whole 16 bytes.
    const bool kept = y != product.c.out;
    if (product.m == 0 || product.n == 0 || product.k == 0) return false;
    if (kept && (product.n % 8 != 0 || alignment(product.c.out) < 16)) return false;
    const auto gelu   = static_cast<std::uint32_t>(kept ? CUBLASLT_EPILOGUE_GELU_AUX : CUBLASLT_EPILOGUE_GELU);
    const auto biased = static_cast<std::uint32_t>(product.bias == nullptr ? 0 : CUBLASLT_EPILOGUE_BIAS);
    return enqueue<T, T>(queue, product, static_cast<cublasLtEpilogue_t>(gelu | biased), y,
                         kept ? product.c.out : nullptr);
  }
}

template void multiply(const DeviceQueue&, const Product<float>&);
template void multiply(const DeviceQueue&, const Product<double>&);
template void multiply(const DeviceQueue&, const Product<bf16>&);
template void multiply(const DeviceQueue&, const Product<bf16, float>&);
template void multiply(const DeviceQueue&, const Product<f16>&);
template void multiply(const DeviceQueue&, const Product<f16, float>&);
template bool multiply_gelu(const DeviceQueue&, const Product<float>&, float*);
template bool multiply_gelu(const DeviceQueue&, const Product<double>&, double*);
template bool multiply_gelu(const DeviceQueue&, const Product<bf16>&, bf16*);
template bool multiply_gelu(const DeviceQueue&, const Product<f16>&, f16*);

}  // namespace stepgraph::cuda
