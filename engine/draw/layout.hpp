#pragma once
#include <string_view>
#include <vector>

#include "engine/draw/groups.hpp"

// The positions of a drawing's boxes and lines. Internal to engine/. Lengths are in points (1/72 inch); y grows
// downwards.
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

// A lane of a cluster, or of its part in one band of a wrapped picture.
struct LaneArea {
  int lane = -1;  // -1: nodes without a lane, drawn without a frame
  Rect rect;
  Point label;  // middle of its left side
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
  std::vector<std::vector<Point>> lines;  // one per link: the corners, from the first box to the second
};

// Columns are steps in time, rows are lanes. Lines run in the gaps between them, never through a box. Only lines that
// join the parts of one communication pass behind boxes. A wide picture wraps into bands; a tall one puts clusters side
// by side.
[[nodiscard]] Placement place(const Drawing& drawing);

// An upper bound of the width of a text in any sans serif font.
[[nodiscard]] double text_width(std::string_view text, double font_size);

}  // namespace stepgraph::drawing
