#pragma once
#include <string_view>
#include <vector>

#include "engine/draw/groups.hpp"

// Where a drawing's boxes and lines are: internal to engine/. Lengths are points (1/72 inch), y grows downwards.
namespace stepgraph::drawing {

inline constexpr double title_font = 11, fact_font = 8.5, lane_font = 9.5, rank_font = 12;

struct Point {
  double x = 0, y = 0;
};
struct Rect {
  double left = 0, top = 0, right = 0, bottom = 0;
  [[nodiscard]] Point center() const noexcept { return {(left + right) / 2, (top + bottom) / 2}; }
  [[nodiscard]] double width() const noexcept { return right - left; }
  [[nodiscard]] double height() const noexcept { return bottom - top; }
};

// A cluster, or the piece of it in one band of a wrapped picture.
struct LaneArea {
  int lane = -1;  // -1: nodes without a lane, which get no frame
  Rect rect;
  Point label;  // the middle of its left side
  std::vector<std::uint32_t> boxes;
};
struct ClusterArea {
  int cluster = 0, band = 0;
  Rect rect;
  std::vector<LaneArea> lanes;
};

struct Placement {
  double width = 0, height = 0;
  std::vector<Rect> boxes;
  std::vector<ClusterArea> clusters;
  std::vector<std::vector<Point>> lines;  // one per link: corners, from its first box to its second
};

// Columns are steps in time and rows are lanes; lines run in the gaps between them, never through a box, except those
// that join parts of one communication: they pass behind. A picture too wide wraps into bands, one too tall puts
// clusters side by side.
[[nodiscard]] Placement place(const Drawing& drawing);

// How wide a text is at most, whichever sans serif font shows it.
[[nodiscard]] double text_width(std::string_view text, double font_size);

}  // namespace stepgraph::drawing
