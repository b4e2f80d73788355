#pragma once
#include <string>

#include "engine/base/error.hpp"

namespace stepgraph {

// Host memory that could not be allocated, with or without pinning. Callers that know what moves bytes elsewhere add
// it.
class HostMemoryError : public Error {
 public:
  explicit HostMemoryError(const std::string& message) : Error(ErrorKind::backend, message) {}
};

}  // namespace stepgraph
