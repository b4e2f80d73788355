#include "ops/cpu/gemm/x86/avx512_pack.hpp"
#include "ops/cpu/gemm/x86/panels.hpp"

// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c.
namespace stepgraph::cpu {
namespace {

struct SixteenLanes : PackLines {
  using Vector              = __m512;
  using Mask                = __mmask16;
  static constexpr int size = 16;
  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector all(float value) { return _mm512_set1_ps(value); }
  static Vector load(const float* from) { return _mm512_loadu_ps(from); }
  static Vector load(const float* from, Mask mask) { return _mm512_maskz_loadu_ps(mask, from); }
  static void store(float* to, Vector value) { _mm512_storeu_ps(to, value); }
  static void store(float* to, Vector value, Mask mask) { _mm512_mask_storeu_ps(to, mask, value); }
  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  // An intrinsic lets GCC choose the operand to overwrite, and then it moves and spills sums.
  static Vector multiply_add(Vector a, Vector b, Vector c) {
    asm("vfmadd231ps %1, %2, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
  }
  // The same with `a` in all lanes. Each row of a register block that uses it saves an instruction and costs a load. 4 to
  // 6 rows were fastest; with 10 or 12 loads limit the speed.
  static constexpr int rows_from_memory = 4;
  static Vector multiply_add_all(const float& a, Vector b, Vector c) {
    asm("vfmadd231ps %1%{1to16%}, %2, %0" : "+v"(c) : "m"(a), "v"(b));
    return c;
  }
  static Mask mask(std::int64_t lanes) {  // the first `lanes`; may be negative or too large
    return static_cast<Mask>(lanes <= 0 ? 0 : 0xffffU >> (size - least(lanes, size)));
  }
};

}  // namespace

// 24 of 32 registers hold sums. A panel of columns is 16 KiB, half of a small first-level cache.
template <class T>
void multiply_avx512(X86Blocks& packed, const PanelProduct<T>& product, const PartDone& done) {
  multiply_blocks<SixteenLanes, 12, 2, X86Blocks::max_rows, X86Blocks::max_cols, 64>(packed, product, done);
}
template void multiply_avx512(X86Blocks&, const PanelProduct<float>&, const PartDone&);
template void multiply_avx512(X86Blocks&, const PanelProduct<bf16>&, const PartDone&);
template void multiply_avx512(X86Blocks&, const PanelProduct<f16>&, const PartDone&);

}  // namespace stepgraph::cpu
