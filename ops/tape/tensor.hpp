#pragma once
#include <cstdint>

#include "engine/base/types.hpp"
#include "engine/graph/access.hpp"
#include "ops/tape/number.hpp"
#include "ops/tape/tensor_shape.hpp"

namespace stepgraph {

// A dense row-major array in a buffer of one rank; ops take and return tensors. A handle, freely copied. Two tensors
// may share one buffer (an in-place op returns such a tensor); their ids differ.
struct Tensor {
  Buffer buffer     = {};
  TensorShape shape = {};
  DType type        = DType::f32;
  int id            = -1;  // unique on its tape

  [[nodiscard]] std::int64_t num_elements() const { return stepgraph::num_elements(shape); }
  [[nodiscard]] std::int64_t num_bytes() const { return num_elements() * static_cast<std::int64_t>(size_bytes(type)); }
  // As a matrix: the last dim is the columns, all other dims together are the rows.
  [[nodiscard]] std::int64_t cols() const { return shape.empty() ? 1 : shape.back(); }
  [[nodiscard]] std::int64_t rows() const { return cols() == 0 ? 0 : num_elements() / cols(); }
  // Converts to an access of the whole buffer.
  operator Access() const { return buffer; }      // NOLINT
  operator AccessList() const { return buffer; }  // NOLINT
};

// A parameter as one rank holds it, for ops to read. The tape manages its gradient.
struct Weight {
  Access value      = {};  // one contiguous range
  TensorShape shape = {};
  int id            = -1;                        // in the rank's WeightTable
  operator Access() const { return value; }      // NOLINT
  operator AccessList() const { return value; }  // NOLINT
};

// Where a kernel stores a sum: out[i] = base[i] + value, or just value without a base. `base` may equal `out`.
// Gradients of tensors have the tensor's type, those of weights the wide type.
template <class T, class Sum = T>
struct Into {
  using Element = T;
  Sum* out;
  const Sum* base;  // null: there is no previous value
  std::int64_t size;
  void put(std::int64_t i, Wide<Sum> value) const {
    out[i] = narrow<Sum>(base == nullptr ? value : wide(base[i]) + value);
  }
};

}  // namespace stepgraph
