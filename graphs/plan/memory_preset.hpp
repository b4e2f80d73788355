#pragma once
#include <array>
#include <cstdint>
#include <ostream>
#include <string_view>

#include "graphs/plan/plan.hpp"

namespace stepgraph {

// How hard a plan tries to need less memory, in one word.
//   basic       nothing: fastest
//   standard    zero1, and attention is recomputed
//   aggressive  full sharding, and layers are recomputed
//   extreme     the same, with gradients reduced after each microbatch, one slot for weights and one for gradients
enum class MemoryPreset : std::uint8_t { basic, standard, aggressive, extreme };
inline constexpr std::array all_memory_presets{MemoryPreset::basic, MemoryPreset::standard, MemoryPreset::aggressive,
                                               MemoryPreset::extreme};
[[nodiscard]] std::string_view to_string(MemoryPreset preset) noexcept;
inline std::ostream& operator<<(std::ostream& out, MemoryPreset preset) { return out << to_string(preset); }

// The plan with what the preset chooses. In a config (`memory.preset`) it chooses what no key says.
[[nodiscard]] Plan with_preset(Plan plan, MemoryPreset preset);

}  // namespace stepgraph
