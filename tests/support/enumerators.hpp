#pragma once
#include <array>

#include "engine/graph/part.hpp"

// All enumerators, for exhaustive tests.
namespace stepgraph::testing {

inline constexpr std::array all_types{DType::u8,   DType::i32, DType::i64, DType::f16,
                                      DType::bf16, DType::f32, DType::f64};
inline constexpr std::array all_reductions{Reduction::sum, Reduction::average, Reduction::min, Reduction::max,
                                           Reduction::product};
inline constexpr std::array all_collectives{
    PartOp::all_reduce, PartOp::reduce, PartOp::all_gather, PartOp::reduce_scatter, PartOp::broadcast,
    PartOp::scatter,    PartOp::gather, PartOp::all_to_all, PartOp::permute,        PartOp::barrier};

}  // namespace stepgraph::testing
