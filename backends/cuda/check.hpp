#pragma once
#include <cuda_runtime_api.h>

#include <concepts>
#include <source_location>
#include <string>
#include <string_view>

#include "engine/base/error.hpp"

namespace stepgraph {

// Throws Error(backend) unless the call has succeeded.
inline void check(cudaError_t status, std::string_view doing,
                  std::source_location at = std::source_location::current()) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // the error is reported here: clears it
  throw Error(ErrorKind::backend,
              str("cuda: ", doing, ": ", cudaGetErrorString(status), " [", at.file_name(), ":", at.line(), "]"));
}

// For a message that has to be put together: `doing()` returns it, and is called only for an error.
template <std::invocable Doing>
void check(cudaError_t status, const Doing& doing, std::source_location at = std::source_location::current()) {
  if (status != cudaSuccess) check(status, std::string_view(std::string(doing())), at);
}

}  // namespace stepgraph
