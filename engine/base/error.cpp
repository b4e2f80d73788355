#include "engine/base/error.hpp"

namespace stepgraph {

std::string_view to_string(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::config:
      return "config";
    case ErrorKind::graph:
      return "graph";
    case ErrorKind::run:
      return "run";
    case ErrorKind::backend:
      return "backend";
  }
  return "unknown";
}

}  // namespace stepgraph
