#pragma once
#include <cstdint>

#include "engine/base/half.hpp"
#include "ops/cpu/matrix.hpp"

// Products of bf16 operands by instructions that multiply pairs of bf16 and add them in f32: BFMMLA on 64-bit Arm,
// VDPBF16PS (AVX-512 BF16) and TDPBF16PS (AMX) on x86-64. Files compiled for them include only
// headers whose functions are in an anonymous namespace, and intrinsics: an inline function compiled for them could
// replace the one that older processors run.
//
// The bits of an element depend only on its row, its column, base, bias, times and k: k is cut into blocks whose length
// follows from k, each block is summed alone, and the blocks are added in order. The three instructions differ in the
// order of sums inside a block and in rounding, so each gives other bits. All of them treat subnormal operands as zero
// and flush subnormal results to zero. BFMMLA adds two pairs of products at a time and rounds to odd, with an error of
// up to one unit in the last place; the other two round to nearest. VDPBF16PS adds the second product of a pair, then
// the first one; TDPBF16PS adds the first and the second products of 16 pairs apart, then both sums.
namespace stepgraph::cpu {

// c = a b. Out is float or bf16:
// - float: c = ((base + a b) + bias) times; the blocks of k are added to the base one by one.
// - bf16: c = base + (a b + bias), rounded once, then multiplied by `times` and rounded again.
template <class Out>
using Bf16Product = PanelProduct<bf16, Out, bf16>;

// A thread's packed operands and the sums of earlier blocks of k. The largest sizes of all kernels.
struct Bf16Room {
  static constexpr std::int64_t a_size = 256 * 1024, b_size = 96 * 1024, sums_size = 512 * 512, block_size = 32 * 32;
  alignas(64) std::uint16_t a[a_size];
  alignas(64) std::uint16_t b[b_size];
  alignas(64) float sums[sums_size];
  alignas(64) float block[block_size];
};

template <class Out>
void multiply_neon_bf16(Bf16Room& room, const Bf16Product<Out>& product, const PartDone& done);
template <class Out>
void multiply_avx512_bf16(Bf16Room& room, const Bf16Product<Out>& product, const PartDone& done);
// The caller has asked for permission to use tiles: has(Instructions::amx) does.
template <class Out>
void multiply_amx(Bf16Room& room, const Bf16Product<Out>& product, const PartDone& done);

// The one that this machine runs fastest (STEPGRAPH_INSTRUCTIONS), for results in f32. Null: it has none.
using Bf16Multiply = void (*)(Bf16Room& room, const Bf16Product<float>& product, const PartDone& done);
[[nodiscard]] Bf16Multiply best_bf16_product();
// The calling thread's. Allocated once, since it is too large for a stack.
[[nodiscard]] Bf16Room& bf16_room();

}  // namespace stepgraph::cpu
