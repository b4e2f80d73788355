#pragma once
#include <cuda_runtime_api.h>

#include <source_location>
#include <string_view>

#include "engine/base/error.hpp"

namespace stepgraph {

inline void check(cudaError_t status, std::string_view doing,
                  std::source_location at = std::source_location::current()) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // the error is reported here: clears it
  throw Error(ErrorKind::backend,
              str("cuda: ", doing, ": ", cudaGetErrorString(status), " [", at.file_name(), ":", at.line(), "]"));
}

}  // namespace stepgraph
