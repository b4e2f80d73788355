#include "engine/base/types.hpp"

namespace stepgraph {

std::size_t size_bytes(DType type) noexcept {
  constexpr std::array<std::size_t, 7> sizes{1, 4, 8, 2, 2, 4, 8};
  return sizes[static_cast<std::size_t>(type)];
}

std::string_view to_string(DType type) noexcept {
  constexpr std::array<std::string_view, 7> names{"u8", "i32", "i64", "f16", "bf16", "f32", "f64"};
  return names[static_cast<std::size_t>(type)];
}

std::string_view to_string(Space space) noexcept {
  constexpr std::array<std::string_view, 3> names{"device", "pinned", "disk"};
  return names[static_cast<std::size_t>(space)];
}

std::string_view to_string(Lifetime lifetime) noexcept { return lifetime == Lifetime::step ? "step" : "persistent"; }

std::string_view to_string(LaneKind kind) noexcept {
  constexpr std::array<std::string_view, num_lane_kinds> names{"compute", "tp",  "gather", "reduce", "pp_send",
                                                               "pp_recv", "h2d", "d2h",    "disk",   "host"};
  return names[static_cast<std::size_t>(kind)];
}

std::string_view to_string(NodeKind kind) noexcept {
  constexpr std::array<std::string_view, 4> names{"compute", "communicate", "copy", "host"};
  return names[static_cast<std::size_t>(kind)];
}

std::string_view to_string(Reduction reduction) noexcept {
  constexpr std::array<std::string_view, 5> names{"sum", "average", "min", "max", "product"};
  return names[static_cast<std::size_t>(reduction)];
}

}  // namespace stepgraph
