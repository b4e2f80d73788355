#pragma once
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/tape/tensor.hpp"

// Tables of rows on a device. Elements are float, double, bf16 or f16.
namespace stepgraph::cuda {

// Which rows of a vocabulary a table has. What is not among them is ignored, in or out of the vocabulary: a kernel
// cannot refuse.
struct TableRows {
  std::int64_t begin, size;
};

// y: [count, width] = the table's row of each token; zeros where it has none.
template <class T>
void embedding(const DeviceQueue& queue, const std::int32_t* tokens, std::int64_t count, const TableRows& rows,
               std::int64_t width, const T* table, T* y);

// Row by row: into (+)= the sum of dy over the row's tokens, which are added in their order: 32 at a time, then those
// sums. Workspace: 12 bytes for each row of the table, about 8 for each token, and less than 64 * width wide elements
// for each 1024 tokens; where that is too much, more than 32 are added at a time.
template <class T>
void embedding_gradient(const DeviceQueue& queue, const std::int32_t* tokens, std::int64_t count, const TableRows& rows,
                        std::int64_t width, const T* dy, const Into<T, Wide<T>>& into);

// Positions [first, last) of each sequence have the table's rows from 0 on.
struct Positions {
  std::int64_t sequences, seq, first, last;
};

// y = x, plus the row of its position where there is one; x: [sequences * seq, width].
template <class T>
void positional_embedding(const DeviceQueue& queue, const Positions& positions, std::int64_t width, const T* x,
                          const T* table, T* y);

// For each of `rows` rows of the table: into (+)= the sum of dy over sequences, in their order.
template <class T>
void positional_embedding_gradient(const DeviceQueue& queue, const Positions& positions, std::int64_t rows,
                                   std::int64_t width, const T* dy, const Into<T, Wide<T>>& into);

}  // namespace stepgraph::cuda
