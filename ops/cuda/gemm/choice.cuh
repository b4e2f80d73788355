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

// Chooses the cuBLASLt algorithm for a product. Internal to ops/cuda/.
//
// The library proposes algorithms, the likely fastest first. When a large product is first seen, all of them are timed,
// and the fastest is used from then on. Only algorithms whose result has exactly the bits of the first one's are
// considered, on operands whose sums round. The fastest may differ from run to run, but the bits are always those of
// the library's first choice: in every run and process, during capture, and before any measurement.
namespace stepgraph::cuda {

inline void check_blas(cublasStatus_t status, std::string_view doing) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ErrorKind::backend, str("cuda: ", doing, ": ", cublasLtGetStatusString(status)));
}

// The key of a choice.
struct Problem {
  int device;
  int type, out_type, compute;  // cudaDataType_t twice, cublasComputeType_t
  std::int64_t m, n, k;
  bool a_transposed, b_transposed;
  bool adds, in_place;  // adds to a base; the base is the output
  std::uint32_t epilogue;
  std::array<std::uint32_t, 6> alignments;  // of a, b, base, out, bias and the epilogue's second matrix
  std::size_t workspace;                    // the library's share

  friend auto operator<=>(const Problem&, const Problem&) = default;
};

// One product in the library's terms. Its matrices are column-major, so ours are their transposes: c^T = b^T a^T. All
// on the stack, without allocations.
struct Call {
  cublasLtMatmulDescOpaque_t operation = {};
  cublasLtMatrixLayoutOpaque_t first = {}, second = {}, out = {};
  const void *b = nullptr, *a = nullptr, *base = nullptr;
  const void *one = nullptr, *carried = nullptr;  // factors of the product and of the base, in host memory
  std::span<std::byte> written        = {};       // the output
  std::span<std::byte> written_beside = {};       // second output, of the epilogue
};

// The library's share of the queue's workspace, library_workspace_bytes; the rest is for measuring. Throws
// Error(backend) if the queue has less.
[[nodiscard]] std::span<std::byte> library_workspace(const DeviceQueue& queue, std::size_t bytes);

// Returns false if the library has no algorithm. May wait for the stream, unless it is being captured.
[[nodiscard]] bool enqueue_call(const DeviceQueue& queue, const Problem& problem, Call& call);

}  // namespace stepgraph::cuda
