#include "graphs/plan/memory_preset.hpp"

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
      plan.recompute      = Recompute::selective;
      plan.shard.strategy = Shard::zero1;
      break;
    case MemoryPreset::aggressive:
      plan.recompute      = Recompute::full;
      plan.shard.strategy = Shard::full;
      break;
    case MemoryPreset::extreme:
      plan.recompute        = Recompute::full;
      plan.shard.strategy   = Shard::full;
      plan.shard.reduce     = ReduceWhen::each;
      plan.shard.slots      = 1;
      plan.shard.grad_slots = 1;
      break;
  }
  return plan;
}

}  // namespace stepgraph
