#include "ops/cpu/gemm/arm/sve.hpp"

#include <arm_sve.h>

// Compiled with -march=armv8.2-a+sve.
namespace stepgraph::cpu {
namespace {

// The output of one vector.
[[gnu::always_inline]] inline void put(svbool_t mask, const PanelOut& to, std::int64_t row, std::int64_t col,
                                       svfloat32_t sum) {
  const std::int64_t at = row * to.stride + col;
  if (to.base != nullptr) sum = svadd_x(mask, svld1(mask, to.base + at), sum);
  if (to.bias != nullptr) sum = svadd_x(mask, sum, svld1(mask, to.bias + col));
  if (to.times != nullptr) sum = svmul_x(mask, sum, svld1(mask, to.times + at));
  svst1(mask, to.out + at, sum);
}

}  // namespace

std::int64_t sve_lanes() noexcept { return static_cast<std::int64_t>(svcntw()); }

// Vectors have no size while the program is compiled, so they cannot be in arrays: s12 is the sum of row 1 and
// vector 2. 24 of 32 registers hold sums. Four lanes of a are loaded into each 128 bits of a vector, so that each of
// them can be an operand of a multiplication.
#define STEPGRAPH_ROWS(each) each(0) each(1) each(2) each(3) each(4) each(5) each(6) each(7)
#define STEPGRAPH_ZERO(row) svfloat32_t s##row##0 = svdup_f32(0), s##row##1 = s##row##0, s##row##2 = s##row##0;
#define STEPGRAPH_ADD(row)                                                     \
  s##row##0 = svmla_lane(s##row##0, right0, row < 4 ? left0 : left1, row % 4); \
  s##row##1 = svmla_lane(s##row##1, right1, row < 4 ? left0 : left1, row % 4); \
  if constexpr (vectors == 3) s##row##2 = svmla_lane(s##row##2, right2, row < 4 ? left0 : left1, row % 4);
#define STEPGRAPH_PUT(row)                                                 \
  if (row < rows) {                                                        \
    put(mask0, to, row, 0, s##row##0);                                     \
    put(mask1, to, row, lanes, s##row##1);                                 \
    if constexpr (vectors == 3) put(mask2, to, row, 2 * lanes, s##row##2); \
  }
template <int vectors>
void multiply_sve_block(const float* a, const float* b, std::int64_t depth, const PanelOut& where, std::int64_t rows,
                        std::int64_t cols) {
  const PanelOut to        = where;  // a copy: the compiler cannot exclude that stores modify `where`
  const std::int64_t lanes = sve_lanes();
  const svbool_t all       = svptrue_b32();
  const std::int64_t end   = cols < vectors * lanes ? cols : vectors * lanes;
  for (std::int64_t i = 0; i < rows; ++i) {
    __builtin_prefetch(to.out + i * to.stride, 1);
    __builtin_prefetch(to.out + i * to.stride + end - 1, 1);
  }
  STEPGRAPH_ROWS(STEPGRAPH_ZERO)
  for (std::int64_t p = 0; p < depth; ++p, a += 8, b += vectors * lanes) {
    const svfloat32_t left0 = svld1rq(all, a), left1 = svld1rq(all, a + 4);
    const svfloat32_t right0 = svld1(all, b), right1 = svld1_vnum(all, b, 1);
    [[maybe_unused]] const svfloat32_t right2 = vectors == 3 ? svld1_vnum(all, b, 2) : right1;
    STEPGRAPH_ROWS(STEPGRAPH_ADD)
  }
  const svbool_t mask0 = svwhilelt_b32(std::int64_t{0}, cols), mask1 = svwhilelt_b32(lanes, cols);
  [[maybe_unused]] const svbool_t mask2 = svwhilelt_b32(2 * lanes, cols);
  STEPGRAPH_ROWS(STEPGRAPH_PUT)
}
#undef STEPGRAPH_ROWS
#undef STEPGRAPH_ZERO
#undef STEPGRAPH_ADD
#undef STEPGRAPH_PUT
template void multiply_sve_block<2>(const float*, const float*, std::int64_t, const PanelOut&, std::int64_t,
                                    std::int64_t);
template void multiply_sve_block<3>(const float*, const float*, std::int64_t, const PanelOut&, std::int64_t,
                                    std::int64_t);

}  // namespace stepgraph::cpu
