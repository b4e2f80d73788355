#include <immintrin.h>

#include "ops/cpu/gemm/x86/bf16.hpp"

// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mf16c.
namespace stepgraph::cpu {
namespace {

struct Avx512Dots {
  using Sums  = __m512;
  using Pairs = __m512bh;
  static Sums zero() { return _mm512_setzero_ps(); }
  static Pairs load(const std::uint16_t* from) { return (Pairs)_mm512_loadu_si512(from); }
  static Pairs all(const std::uint16_t* from) {
    int pair = 0;
    std::memcpy(&pair, from, sizeof pair);
    return (Pairs)_mm512_set1_epi32(pair);
  }
  static Sums add(Sums sums, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sums, a, b); }
  static void store(float* to, Sums sums) { _mm512_storeu_ps(to, sums); }
};

}  // namespace

template <class Out>
void multiply_avx512_bf16(Bf16Room& room, const Bf16Product<Out>& product, const PartDone& done) {
  multiply_bf16<DotKernel<Avx512Dots>>(room, product, done);
}
template void multiply_avx512_bf16(Bf16Room&, const Bf16Product<float>&, const PartDone&);
template void multiply_avx512_bf16(Bf16Room&, const Bf16Product<bf16>&, const PartDone&);

}  // namespace stepgraph::cpu
