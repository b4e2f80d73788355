#pragma once
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/cpu/optimizer.hpp"

// Weight updates on a device: the operations of ops/cpu/optimizer.cpp in the same order. Scalars that change from step
// to step are in device memory.
namespace stepgraph::cuda {

// If `skip` is set and not 0, only the value is written, with its old bits.
struct AdamWNumbers {
  const double* factor     = nullptr;
  const double* rate       = nullptr;
  const std::int64_t* step = nullptr;  // from 1
  const std::int64_t* skip = nullptr;  // null: never
  double beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
};
template <class T, class Gradient, class Value>
void adamw(const DeviceQueue& queue, const cpu::AdamWRows<T, Gradient, Value>& rows, const AdamWNumbers& numbers,
           std::int64_t count);

struct SgdNumbers {
  const double* factor     = nullptr;
  const double* rate       = nullptr;
  const std::int64_t* skip = nullptr;
  double momentum = 0, weight_decay = 0;
};
template <class T, class Gradient, class Value>
void sgd(const DeviceQueue& queue, const cpu::SgdRows<T, Gradient, Value>& rows, const SgdNumbers& numbers,
         std::int64_t count);

}  // namespace stepgraph::cuda
