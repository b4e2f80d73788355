#include "ops/cpu/gemm/x86/panels.hpp"

// Compiled with -mavx2 -mfma -mf16c.
namespace stepgraph::cpu {
namespace {

struct EightLanes : PackEights {
  using Vector              = __m256;
  using Mask                = __m256i;
  static constexpr int size = 8;
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector all(float value) { return _mm256_set1_ps(value); }
  static Vector load(const float* from) { return _mm256_loadu_ps(from); }
  static Vector load(const float* from, Mask mask) { return _mm256_maskload_ps(from, mask); }
  static void store(float* to, Vector value) { _mm256_storeu_ps(to, value); }
  static void store(float* to, Vector value, Mask mask) { _mm256_maskstore_ps(to, mask, value); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  // An intrinsic lets GCC choose the operand to overwrite, and then it moves and spills sums.
  static Vector multiply_add(Vector a, Vector b, Vector c) {
    asm("vfmadd231ps %1, %2, %0" : "+x"(c) : "x"(a), "x"(b));
    return c;
  }
  static constexpr int rows_from_memory = 0;  // no instruction for it
  static Mask mask(std::int64_t lanes) {  // the first `lanes`; may be negative or too large
    const int count = static_cast<int>(lanes < 0 ? 0 : least(lanes, size));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
};

}  // namespace

// 12 of 16 registers hold sums. A panel of columns is 8 KiB, and all columns are 256 KiB.
template <class T>
void multiply_avx2(X86Blocks& packed, const PanelProduct<T>& product, const PartDone& done) {
  multiply_blocks<EightLanes, 6, 2, 240, 512, 0>(packed, product, done);
}
template void multiply_avx2(X86Blocks&, const PanelProduct<float>&, const PartDone&);
template void multiply_avx2(X86Blocks&, const PanelProduct<bf16>&, const PartDone&);
template void multiply_avx2(X86Blocks&, const PanelProduct<f16>&, const PartDone&);

}  // namespace stepgraph::cpu
