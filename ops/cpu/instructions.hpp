#pragma once
#include <array>
#include <cstdint>
#include <string_view>

// The instructions that a kernel uses, chosen when the program runs.
namespace stepgraph::cpu {

// Each one of a processor includes those before it that it has. `neon` is what every 64-bit Arm has, so it is that of
// the build. `sve` multiplies f32; bf16 as neon_bf16 does, if the processor has it too.
enum class Instructions : std::uint8_t { of_the_build, neon, neon_bf16, sve, avx2, avx512, avx512_bf16, amx };
inline constexpr std::array all_instructions{Instructions::of_the_build, Instructions::neon, Instructions::neon_bf16,
                                             Instructions::sve,          Instructions::avx2, Instructions::avx512,
                                             Instructions::avx512_bf16,  Instructions::amx};
// "build", "neon", "neon-bf16", "sve", "avx2", "avx512", "avx512-bf16", "amx".
[[nodiscard]] std::string_view to_string(Instructions instructions) noexcept;
// Whether this machine and this build have them. avx2 includes FMA and F16C, avx512 the extensions F, BW, DQ and VL.
// sve needs vectors of 128, 256 or 512 bits and a compiler that knows it.
// The first call for amx asks the system for permission to use tiles, once for all threads of the process; without it
// there is no amx.
[[nodiscard]] bool has(Instructions instructions) noexcept;
// The instructions that the environment variable STEPGRAPH_INSTRUCTIONS names. Without it: the last of all_instructions
// that this machine has, except avx512_bf16 and sve, which are used only if they are named. Throws for an unknown name
// and for instructions that this machine does not have.
[[nodiscard]] Instructions product_instructions();
// The same for kernels that have no use for bf16 products: build, avx2 or avx512.
[[nodiscard]] Instructions best_instructions();

}  // namespace stepgraph::cpu
