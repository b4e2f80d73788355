#pragma once
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/shared/attention_shape.hpp"
#include "ops/tape/number.hpp"
#include "ops/tape/tensor.hpp"

// Causal attention on a CUDA device, with the same tensors, numbers and mask as ops/cpu/attention/attention.hpp. Each
// element of a result is summed by one thread block in one order, so its bits depend on the shape alone.
namespace stepgraph::cuda {

// Dropout of the probabilities.
struct AttentionDropout {
  const std::int64_t* step    = nullptr;  // step number, on the device; null: no dropout
  std::uint64_t key           = 0;        // of the site
  std::uint32_t dropped       = 0;        // threshold: out of 2^32
  double scale                = 1;        // of the kept probabilities
  std::int64_t first_sequence = 0;
  std::int64_t first_head     = 0;
  std::int64_t all_heads      = 1;
};

template <class T>
struct AttentionForward {
  AttentionShape shape;
  std::int64_t sequences;
  const T* qkv;
  T* out;
  Wide<T>* log_sums;
  AttentionDropout dropout = {};
};
// Heads of up to 256 elements; throws Error(config) for larger ones.
template <class T>
void attention_forward(const DeviceQueue& queue, const AttentionForward<T>& attention);

template <class T>
struct AttentionBackward {
  AttentionShape shape;
  std::int64_t sequences;
  const T* qkv;
  const T* out;
  const Wide<T>* log_sums;
  const T* d_out;
  Wide<T>* products;
  AttentionDropout dropout = {};
};
template <class T>
void attention_backward(const DeviceQueue& queue, const AttentionBackward<T>& attention, const Into<T>& d_qkv);

}  // namespace stepgraph::cuda
