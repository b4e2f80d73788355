#pragma once
#include <functional>
#include <string>

#include "engine/base/error.hpp"

namespace stepgraph::testing {

// The message of the Error that a call throws; empty: it throws none.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace stepgraph::testing
