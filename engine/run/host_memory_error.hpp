#pragma once
#include <string>

#include "engine/base/error.hpp"

namespace stepgraph {

// Host memory could not be allocated, pinned or not. A caller that knows a setting that needs less of it adds that to
// the message.
class HostMemoryError : public Error {
 public:
  explicit HostMemoryError(const std::string& message) : Error(ErrorKind::backend, message) {}
};

}  // namespace stepgraph
