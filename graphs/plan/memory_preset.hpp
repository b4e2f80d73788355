#pragma once
#include <array>
#include <cstdint>
#include <ostream>
#include <string_view>

#include "graphs/plan/plan.hpp"

namespace stepgraph {

// Settings that save memory, as one choice.
//   basic       none: fastest
//   standard    zero1, and attention is recomputed
//   aggressive  full sharding, and layers are recomputed
//   extreme     the same, with gradients reduced after each microbatch, one slot for weights and one for gradients
enum class MemoryPreset : std::uint8_t { basic, standard, aggressive, extreme };
inline constexpr std::array all_memory_presets{MemoryPreset::basic, MemoryPreset::standard, MemoryPreset::aggressive,
                                               MemoryPreset::extreme};
[[nodiscard]] std::string_view to_string(MemoryPreset preset) noexcept;
inline std::ostream& operator<<(std::ostream& out, MemoryPreset preset) { return out << to_string(preset); }

// The plan with the settings of the preset. In a config (`memory.preset`), other keys have priority.
[[nodiscard]] Plan with_preset(Plan plan, MemoryPreset preset);

}  // namespace stepgraph
