#pragma once

namespace stepgraph::testing {

// The sanitizer of this build. A function of the support library, which is instrumented in every sanitized build: most
// tests themselves are compiled as in a release build (tests/CMakeLists.txt), so they cannot ask the compiler.
enum class Sanitizer { none, address, thread };
[[nodiscard]] Sanitizer sanitizer() noexcept;
[[nodiscard]] inline bool is_sanitized() noexcept { return sanitizer() != Sanitizer::none; }

}  // namespace stepgraph::testing
