#include "graphs/memory_preset.hpp"

namespace stepgraph {

std::string_view to_string(MemoryPreset preset) noexcept {
  constexpr std::array<std::string_view, all_memory_presets.size()> names{"basic", "standard", "aggressive", "extreme"};
  return names[static_cast<std::size_t>(preset)];
}

Plan with_preset(Plan plan, MemoryPreset preset) {
  switch (preset) {
    case MemoryPreset::basic:
      break;
    case MemoryPreset::standard:
      plan.recompute = Recompute::selective;
      break;
    case MemoryPreset::aggressive:
    case MemoryPreset::extreme:
      plan.recompute = Recompute::full;
      break;
  }
  return plan;
}

}  // namespace stepgraph
