#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "backends/nccl/library.hpp"

namespace stepgraph::nccl {

// What NCCL may be told about how it reduces. The choice holds for the whole process, because NCCL reads it once.
enum class Algorithm : std::uint8_t { any, ring, tree };

// None: NCCL has no such algorithm, or cannot be told. `direct` is NCCL's own choice.
[[nodiscard]] std::optional<Algorithm> algorithm_of(std::string_view name) noexcept;

// Sets the variables that NCCL reads once, at its first call. Not thread-safe: before the process has threads that read
// its environment. Throws Error(config) if the user, or an earlier world of this process, has chosen another algorithm.
void set_variables(Algorithm algorithm);

// NCCL on a device. Communicators are non-blocking: a call returns at once, and is then asked whether it is done. So a
// peer that never comes is a time-out, and an abort ends every wait. Defined in builds with NCCL. Throws Error(backend)
// if the library that is loaded is too old.
[[nodiscard]] std::unique_ptr<Library> make_nccl_library(int device);

// The version of the library that is loaded: "2.28.3".
[[nodiscard]] std::string nccl_version();

}  // namespace stepgraph::nccl
