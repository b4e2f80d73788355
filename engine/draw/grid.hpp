#pragma once
#include <vector>

#include "engine/draw/groups.hpp"

// The grid of a drawing: the column and the row of each box. Columns are steps in time, rows are lanes. Internal to
// engine/.
namespace stepgraph::drawing {

// The place of a box.
struct Cell {
  int column = 0, row = 0, frame = 0;
  int row_in_frame = 0;  // into Frame::rows
  double width = 0, height = 0;
};

struct Row {
  int cluster = 0, lane = -1;
  double height            = 0;
  std::vector<int> columns = {};                         // occupied, ascending
  [[nodiscard]] bool free(int after, int before) const;  // no box strictly between two columns
};

// A part of the picture with its own columns and clusters: a band of a wrapped picture, or one of several panels.
struct Frame {
  int first_column = 0, last_column = 0, first_cluster = 0, last_cluster = 0;
  std::vector<int> rows = {};  // rows with boxes in this frame
};

struct Grid {
  std::vector<Cell> cells;  // by box
  std::vector<Row> rows;    // by cluster, then lane; boxes without a lane come last in their cluster
  std::vector<double> column_widths;
  std::vector<Frame> frames;
  bool stacked = false;  // the frames are bands, one below the other; else panels, side by side
  [[nodiscard]] int num_columns() const noexcept { return static_cast<int>(column_widths.size()); }
};

// Each box is as far left as edges and lanes allow. The parts of one communication share a column.
[[nodiscard]] Grid make_grid(const Drawing& drawing);

}  // namespace stepgraph::drawing
