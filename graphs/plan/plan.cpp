#include "graphs/plan/plan.hpp"

#include <array>

namespace stepgraph {

std::string_view to_string(Recompute kind) noexcept {
  constexpr std::array<std::string_view, 3> names{"none", "selective", "full"};
  return names[static_cast<std::size_t>(kind)];
}

std::string_view to_string(OptimizerKind kind) noexcept { return kind == OptimizerKind::adamw ? "adamw" : "sgd"; }

}  // namespace stepgraph
