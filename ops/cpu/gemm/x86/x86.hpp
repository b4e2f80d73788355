#pragma once
#include <cstdint>

#include "engine/base/half.hpp"
#include "ops/cpu/matrix.hpp"

// Our product for x86-64, compiled once for AVX2 with FMA and once for AVX-512. Files compiled for either include
// nothing beyond this header: an inline function compiled for them could replace the one that older processors run.
namespace stepgraph::cpu {

// A thread's packed operands, in panels of the register block's rows and columns. Both stay in a second-level cache of
// 1 MiB.
struct X86Blocks {
  static constexpr std::int64_t max_depth = 128, max_rows = 240, max_cols = 1024;
  alignas(64) float a[max_rows * max_depth];
  alignas(64) float b[max_cols * max_depth];
};

// The bits of an element depend only on its row, its column, base, bias, times and k, and are the same for both: sums
// over blocks of k, whose length follows from k, are added to the base one after the other. Each step of k is one fused
// multiply-add.
template <class T>
void multiply_avx2(X86Blocks& packed, const PanelProduct<T>& product, const PartDone& done);
template <class T>
void multiply_avx512(X86Blocks& packed, const PanelProduct<T>& product, const PartDone& done);

}  // namespace stepgraph::cpu
