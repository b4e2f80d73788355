#pragma once
#include <cassert>
#include <cstdint>

#include "engine/base/half.hpp"
#include "engine/base/types.hpp"

// From a DType to the C++ type of its elements. Each function calls f(T{}) and returns its result, whose type must be
// the same for every T:
//   dispatch(type, [&]<class T>(T) { return largest<T>(bytes); });
namespace stepgraph {

// bf16 or f16.
template <class Function>
auto dispatch_half(DType type, const Function& f) {
  assert(type == DType::bf16 || type == DType::f16);
  return type == DType::f16 ? f(f16{}) : f(bf16{});
}

// f32, f64, bf16 or f16.
template <class Function>
auto dispatch_float(DType type, const Function& f) {
  if (type == DType::f32) return f(float{});
  if (type == DType::f64) return f(double{});
  return dispatch_half(type, f);
}

// Any type.
template <class Function>
auto dispatch(DType type, const Function& f) {
  switch (type) {
    case DType::u8:
      return f(std::uint8_t{});
    case DType::i32:
      return f(std::int32_t{});
    case DType::i64:
      return f(std::int64_t{});
    default:
      return dispatch_float(type, f);
  }
}

}  // namespace stepgraph
