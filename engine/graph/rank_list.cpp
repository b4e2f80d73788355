#include "engine/graph/rank_list.hpp"

#include <cstdint>
#include <limits>

#include "engine/base/error.hpp"

namespace stepgraph {

// Neighbours at equal distances are kept as a mesh.
RankList::RankList(std::vector<Rank> ranks) : size_(ranks.size()) {
  if (ranks.empty()) return;
  first_           = ranks[0];
  const int stride = ranks.size() > 1 ? index(ranks[1]) - index(ranks[0]) : 1;
  bool is_mesh     = stride > 0;
  for (std::size_t i = 1; i < ranks.size() && is_mesh; ++i) is_mesh = index(ranks[i]) - index(ranks[i - 1]) == stride;
  if (is_mesh) {
    axes_[2] = {static_cast<int>(ranks.size()), ranks.size() > 1 ? stride : 0};
  } else {
    listed_ = std::move(ranks);
  }
}

RankList RankList::mesh(Rank first, std::initializer_list<Axis> axes) {
  RankList made;
  made.first_        = first;
  made.size_         = 1;
  std::size_t at     = made.axes_.size();
  std::int64_t reach = 0;  // from the first rank to the last, of the axes so far
  for (const Axis* axis = std::end(axes); axis != std::begin(axes);) {
    --axis;
    if (axis->count < 1) throw Error(ErrorKind::config, str("ranks: an axis of ", axis->count, " (at least 1)"));
    if (axis->count == 1) continue;
    const std::int64_t end = std::int64_t{axis->stride} * (axis->count - 1) + reach;
    if (at == 0 || axis->stride <= reach || end > std::numeric_limits<int>::max() - index(first))
      throw Error(ErrorKind::config, str("ranks: ", axis->count, " ranks at distances of ", axis->stride,
                                         ", where faster axes reach ", reach, " ranks far (three axes that nest)"));
    made.axes_[--at] = *axis;
    made.size_ *= static_cast<std::size_t>(axis->count);
    reach = end;
  }
  return made;
}

std::optional<std::size_t> RankList::find(Rank rank) const noexcept {
  if (!listed_.empty()) {
    const auto at = std::find(listed_.begin(), listed_.end(), rank);
    if (at == listed_.end()) return std::nullopt;
    return static_cast<std::size_t>(at - listed_.begin());
  }
  if (size_ == 0 || rank < first_) return std::nullopt;
  int rest          = index(rank) - index(first_);
  std::size_t place = 0;
  for (const Axis& axis : axes_) {
    const int along = axis.stride > 0 ? std::min(rest / axis.stride, axis.count - 1) : 0;
    rest -= along * axis.stride;
    place = place * static_cast<std::size_t>(axis.count) + static_cast<std::size_t>(along);
  }
  if (rest != 0) return std::nullopt;
  return place;
}

}  // namespace stepgraph
