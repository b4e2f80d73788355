#pragma once
#include <cstdint>
#include <string_view>

#include "ops/cpu/matrix.hpp"
#include "ops/tape/tensor.hpp"

// Matrix products, computed in tiles on one core each. Internal to ops/. The bits of a result depend only on its sizes
// and on the layout of its operands, not on the thread that computes a tile or on memory addresses.
namespace stepgraph {

// c = (base +) a b + bias, rounded once from a sum in the wide type. The epilogue then multiplies c by `times`, and
// `activate` writes y and may change c.
template <class T, class Sum = T>
struct Gemm {
  std::int64_t m = 0, n = 0, k = 0;
  Matrix<T> a           = {};       // [m, k]
  Matrix<T> b           = {};       // [k, n]
  Into<T, Sum> c        = {};       // [m, n]; its base has the same row stride
  std::int64_t c_stride = 0;        // distance between rows, in elements
  const T* bias         = nullptr;  // [n], added to every row; null: 0
  const T* times        = nullptr;  // same layout as c; null: 1
  // Called for `size` consecutive elements in a row of c, as stored. Null: there is no y.
  void (*activate)(Sum* c, Sum* y, std::int64_t size) = nullptr;
  Sum* y                                              = nullptr;  // same layout as c; may be c
};

// `own` is portable C++ and always available: each element is a sum over k in blocks of fixed length, in order, and its
// bits depend only on its row, its column and k. `neon`, `sve`, `avx2` and `avx512` are our kernels for 64-bit Arm and
// x86-64, for all types but f64. The same holds for them, except that they add the blocks of k to the base one by one.
// `avx2` and `avx512` give the same bits; `sve` gives others, the same with vectors of any length. `neon_bf16`,
// `avx512_bf16` and `amx` multiply bf16 by instructions for it, each with its own bits (ops/cpu/gemm/gemm_bf16.hpp);
// for other types they are `neon` and `avx512`. Where one is not available or does not support the type, `own` is used.
// `fastest` is the best one that the machine has for the type, else the CBLAS found at configure time for the types it
// supports; the CBLAS comes first if it was requested by name.
enum class GemmKernel : std::uint8_t { fastest, neon, neon_bf16, sve, avx2, avx512, avx512_bf16, amx, own };
[[nodiscard]] bool has(GemmKernel kernel) noexcept;  // this machine and this build
// "blis", "openblas", "neon", "sve", "avx2", "avx512" or "own": the fastest one, for f32.
[[nodiscard]] std::string_view gemm_library();

// c is cut into tiles by its shape alone: halved again and again, until there are at least 64 (128 of f32) and none has
// more than 2^20 elements, or they are small. A BLAS gets fewer, larger ones. The tiles may be computed in any order on
// any threads, each once. They have almost equal sizes, and their number is a power of two. In the order of their
// numbers, each aligned power of two of them is a rectangle, so neighbours can be computed as one larger tile, which
// packs less. Each thread keeps up to 2 MiB of scratch for its tiles, and as much again for bf16.
template <class T = float>
[[nodiscard]] std::int64_t num_gemm_tiles(std::int64_t m, std::int64_t n, GemmKernel kernel = GemmKernel::fastest);
// How many neighbouring tiles a thread should compute as one, if it has as many. 1 for a BLAS: its bits depend on the
// size of a tile. Its tiles are larger instead.
template <class T = float>
[[nodiscard]] std::int64_t gemm_joined(std::int64_t m, std::int64_t n, GemmKernel kernel = GemmKernel::fastest);

// Tiles [first, end).
template <class T, class Sum>
void gemm_tiles(const Gemm<T, Sum>& problem, std::int64_t first, std::int64_t end,
                GemmKernel kernel = GemmKernel::fastest);

// All tiles, on the calling thread.
template <class T, class Sum>
void gemm(const Gemm<T, Sum>& problem, GemmKernel kernel = GemmKernel::fastest) {
  gemm_tiles(problem, 0, num_gemm_tiles<T>(problem.m, problem.n, kernel), kernel);
}

extern template void gemm_tiles(const Gemm<float>&, std::int64_t, std::int64_t, GemmKernel);
extern template void gemm_tiles(const Gemm<double>&, std::int64_t, std::int64_t, GemmKernel);
extern template void gemm_tiles(const Gemm<bf16>&, std::int64_t, std::int64_t, GemmKernel);
extern template void gemm_tiles(const Gemm<bf16, float>&, std::int64_t, std::int64_t, GemmKernel);
extern template void gemm_tiles(const Gemm<f16>&, std::int64_t, std::int64_t, GemmKernel);
extern template void gemm_tiles(const Gemm<f16, float>&, std::int64_t, std::int64_t, GemmKernel);

}  // namespace stepgraph
