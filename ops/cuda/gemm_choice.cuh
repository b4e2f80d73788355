#pragma once
#include <cublasLt.h>

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "engine/run/device.hpp"
#include "ops/cuda/common/launch.cuh"

// Which of cuBLASLt's algorithms computes a product: internal to ops/cuda/.
//
// The library says which it would try, the likely fastest first. A large product is computed by each of them the first
// time it is seen, and the fastest is used from then on: of those whose result has the very bits of the first one's, on
// operands whose sums round. So whoever is the fastest, which is not the same every time, bits are those of the
// library's first choice: in every run and every process, while a step is captured, and before anything was measured.
namespace stepgraph::cuda {

inline void check_blas(cublasStatus_t status, std::string_view doing) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ErrorKind::backend, str("cuda: ", doing, ": ", cublasLtGetStatusString(status)));
}

// What a choice depends on.
struct Problem {
  int device;
  int type, out_type, compute;  // cudaDataType_t twice, cublasComputeType_t
  std::int64_t m, n, k;
  bool a_transposed, b_transposed;
  bool adds, in_place;  // to a base; which is the output
  std::uint32_t epilogue;
  std::array<std::uint32_t, 6> alignments;  // of a, b, base, out, bias and what is kept beside
  std::size_t workspace;

  friend auto operator<=>(const Problem&, const Problem&) = default;
};

// One product as the library takes it. Its matrices are column by column, so that ours are their transposes:
// c^T = b^T a^T. All on the stack: nothing is allocated.
struct Call {
  cublasLtMatmulDescOpaque_t operation = {};
  cublasLtMatrixLayoutOpaque_t first = {}, second = {}, out = {};
  const void *b = nullptr, *a = nullptr, *base = nullptr;
  const void *one = nullptr, *carried = nullptr;  // what the product is multiplied with, and the base: on the host
  std::span<std::byte> written        = {};       // the output
  std::span<std::byte> written_beside = {};       // by the epilogue
};

// What of the queue's workspace the library gets; the rest is for measuring.
[[nodiscard]] std::span<std::byte> library_workspace(const DeviceQueue& queue);

// False: the library has nothing for it. May wait for the stream, unless that is being captured.
[[nodiscard]] bool enqueue_call(const DeviceQueue& queue, const Problem& problem, Call& call);

}  // namespace stepgraph::cuda
