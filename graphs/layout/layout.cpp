#include "graphs/layout/layout.hpp"

#include <algorithm>
#include <limits>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

struct AxisRow {
  Axis axis;
  std::string_view name;
  int LayoutSpec::*degree;
  int Coord::*place;
};
constexpr std::array axis_table{
    AxisRow{Axis::dp, "dp", &LayoutSpec::dp, &Coord::dp},
    AxisRow{Axis::tp, "tp", &LayoutSpec::tp, &Coord::tp},
    AxisRow{Axis::pp, "pp", &LayoutSpec::pp, &Coord::pp},
};
static_assert(axis_table.size() == all_axes.size());

std::size_t at(Axis axis) { return static_cast<std::size_t>(axis); }
const AxisRow& row(Axis axis) { return axis_table[at(axis)]; }

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::config, "layout: " + why); }

std::optional<Axis> axis_named(std::string_view name) {
  for (const AxisRow& axis : axis_table) {
    if (axis.name == name) return axis.axis;
  }
  return std::nullopt;
}

std::string axis_names(std::string_view separator) {
  return join_text(axis_table, separator, [](const AxisRow& axis) { return std::string(axis.name); });
}

std::vector<Axis> parse_order(std::string_view text) {
  const auto refuse_order = [&](const std::string& why) {
    refuse(str("order '", text, "' ", why, " (", axis_names(", "), " once each, slowest to fastest)"));
  };
  std::vector<Axis> order;
  for (const std::string_view name : split_text(text, '-')) {
    const auto axis = axis_named(name);
    if (!axis) refuse_order(str("has '", name, "', which is not an axis"));
    if (std::find(order.begin(), order.end(), *axis) != order.end()) refuse_order(str("has ", name, " twice"));
    order.push_back(*axis);
  }
  for (const Axis axis : all_axes) {
    if (std::find(order.begin(), order.end(), axis) == order.end()) refuse_order(str("lacks ", to_string(axis)));
  }
  return order;
}

// "dp(2) * tp(2) * pp(1)".
std::string product_text(const LayoutSpec& spec) {
  return join_text(axis_table, " * ", [&](const AxisRow& axis) { return str(axis.name, "(", spec.*axis.degree, ")"); });
}

}  // namespace

std::string_view to_string(Axis axis) noexcept { return row(axis).name; }

std::string to_string(Axes axes) {
  std::string out;
  for (const Axis axis : all_axes) {
    if (axes.contains(axis)) out += str(out.empty() ? "" : "_", to_string(axis));
  }
  return out;
}

int Coord::operator[](Axis axis) const noexcept { return this->*row(axis).place; }
int& Coord::operator[](Axis axis) noexcept { return this->*row(axis).place; }

std::string to_string(const Coord& coord) {
  return join_text(all_axes, " ", [&](Axis axis) { return str(to_string(axis), coord[axis]); });
}

int RankGroup::position(Rank rank) const {
  const auto found = ranks.find(rank);
  if (!found) refuse(str("rank ", rank, " is not in ", to_string(*this)));
  return static_cast<int>(*found);
}

std::string to_string(const RankGroup& group) {
  return str(group.name, ": ", join_text(group.ranks, " ", [](Rank rank) { return str(index(rank)); }));
}

Group add_group(Graph& graph, const RankGroup& group, std::string_view purpose) {
  return graph.group({.name = purpose.empty() ? group.name : str(group.name, " ", purpose), .ranks = group.ranks});
}

std::string to_string(const LayoutSpec& spec) {
  std::string out =
      join_text(parse_order(spec.order), "-", [&](Axis axis) { return str(to_string(axis), spec.*row(axis).degree); });
  const LayoutSpec defaults;
  if (spec.devices_per_node != defaults.devices_per_node) out += str(" devices_per_node=", spec.devices_per_node);
  if (spec.sequence_parallel) out += " sequence_parallel";
  return out;
}

LayoutSpec parse_layout(std::string_view text) {
  const auto refuse_text = [&](std::string_view word, const std::string& why) {
    refuse(str("'", text, "': '", word, "' ", why));
  };
  LayoutSpec spec;
  const std::vector<std::string_view> words = split_text(text, ' ');
  std::vector<Axis> order;
  for (const std::string_view word : split_text(words.front(), '-')) {
    const std::size_t digits = std::min(word.find_first_of("0123456789"), word.size());
    const auto axis          = axis_named(word.substr(0, digits));
    const auto degree        = to_number<int>(word.substr(digits));
    if (!axis || !degree) refuse_text(word, "is not an axis and its degree (as in pp2-dp2-tp4)");
    order.push_back(*axis);
    spec.*row(*axis).degree = *degree;
  }
  spec.order = join_text(order, "-", [](Axis axis) { return std::string(to_string(axis)); });
  bool given = false;
  for (std::size_t i = 1; i < words.size(); ++i) {
    constexpr std::string_view devices = "devices_per_node=";
    if (words[i] == "sequence_parallel" && !spec.sequence_parallel) {
      spec.sequence_parallel = true;
    } else if (words[i].starts_with(devices) && !given) {
      const auto number = to_number<int>(words[i].substr(devices.size()));
      if (!number) refuse_text(words[i], "has no number (as in devices_per_node=8)");
      spec.devices_per_node = *number;
      given                 = true;
    } else {
      refuse_text(words[i], "is unknown or repeated (devices_per_node=N or sequence_parallel, once each)");
    }
  }
  return Layout(spec).spec();  // checks the rest
}

Layout::Layout(LayoutSpec spec, std::optional<int> world_size) : spec_(std::move(spec)) {
  for (const AxisRow& axis : axis_table) {
    if (spec_.*axis.degree < 1) refuse(str(axis.name, " is ", spec_.*axis.degree, " (at least 1)"));
  }
  if (spec_.devices_per_node < 1) refuse(str("devices_per_node is ", spec_.devices_per_node, " (at least 1)"));
  order_ = parse_order(spec_.order);
  for (auto axis = order_.rbegin(); axis != order_.rend(); ++axis) {
    strides_[at(*axis)] = num_ranks_;
    if (degree(*axis) > std::numeric_limits<int>::max() / num_ranks_)
      refuse(str(product_text(spec_), " is more than ", std::numeric_limits<int>::max(), " ranks"));
    num_ranks_ *= degree(*axis);
  }
  if (world_size && *world_size != num_ranks_) {
    refuse(str(product_text(spec_), " = ", num_ranks_, " ranks, but the world has ", *world_size,
               " (degrees whose product is ", *world_size, ")"));
  }
}

int Layout::degree(Axis axis) const noexcept { return spec_.*row(axis).degree; }

int Layout::degree(Axes axes) const noexcept {
  int product = 1;
  for (const Axis axis : all_axes) product *= axes.contains(axis) ? degree(axis) : 1;
  return product;
}

int Layout::stride(Axis axis) const noexcept { return strides_[at(axis)]; }

void Layout::check(Rank rank) const {
  if (index(rank) < 0 || index(rank) >= num_ranks_)
    refuse(str("rank ", rank, " is not in the world (0 to ", num_ranks_ - 1, ")"));
}

Coord Layout::coord(Rank rank) const {
  check(rank);
  Coord coord;
  for (const Axis axis : all_axes) coord[axis] = index(rank) / strides_[at(axis)] % degree(axis);
  return coord;
}

Rank Layout::rank(const Coord& coord) const {
  int rank = 0;
  for (const Axis axis : all_axes) {
    if (coord[axis] < 0 || coord[axis] >= degree(axis))
      refuse(str("no rank has coordinate ", coord, " (", to_string(axis), " 0 to ", degree(axis) - 1, ")"));
    rank += coord[axis] * strides_[at(axis)];
  }
  return Rank{rank};
}

// Members are counted in the layout's order, so ranks come out ascending.
RankGroup Layout::make_group(Coord place, Axes axes) const {
  RankGroup group{.name = str(axes.empty() ? "self" : to_string(axes), "_group"), .axes = axes};
  if (axes == Axes::all()) group.name = "world_group";
  for (const Axis axis : all_axes) {
    if (axes.contains(axis)) {
      place[axis] = 0;
    } else {
      group.name += str("_", to_string(axis), place[axis]);
    }
  }
  std::array<RankList::Axis, 3> mesh{};
  for (std::size_t i = 0; i < order_.size(); ++i) {
    if (axes.contains(order_[i])) mesh[i] = {degree(order_[i]), strides_[at(order_[i])]};
  }
  group.ranks = RankList::mesh(rank(place), {mesh[0], mesh[1], mesh[2]});
  return group;
}

std::vector<RankGroup> Layout::groups(Axes axes) const {
  std::vector<RankGroup> all;
  all.reserve(static_cast<std::size_t>(num_ranks_ / degree(axes)));
  for (int r = 0; r < num_ranks_; ++r) {
    const Coord place = coord(Rank{r});
    const bool first  = std::all_of(all_axes.begin(), all_axes.end(),
                                    [&](Axis axis) { return !axes.contains(axis) || place[axis] == 0; });
    if (first) all.push_back(make_group(place, axes));
  }
  return all;
}

RankGroup Layout::group_of(Rank rank, Axes axes) const { return make_group(coord(rank), axes); }

bool Layout::is_head(Rank rank, Axis axis) const { return coord(rank)[axis] == 0; }
bool Layout::is_tail(Rank rank, Axis axis) const { return coord(rank)[axis] == degree(axis) - 1; }

std::vector<Rank> Layout::ranks_at(Axis axis, int place) const {
  std::vector<Rank> ranks;
  for (int r = 0; r < num_ranks_; ++r) {
    if (coord(Rank{r})[axis] == place) ranks.push_back(Rank{r});
  }
  return ranks;
}
std::vector<Rank> Layout::heads(Axis axis) const { return ranks_at(axis, 0); }
std::vector<Rank> Layout::tails(Axis axis) const { return ranks_at(axis, degree(axis) - 1); }

Rank Layout::neighbour(Rank from, Axis axis, bool ahead) const {
  Coord place    = coord(from);
  const int last = degree(axis) - 1;
  if (ahead) {
    place[axis] = place[axis] == last ? 0 : place[axis] + 1;
  } else {
    place[axis] = place[axis] == 0 ? last : place[axis] - 1;
  }
  return rank(place);
}
std::optional<Rank> Layout::next(Rank rank, Axis axis) const {
  return is_tail(rank, axis) ? std::nullopt : std::optional(neighbour(rank, axis, true));
}
std::optional<Rank> Layout::previous(Rank rank, Axis axis) const {
  return is_head(rank, axis) ? std::nullopt : std::optional(neighbour(rank, axis, false));
}
Rank Layout::next_wrapping(Rank rank, Axis axis) const { return neighbour(rank, axis, true); }
Rank Layout::previous_wrapping(Rank rank, Axis axis) const { return neighbour(rank, axis, false); }

int Layout::num_nodes() const noexcept { return (num_ranks_ - 1) / spec_.devices_per_node + 1; }

int Layout::node(Rank rank) const {
  check(rank);
  return index(rank) / spec_.devices_per_node;
}

int Layout::local_rank(Rank rank) const {
  check(rank);
  return index(rank) % spec_.devices_per_node;
}

std::string rank_table(const Layout& layout) {
  std::string out;
  for (int r = 0; r < layout.num_ranks(); ++r) {
    const Rank rank{r};
    out += str("rank ", r, "  ", layout.coord(rank), "  node ", layout.node(rank), " device ", layout.local_rank(rank),
               "\n");
  }
  return out;
}

}  // namespace stepgraph
