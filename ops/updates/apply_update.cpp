#include "ops/updates/apply_update.hpp"

#include <cstring>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cpu/optimizer.hpp"

namespace stepgraph {
namespace {

template <class T>
Rows<T> row(std::byte* at, std::int64_t count) {
  return {reinterpret_cast<T*>(at), count, 0, 1};
}
template <class T>
Rows<const T> row(const std::byte* at, std::int64_t count) {
  return {reinterpret_cast<const T*>(at), count, 0, 1};
}

template <class T, class Gradient, class Value>
void apply(const Context& context, const UpdateMemory& memory, const UpdateNumbers& numbers) {
  const std::int64_t count   = memory.count;
  const Rows<Value> value    = memory.rounded ? row<Value>(memory.value, count) : Rows<Value>{};
  const auto each_tile_after = [&](const auto& update) {
    cpu::for_tiles(context, count, 2 * cpu::elements_per_tile, [&](std::int64_t begin, std::int64_t end) {
      const auto offset = static_cast<std::size_t>(begin) * sizeof(T);
      if (memory.before != memory.weight)  // then the kernel finds the tile in a cache
        std::memcpy(memory.weight + offset, memory.before + offset, static_cast<std::size_t>(end - begin) * sizeof(T));
      update(begin, end);
    });
  };
  if (numbers.adamw) {
    if (numbers.step < 1) throw Error(ErrorKind::config, str("adamw: step ", numbers.step, " (steps count from 1)"));
    const cpu::AdamWRows<T, Gradient, Value> rows{.weight   = row<T>(memory.weight, count),
                                                  .first    = row<T>(memory.first, count),
                                                  .second   = row<T>(memory.second, count),
                                                  .gradient = row<Gradient>(memory.gradient, count),
                                                  .value    = value};
    const cpu::AdamWScalars scalars{.factor       = numbers.factor,
                                    .rate         = numbers.rate,
                                    .beta1        = numbers.beta1,
                                    .beta2        = numbers.beta2,
                                    .eps          = numbers.eps,
                                    .weight_decay = numbers.weight_decay,
                                    .step         = numbers.step};
    each_tile_after([&](std::int64_t begin, std::int64_t end) { cpu::adamw(rows, scalars, begin, end); });
    return;
  }
  const cpu::SgdRows<T, Gradient, Value> rows{.weight   = row<T>(memory.weight, count),
                                              .velocity = row<T>(memory.first, count),
                                              .gradient = row<Gradient>(memory.gradient, count),
                                              .value    = value};
  const cpu::SgdScalars scalars{.factor       = numbers.factor,
                                .rate         = numbers.rate,
                                .momentum     = numbers.momentum,
                                .weight_decay = numbers.weight_decay};
  each_tile_after([&](std::int64_t begin, std::int64_t end) { cpu::sgd(rows, scalars, begin, end); });
}

}  // namespace

void apply_update(const Context& context, const UpdateMemory& memory, const UpdateNumbers& numbers) {
  if (memory.type == DType::f64) return apply<double, double, bf16>(context, memory, numbers);
  dispatch_half(memory.rounded.value_or(DType::bf16), [&]<class Value>(Value) {
    if (memory.gradient_type == DType::f32) return apply<float, float, Value>(context, memory, numbers);
    dispatch_half(memory.gradient_type,
                  [&]<class Gradient>(Gradient) { apply<float, Gradient, Value>(context, memory, numbers); });
  });
}

void copy_shared(const Context& context, std::byte* to, const std::byte* from, std::int64_t size) {
  constexpr std::int64_t tile_bytes = 256 * 1024;
  cpu::for_tiles(context, size, tile_bytes, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
  });
}

}  // namespace stepgraph
