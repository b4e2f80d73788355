#pragma once
#include <string_view>

#include "ops/tape/tape.hpp"

// The two collectives of tensor parallelism, each the adjoint of the other. With one rank they return their input.
// Between a tp_sum and the next tp_copy, every rank holds all rows and computes the same. With sequence parallelism
// (TensorParallel::sequence) each rank holds its share of the rows there, and the same bytes travel as a reduce_scatter
// and an all_gather.
namespace stepgraph {

// Every rank uses all of x for its share of the work. Forward: no operation; backward: all-reduce of the gradients.
// With sequence parallelism, forward: all-gather of the ranks' rows; backward: reduce-scatter of the gradients.
[[nodiscard]] Tensor tp_copy(Tape& tape, const Tensor& x);

// Every rank holds a partial sum. Forward: all-reduce, in place; backward: every rank uses the same gradient. With
// sequence parallelism, forward: reduce-scatter of the rows; backward: all-gather of the gradients.
[[nodiscard]] Tensor tp_sum(Tape& tape, const Tensor& x);

// Adds this rank's part of an in-place all_reduce over the tensor-parallel ranks, for ops that need further ones.
void tp_all_reduce(Tape& tape, const Tensor& x, std::string_view name, Reduction reduction = Reduction::sum);

}  // namespace stepgraph
