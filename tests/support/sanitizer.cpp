#include "tests/support/sanitizer.hpp"

namespace stepgraph::testing {

Sanitizer sanitizer() noexcept {
#if defined(__SANITIZE_ADDRESS__)
  return Sanitizer::address;
#elif defined(__SANITIZE_THREAD__)
  return Sanitizer::thread;
#else
  return Sanitizer::none;
#endif
}

}  // namespace stepgraph::testing
