#pragma once
#include <cstdint>
#include <ostream>
#include <string_view>

// When gradients are applied to weights, as data.
namespace stepgraph {

enum class UpdateWhen : std::uint8_t {
  synchronous,   // at the end of their own step
  stale,         // at the end of the step that is `max_staleness` steps later: reproducible to the bit
  asynchronous,  // when they arrive: data-parallel ranks do not wait for each other; not reproducible
};
[[nodiscard]] std::string_view to_string(UpdateWhen mode) noexcept;
inline std::ostream& operator<<(std::ostream& out, UpdateWhen mode) { return out << to_string(mode); }

inline constexpr int most_staleness = 64;

struct UpdatePlan {
  UpdateWhen mode = UpdateWhen::synchronous;
  // stale: how many steps later gradients are applied. asynchronous: how many steps a data-parallel rank may be ahead
  // of the slowest one.
  int max_staleness = 0;
  // Gradients of earlier steps are kept. With a delay of 0 a stale step is a synchronous one.
  [[nodiscard]] bool delays() const noexcept { return mode == UpdateWhen::stale && max_staleness > 0; }
  friend bool operator==(const UpdatePlan&, const UpdatePlan&) = default;
};

// Throws Error(config) for a staleness that is out of range, or that the mode does not have.
void check_update(const UpdatePlan& update);

}  // namespace stepgraph
