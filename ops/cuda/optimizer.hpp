#pragma once
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/cpu/optimizer.hpp"

// Updates of weights on a device, by the operations of ops/cpu/optimizer.cpp in their order. What changes from step to
// step is on the device too, and read there.
namespace stepgraph::cuda {

// Where `skip` is there and not 0, nothing changes but the value, which is written anew.
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
