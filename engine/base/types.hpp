#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string_view>
#include <type_traits>

namespace stepgraph {

// A device and its lanes, as one process of a cluster has them. Ranks are numbered from 0.
enum class Rank : int {};
[[nodiscard]] constexpr int index(Rank rank) noexcept { return static_cast<int>(rank); }
inline std::ostream& operator<<(std::ostream& out, Rank rank) { return out << index(rank); }

// Element types of buffers.
enum class DType : std::uint8_t { u8, i32, i64, f16, bf16, f32, f64 };
[[nodiscard]] std::size_t size_bytes(DType type) noexcept;
[[nodiscard]] std::string_view to_string(DType type) noexcept;
[[nodiscard]] constexpr bool is_float(DType type) noexcept {  // a floating-point type of any size
  return type == DType::f16 || type == DType::bf16 || type == DType::f32 || type == DType::f64;
}
inline std::ostream& operator<<(std::ostream& out, DType type) { return out << to_string(type); }

class bf16;  // engine/base/half.hpp
class f16;

// The element type of a C++ type; none for bytes, which can hold any type, and for types of the caller.
template <class T>
[[nodiscard]] constexpr std::optional<DType> dtype_of() noexcept {
  if constexpr (std::is_same_v<T, float>) return DType::f32;
  if constexpr (std::is_same_v<T, double>) return DType::f64;
  if constexpr (std::is_same_v<T, bf16>) return DType::bf16;
  if constexpr (std::is_same_v<T, f16>) return DType::f16;
  if constexpr (std::is_same_v<T, std::int32_t>) return DType::i32;
  if constexpr (std::is_same_v<T, std::int64_t>) return DType::i64;
  return std::nullopt;
}

// Where a buffer's bytes live.
enum class Space : std::uint8_t { device, pinned, disk };
[[nodiscard]] std::string_view to_string(Space space) noexcept;

// A persistent buffer keeps its bytes from one run of the graph to the next; a step buffer does not.
enum class Lifetime : std::uint8_t { step, persistent };
[[nodiscard]] std::string_view to_string(Lifetime lifetime) noexcept;

// The ordered queues of a rank. On CUDA each is a stream. The world decides which of them block a thread.
enum class LaneKind : std::uint8_t { compute, tp, gather, reduce, pp_send, pp_recv, h2d, d2h, disk, host };
inline constexpr std::size_t num_lane_kinds = 10;
[[nodiscard]] std::string_view to_string(LaneKind kind) noexcept;
inline std::ostream& operator<<(std::ostream& out, LaneKind kind) { return out << to_string(kind); }

// One queue of one rank: its nodes run in the order in which they were added.
struct Lane {
  Rank rank{};
  LaneKind kind                                    = LaneKind::compute;
  friend bool operator==(const Lane&, const Lane&) = default;
};

// The kind of work of a node: it decides its colour in drawings and its rate in the simulator.
enum class NodeKind : std::uint8_t { compute, communicate, copy, host };
[[nodiscard]] std::string_view to_string(NodeKind kind) noexcept;
inline std::ostream& operator<<(std::ostream& out, NodeKind kind) { return out << to_string(kind); }

// How values of several ranks become one, element by element.
enum class Reduction : std::uint8_t { sum, average, min, max, product };
[[nodiscard]] std::string_view to_string(Reduction reduction) noexcept;

}  // namespace stepgraph
