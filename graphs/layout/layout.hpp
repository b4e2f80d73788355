#pragma once
#include <array>
#include <compare>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/graph/graph.hpp"

// The ranks of a world along the axes of parallelism.
//
// A new axis is an enumerator, a degree in LayoutSpec, a coordinate in Coord and a row of the table in layout.cpp.
namespace stepgraph {

// The axes of parallelism, in the order in which names list them.
enum class Axis : std::uint8_t { dp, tp, pp };
inline constexpr std::array all_axes{Axis::dp, Axis::tp, Axis::pp};
[[nodiscard]] std::string_view to_string(Axis axis) noexcept;
inline std::ostream& operator<<(std::ostream& out, Axis axis) { return out << to_string(axis); }

// A set of axes.
class Axes {
 public:
  constexpr Axes() = default;
  constexpr Axes(Axis axis) : bits_(1u << static_cast<unsigned>(axis)) {}  // NOLINT: implicit on purpose
  constexpr Axes(std::initializer_list<Axis> axes) {
    for (const Axis axis : axes) *this = *this | axis;
  }
  [[nodiscard]] static constexpr Axes all() {
    Axes axes;
    for (const Axis axis : all_axes) axes = axes | axis;
    return axes;
  }
  friend constexpr Axes operator|(Axes a, Axes b) noexcept {
    a.bits_ |= b.bits_;
    return a;
  }
  [[nodiscard]] constexpr bool contains(Axis axis) const noexcept { return (bits_ & Axes(axis).bits_) != 0; }
  [[nodiscard]] constexpr bool empty() const noexcept { return bits_ == 0; }
  friend constexpr auto operator<=>(const Axes&, const Axes&) = default;

 private:
  std::uint32_t bits_ = 0;
};
[[nodiscard]] std::string to_string(Axes axes);  // "dp_tp"

// How many ranks there are along each axis and in which order ranks are counted, as `layout` in a config has it.
struct LayoutSpec {
  int dp                 = 1;
  int tp                 = 1;
  int pp                 = 1;
  std::string order      = "pp-dp-tp";  // slowest to fastest; every axis once
  int devices_per_node   = 8;
  bool sequence_parallel = false;

  [[nodiscard]] int num_ranks() const noexcept { return dp * tp * pp; }  // of degrees that a Layout would take
  friend auto operator<=>(const LayoutSpec&, const LayoutSpec&) = default;
};
// Degrees in the layout's order, then what is not the default: "pp2-dp1-tp4", "dp2-tp1-pp1 devices_per_node=4
// sequence_parallel". Parses back to the same spec.
[[nodiscard]] std::string to_string(const LayoutSpec& spec);
[[nodiscard]] LayoutSpec parse_layout(std::string_view text);

// A rank's place along each axis.
struct Coord {
  int dp = 0;
  int tp = 0;
  int pp = 0;

  [[nodiscard]] int operator[](Axis axis) const noexcept;
  [[nodiscard]] int& operator[](Axis axis) noexcept;
  friend auto operator<=>(const Coord&, const Coord&) = default;
};
[[nodiscard]] std::string to_string(const Coord& coord);  // "dp0 tp1 pp0"
inline std::ostream& operator<<(std::ostream& out, const Coord& coord) { return out << to_string(coord); }

// The ranks that differ along some axes and agree on all others, ascending. Its name says both: "dp_group_tp0_pp1",
// "dp_tp_group_pp1"; the group along every axis is "world_group", that along none "self_group_dp0_tp0_pp1".
struct RankGroup {
  std::string name = {};
  Axes axes        = {};
  RankList ranks   = {};

  [[nodiscard]] int size() const noexcept { return static_cast<int>(ranks.size()); }
  [[nodiscard]] int position(Rank rank) const;  // refuses a rank that is no member
  friend auto operator<=>(const RankGroup&, const RankGroup&) = default;
};
[[nodiscard]] std::string to_string(const RankGroup& group);  // "dp_group_tp0_pp1: 4 6"
inline std::ostream& operator<<(std::ostream& out, const RankGroup& group) { return out << to_string(group); }

// The group as a communicator of a graph. A communicator is a queue, so work that may overlap needs one each: a purpose
// tells them apart ("dp_group_tp0_pp1 gather").
Group add_group(Graph& graph, const RankGroup& group, std::string_view purpose = {});

// A world of ranks along axes. Valid once made; plain data, so any thread may read it.
class Layout {
 public:
  // Refuses degrees below 1, an order that is not a permutation of the axes and, where one is given, another world.
  explicit Layout(LayoutSpec spec = {}, std::optional<int> world_size = {});

  [[nodiscard]] const LayoutSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] int num_ranks() const noexcept { return num_ranks_; }
  [[nodiscard]] int degree(Axis axis) const noexcept;
  [[nodiscard]] int degree(Axes axes) const noexcept;  // how many ranks a group along them has
  [[nodiscard]] const std::vector<Axis>& order() const noexcept { return order_; }
  [[nodiscard]] int stride(Axis axis) const noexcept;  // the distance of neighbours along it, in ranks

  // With order dp-tp-pp, for example, rank = (dp * tp_degree + tp) * pp_degree + pp.
  [[nodiscard]] Coord coord(Rank rank) const;
  [[nodiscard]] Rank rank(const Coord& coord) const;

  // All groups along a set of axes, by their first rank; and the one that a rank is in.
  [[nodiscard]] std::vector<RankGroup> groups(Axes axes) const;
  [[nodiscard]] RankGroup group_of(Rank rank, Axes axes) const;

  // The first and the last along an axis.
  [[nodiscard]] bool is_head(Rank rank, Axis axis) const;
  [[nodiscard]] bool is_tail(Rank rank, Axis axis) const;
  [[nodiscard]] std::vector<Rank> heads(Axis axis) const;
  [[nodiscard]] std::vector<Rank> tails(Axis axis) const;

  // The neighbour along an axis: none at the end, or, wrapping (interleaved schedules send from the last stage's rank
  // to the first), the other end.
  [[nodiscard]] std::optional<Rank> next(Rank rank, Axis axis = Axis::pp) const;
  [[nodiscard]] std::optional<Rank> previous(Rank rank, Axis axis = Axis::pp) const;
  [[nodiscard]] Rank next_wrapping(Rank rank, Axis axis = Axis::pp) const;
  [[nodiscard]] Rank previous_wrapping(Rank rank, Axis axis = Axis::pp) const;

  // Ranks fill nodes one after another; the last may have devices to spare.
  [[nodiscard]] int num_nodes() const noexcept;
  [[nodiscard]] int node(Rank rank) const;
  [[nodiscard]] int local_rank(Rank rank) const;

  friend bool operator==(const Layout& a, const Layout& b) { return a.spec_ == b.spec_; }
  friend auto operator<=>(const Layout& a, const Layout& b) { return a.spec_ <=> b.spec_; }

 private:
  void check(Rank rank) const;
  [[nodiscard]] RankGroup make_group(Coord fixed, Axes axes) const;
  [[nodiscard]] Rank neighbour(Rank rank, Axis axis, bool ahead) const;  // wrapping
  [[nodiscard]] std::vector<Rank> ranks_at(Axis axis, int place) const;

  LayoutSpec spec_;
  std::vector<Axis> order_;                        // slowest first
  std::array<int, all_axes.size()> strides_ = {};  // in ranks, by axis
  int num_ranks_                            = 1;
};
inline std::ostream& operator<<(std::ostream& out, const Layout& layout) { return out << to_string(layout.spec()); }
[[nodiscard]] std::string rank_table(const Layout& layout);  // a line per rank: coordinates, node, local rank

}  // namespace stepgraph
