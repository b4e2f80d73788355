#pragma once
#include <cstdint>

#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "engine/base/types.hpp"

// From a DType to the C++ type of its elements. Each function calls f(T{}) and returns its result, whose type must be
// the same for every T:
//   dispatch(type, [&]<class T>(T) { return largest<T>(bytes); });
namespace stepgraph {

// bf16 or f16; throws Error(graph) for another type.
template <class Function>
auto dispatch_half(DType type, const Function& f) {
  if (type == DType::f16) return f(f16{});
  if (type == DType::bf16) return f(bf16{});
  throw Error(ErrorKind::graph, str("dispatch: ", to_string(type), " elements (bf16 or f16)"));
}

// Any type.
template <class Function>
auto dispatch(DType type, const Function& f) {
  switch (type) {  // no default: the compiler names a type that is missing
    case DType::u8:
      return f(std::uint8_t{});
    case DType::i32:
      return f(std::int32_t{});
    case DType::i64:
      return f(std::int64_t{});
    case DType::f16:
      return f(f16{});
    case DType::bf16:
      return f(bf16{});
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
  }
  throw Error(ErrorKind::graph, "dispatch: no such type");
}

// f32, f64, bf16 or f16; throws Error(graph) for another type.
template <class Function>
auto dispatch_float(DType type, const Function& f) {
  if (type == DType::f32) return f(float{});
  if (type == DType::f64) return f(double{});
  return dispatch_half(type, f);
}

}  // namespace stepgraph
