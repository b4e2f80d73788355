#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>

#include "engine/base/types.hpp"
#include "engine/run/context.hpp"

// The updates of ops/updates/optimizer.hpp on memory that the caller guards, for weights that several ranks share: a
// node can only declare memory of its own rank. The bits are those of the nodes `adamw` and `sgd`.
namespace stepgraph {

// Numbers of an update, as AdamW and Sgd have them.
struct UpdateNumbers {
  bool adamw          = true;  // false: sgd
  double factor       = 1;
  double rate         = 0;
  double beta1        = 0.9;
  double beta2        = 0.95;
  double eps          = 1e-8;
  double momentum     = 0;
  double weight_decay = 0;
  std::int64_t step   = 1;  // of adamw, from 1
};

// Contiguous elements in host memory.
struct UpdateMemory {
  std::int64_t count           = 0;
  DType type                   = DType::f32;  // of the weight and its states: f32 or f64
  DType gradient_type          = DType::f32;
  std::optional<DType> rounded = {};       // of `value`: bf16 or f16
  const std::byte* before      = nullptr;  // the weight before the update; may be `weight`
  std::byte* weight            = nullptr;  // receives the weight after it
  std::byte* first             = nullptr;
  std::byte* second            = nullptr;  // of adamw
  std::byte* value             = nullptr;  // with `rounded`: receives the rounded weight
  const std::byte* gradient    = nullptr;
};

// The calling node must be declared parallel.
void apply_update(const Context& context, const UpdateMemory& memory, const UpdateNumbers& numbers);

// Copies `size` bytes, on idle threads too.
void copy_shared(const Context& context, std::byte* to, const std::byte* from, std::int64_t size);

}  // namespace stepgraph
