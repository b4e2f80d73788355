#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/base/types.hpp"

// Reductions of typed bytes, for worlds and for nodes that do one step of a ring or a tree. They run element by element
// and always in the order of the inputs, so that bits depend neither on threads nor on how bytes are cut.
//
// f16 and bf16 are reduced in float and rounded once, f32 and f64 as they are. Integers wrap around; u8 and i32 are
// averaged from their true sum, i64 from its wrapped sum, both rounded towards 0.
//
// min and max are minimum and maximum of IEEE 754-2019: -0 is less than +0, and the result is NaN if any value is. That
// NaN is std::numeric_limits::quiet_NaN (for f16 0x7e00, for bf16 0x7fc0), whatever the bits of the others. So min and
// max have the same bits in any order, in every world and algorithm. Sums, averages and products that are NaN have a
// NaN of any bits.
//
// Bytes need not be aligned. Sizes are whole elements: throws Error(config) otherwise.
namespace stepgraph {

// Writes the reduction of all `in` to each `out`; all are `num_bytes` long. An output may be one of the inputs;
// otherwise they must not overlap.
void reduce(std::span<const std::byte* const> in, std::span<std::byte* const> out, std::size_t num_bytes, DType type,
            Reduction reduction);

// One step of a reduction: into = into op from. An average adds here and is divided at its end.
void reduce_into(std::span<std::byte> into, std::span<const std::byte> from, DType type, Reduction reduction);

// The end of an average whose `count` values were added one by one: divides the sums, rounded or wrapped as they are.
void divide(std::span<std::byte> values, DType type, std::int64_t count);

}  // namespace stepgraph
