#pragma once
#include <cstdint>

#include "engine/base/types.hpp"
#include "engine/graph/access.hpp"
#include "ops/tape/number.hpp"
#include "ops/tape/tensor_shape.hpp"

namespace stepgraph {

// A dense array in a buffer of one rank, rows outermost: what ops take and return. A handle, freely copied. Two tensors
// may name one buffer (an op that works in place returns such a one); their numbers tell them apart.
struct Tensor {
  Buffer buffer     = {};
  TensorShape shape = {};
  DType type        = DType::f32;
  int id            = -1;  // on its tape

  [[nodiscard]] std::int64_t num_elements() const { return stepgraph::num_elements(shape); }
  [[nodiscard]] std::int64_t num_bytes() const { return num_elements() * static_cast<std::int64_t>(size_bytes(type)); }
  // As a matrix: the last dim are the columns, all others together the rows.
  [[nodiscard]] std::int64_t cols() const { return shape.empty() ? 1 : shape.back(); }
  [[nodiscard]] std::int64_t rows() const { return cols() == 0 ? 0 : num_elements() / cols(); }
  // A tensor is what a node reads or writes.
  operator Access() const { return buffer; }      // NOLINT
  operator AccessList() const { return buffer; }  // NOLINT
};

// A parameter as one rank holds it: what an op reads; its gradient is the tape's business.
struct Weight {
  Access value      = {};  // one range
  TensorShape shape = {};
  int id            = -1;                        // in the rank's WeightTable
  operator Access() const { return value; }      // NOLINT
  operator AccessList() const { return value; }  // NOLINT
};

// Where a kernel of a tape of T puts a sum: out[i] = base[i] + value, or value alone where there is no base. `base` may
// be `out`. Gradients of tensors are stored as the tensors are, those of weights in the wide type.
template <class T, class Sum = T>
struct Into {
  using Element = T;
  Sum* out;
  const Sum* base;  // null: nothing was there before
  std::int64_t size;
  void put(std::int64_t i, Wide<Sum> value) const {
    out[i] = narrow<Sum>(base == nullptr ? value : wide(base[i]) + value);
  }
};

}  // namespace stepgraph
