#pragma once
#include <array>
#include <cstdint>
#include <string_view>

// The instructions of x86-64 that a kernel uses, chosen when the program runs. Other machines have the first only.
namespace stepgraph::cpu {

enum class Instructions : std::uint8_t { of_the_build, avx2, avx512 };
inline constexpr std::array all_instructions{Instructions::of_the_build, Instructions::avx2, Instructions::avx512};
[[nodiscard]] std::string_view to_string(Instructions instructions) noexcept;  // "build", "avx2", "avx512"
// Whether this machine and this build have them. avx2 includes FMA and F16C, avx512 the extensions F, BW, DQ and VL.
[[nodiscard]] bool has(Instructions instructions) noexcept;
// The last one that this machine has, or the one that the environment variable STEPGRAPH_INSTRUCTIONS names. Throws if
// this machine does not have that one.
[[nodiscard]] Instructions best_instructions();

}  // namespace stepgraph::cpu
