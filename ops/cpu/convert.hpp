#pragma once
#include <algorithm>
#include <cstdint>

#include "engine/run/context.hpp"
#include "ops/cpu/with_best.hpp"

namespace stepgraph::cpu {

// Elements [begin, end) of concatenated rows: to = from in another type.
template <class To, class From>
void convert_elements(const Rows<To>& to, const Rows<const From>& from, std::int64_t begin, std::int64_t end) {
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t in_to = at % to.length, in_from = at % from.length;
    const std::int64_t count      = std::min({to.length - in_to, from.length - in_from, end - at});
    To* __restrict out            = to.data + at / to.length * to.stride + in_to;
    const From* __restrict values = from.data + at / from.length * from.stride + in_from;
    with_best(values, count, out, [](const From* __restrict a, std::int64_t size, To* __restrict b) {
      for (std::int64_t i = 0; i < size; ++i) b[i] = static_cast<To>(a[i]);
    });
    at += count;
  }
}

}  // namespace stepgraph::cpu
