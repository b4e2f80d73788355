#pragma once
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/tape/tensor.hpp"

// Embedding tables on a device. Elements are float, double, bf16 or f16.
namespace stepgraph::cuda {

// The rows of a vocabulary that a table holds. Other indices are ignored, even if they are outside the vocabulary: a
// kernel cannot report errors.
struct TableRows {
  std::int64_t begin, size;
};

// y: [count, width] = the table's row of each token; zeros for tokens that are not in the table.
template <class T>
void embedding(const DeviceQueue& queue, const std::int32_t* tokens, std::int64_t count, const TableRows& rows,
               std::int64_t width, const T* table, T* y);

// For each row: into (+)= the sum of dy over the row's tokens, in order: 32 at a time, then those sums. Workspace: 12
// bytes per row of the table, about 8 per token, and less than 64 * width wide elements per 1024 tokens. If that does
// not fit, more than 32 tokens are added at a time.
template <class T>
void embedding_gradient(const DeviceQueue& queue, const std::int32_t* tokens, std::int64_t count, const TableRows& rows,
                        std::int64_t width, const T* dy, const Into<T, Wide<T>>& into);

// Positions [first, last) of each sequence use the table's rows from 0 on.
struct Positions {
  std::int64_t sequences, seq, first, last;
};

// y = x, plus the row of its position if the table has it; x: [sequences * seq, width].
template <class T>
void positional_embedding(const DeviceQueue& queue, const Positions& positions, std::int64_t width, const T* x,
                          const T* table, T* y);

// For each of the `rows` rows of the table: into (+)= the sum of dy over the sequences, in order.
template <class T>
void positional_embedding_gradient(const DeviceQueue& queue, const Positions& positions, std::int64_t rows,
                                   std::int64_t width, const T* dy, const Into<T, Wide<T>>& into);

}  // namespace stepgraph::cuda
