#pragma once
#include <string_view>

#include "ops/tape/tape.hpp"

// The two collectives of tensor parallelism, each the other's adjoint. With one rank they are nothing: the tensor
// itself. Between a tp_sum and the next tp_copy every rank has all rows and does the same with them; or, with sequence
// parallelism (TensorParallel::sequence), each has its share of the rows, and the same bytes travel as a reduce_scatter
// and an all_gather.
namespace stepgraph {

// Every rank uses all of x for its own share of the work: nothing to do forward; backward, the ranks' gradients are
// added up. With sequence parallelism: x are the rank's rows, and all ranks' are gathered; backward, each gets its
// share of the gradients' sum.
[[nodiscard]] Tensor tp_copy(Tape& tape, const Tensor& x);

// Every rank has a summand of the whole: they are added up, in place; backward, the gradient is everybody's. With
// sequence parallelism each gets its rows of the sum; backward, the gradients of all rows are gathered.
[[nodiscard]] Tensor tp_sum(Tape& tape, const Tensor& x);

// One part of an all_reduce over the tensor-parallel ranks, in place on the tape's tensor, for ops that need more.
void tp_all_reduce(Tape& tape, const Tensor& x, std::string_view name, Reduction reduction = Reduction::sum);

}  // namespace stepgraph
