#include "engine/draw/layout.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace stepgraph::drawing {
namespace {

constexpr double track_step  = 4;   // between parallel lines
constexpr double max_channel = 64;  // lines in a busier gap are squeezed
constexpr double port_step   = 5;   // between the arrow heads that enter a box
constexpr double min_row     = 32;
constexpr double lane_pad    = 5;    // from a box to the frame of its lane
constexpr double best_aspect = 1.7;  // width to height, similar to a page

// A gap between rows or columns. Overlapping lines get different tracks; lines of one net may share a track.
struct Channel {
  struct Use {
    int low, high;
    std::uint64_t net;
    int track = 0;
  };
  std::vector<Use> uses = {};
  int num_tracks        = 0;
  double begin = 0, step = track_step;

  std::size_t add(int a, int b, std::uint64_t net) {
    uses.push_back({std::min(a, b), std::max(a, b), net});
    return uses.size() - 1;
  }
  void assign() {
    std::vector<std::size_t> order(uses.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return std::tuple(uses[a].low, uses[a].net, uses[a].high, a) <
             std::tuple(uses[b].low, uses[b].net, uses[b].high, b);
    });
    std::vector<std::pair<int, std::uint64_t>> tracks;  // end and net of each track
    for (const std::size_t i : order) {
      Use& use = uses[i];
      auto at  = std::find_if(tracks.begin(), tracks.end(),
                              [&](const auto& track) { return track.first < use.low || track.second == use.net; });
      if (at == tracks.end()) at = tracks.emplace(tracks.end(), -1, use.net);
      *at       = {std::max(at->first, use.high), use.net};
      use.track = static_cast<int>(at - tracks.begin());
    }
    num_tracks = static_cast<int>(tracks.size());
    if (num_tracks > 0) step = std::min(track_step, max_channel / num_tracks);
  }
  [[nodiscard]] double size() const { return num_tracks * step; }
  [[nodiscard]] double at(std::size_t use) const { return begin + (uses[use].track + 0.5) * step; }
};

struct Row {
  int cluster = 0, lane = -1;
  double height            = 0;
  std::vector<int> columns = {};                          // occupied, ascending
  [[nodiscard]] bool free(int after, int before) const {  // no box strictly between two columns
    const auto at = std::upper_bound(columns.begin(), columns.end(), after);
    return at == columns.end() || *at >= before;
  }
};

// A part of the picture with its own columns and clusters: a band of a wrapped picture, or one of several panels.
struct Frame {
  int first_column = 0, last_column = 0, first_cluster = 0, last_cluster = 0;
  std::vector<int> rows      = {};  // rows with boxes in this frame
  std::vector<Channel> gaps  = {};  // left of each column, and right of the last
  std::vector<Channel> halls = {};  // 2i: above row i if it is the first of its cluster; 2i + 1: below row i
  Channel gutter             = {};  // above the frame, for lines from other frames
};

// A line runs along the source's row, then vertically in a gap, along a hall, and so on, and finally along the target's
// row.
struct Route {
  struct Step {
    Channel* channel;
    std::size_t use;
  };
  std::vector<Step> steps = {};  // vertical, horizontal, ..., vertical; empty: a straight line
  bool from_above         = false;
};

class Placer {
 public:
  explicit Placer(const Drawing& drawing) : drawing_(drawing), boxes_(drawing.boxes) {}

  Placement place() {
    measure();
    assign_columns();
    assign_rows();
    make_frames();
    route();
    settle();
    draw_lines();
    return std::move(out_);
  }

 private:
  struct Cell {
    int column = 0, row = 0, frame = 0, row_in_frame = 0;
    double width = 0, height = 0;
  };

  void measure() {
    cells_.resize(boxes_.size());
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
      double width = 44;
      for (const std::string& line : boxes_[i].title) width = std::max(width, text_width(line, title_font));
      for (const std::string& line : boxes_[i].facts) width = std::max(width, text_width(line, fact_font));
      cells_[i].width  = width + 12;
      cells_[i].height = 9 + static_cast<double>(boxes_[i].title.size()) * title_font * 1.22 +
                         static_cast<double>(boxes_[i].facts.size()) * fact_font * 1.22;
    }
  }

  // --- columns: as early as edges and lanes allow; parts of one communication under each other --------------------
  void assign_columns() {
    collect_constraints();
    while (!try_columns()) {
      // Boxes of many nodes may wait for each other in a cycle. Pairs that still differ need not share a column.
      std::erase_if(together_, [&](const auto& pair) { return differ(pair); });
    }
    delay_lone_receives();
    measure_piles();
    spread_piles();
  }

  // A box that must be left of another, by `distance` columns.
  struct Before {
    std::uint32_t box;
    int distance;
  };

  // Edges and lanes order boxes from left to right. The parts of one communication share a column.
  void collect_constraints() {
    before_.resize(boxes_.size());
    for (const Link& link : drawing_.links) {
      if (link.kind == LinkKind::match) {
        if (boxes_[link.from].only_parts() && boxes_[link.to].only_parts()) together_.emplace_back(link.from, link.to);
      } else if (link.kind != LinkKind::loop && link.from < link.to) {
        before_[link.to].push_back({link.from, link.both ? 0 : 1});
      }
    }
    std::map<std::pair<int, int>, std::uint32_t> last;  // (cluster, lane) -> its latest box
    for (std::uint32_t i = 0; i < boxes_.size(); ++i) {
      if (boxes_[i].lane < 0) continue;
      const auto [at, is_first] = last.try_emplace({boxes_[i].cluster, boxes_[i].lane}, i);
      if (!is_first) before_[i].push_back({std::exchange(at->second, i), 1});
    }
  }

  [[nodiscard]] bool differ(const std::pair<std::uint32_t, std::uint32_t>& pair) const {
    return cells_[pair.first].column != cells_[pair.second].column;
  }

  // Moves box i right of the boxes before it.
  void push(std::uint32_t i) {
    for (const Before& b : before_[i]) cells_[i].column = std::max(cells_[i].column, cells_[b.box].column + b.distance);
  }
  // Moves box i and its counterparts to the rightmost of their columns.
  void align(std::uint32_t i) {
    for (const std::uint32_t other : beside_[i])
      cells_[i].column = cells_[other].column = std::max(cells_[i].column, cells_[other].column);
  }

  // Puts every box as far left as the constraints allow. Returns false if some pairs do not come to share a column.
  // Boxes are processed by level, so that one pass is enough if boxes are single nodes.
  bool try_columns() {
    constexpr int max_passes = 50;
    for (std::size_t i = 0; i < boxes_.size(); ++i)
      cells_[i].column = drawing_.keep_levels ? static_cast<int>(boxes_[i].level) : 0;
    beside_.assign(boxes_.size(), {});
    for (const auto& [a, b] : together_) beside_[a].push_back(b), beside_[b].push_back(a);
    for (int pass = 0; pass < max_passes; ++pass) {
      for (std::uint32_t begin = 0, end = 0; begin < boxes_.size(); begin = end) {
        for (; end < boxes_.size() && boxes_[end].level == boxes_[begin].level; ++end) push(end);
        for (std::uint32_t i = begin; i < end; ++i) align(i);
        for (std::uint32_t i = end; i-- > begin;) align(i);
      }
      for (std::uint32_t i = 0; i < boxes_.size(); ++i) push(i);
      if (std::none_of(together_.begin(), together_.end(), [&](const auto& pair) { return differ(pair); })) return true;
    }
    return false;
  }

  // A receive whose sender is not drawn moves right, next to the first box that needs it.
  void delay_lone_receives() {
    constexpr int unlimited = std::numeric_limits<int>::max();
    std::vector<int> latest(boxes_.size(), unlimited);
    for (std::uint32_t i = static_cast<std::uint32_t>(boxes_.size()); i-- > 0;) {
      const bool lone =
          boxes_[i].shades[static_cast<std::size_t>(Shade::recv)] == boxes_[i].num_nodes && beside_[i].empty();
      if (lone && latest[i] != unlimited) cells_[i].column = std::max(cells_[i].column, latest[i]);
      for (const Before& b : before_[i]) latest[b.box] = std::min(latest[b.box], cells_[i].column - b.distance);
    }
  }

  // Boxes without a lane form a pile in their column, one per cluster.
  void measure_piles() {
    std::size_t num_laneless = 0;
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
      int& height = piles_[cells_[i].column][boxes_[i].cluster];
      if (boxes_[i].lane < 0) ++height, ++num_laneless;
    }
    const double share =
        static_cast<double>(num_laneless) / static_cast<double>(std::max<std::size_t>(1, drawing_.clusters.size()));
    pile_height_ = std::max(4, static_cast<int>(std::ceil(1.1 * std::sqrt(share))));
  }

  // Renumbers the columns: empty ones disappear, and a tall pile takes several.
  void spread_piles() {
    std::map<int, int> start;  // old column -> first new column
    for (const auto& [column, pile] : piles_) {
      start[column] = num_columns_;
      int tallest   = 1;
      for (const auto& [cluster, height] : pile) tallest = std::max(tallest, height);
      num_columns_ += (tallest + pile_height_ - 1) / pile_height_;
    }
    std::map<std::pair<int, int>, int> piled;  // (cluster, old column) -> boxes placed so far
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
      const int column = cells_[i].column;
      cells_[i].column = start[column];
      if (boxes_[i].lane >= 0) continue;
      const int place = piled[{boxes_[i].cluster, column}]++;
      cells_[i].column += place / pile_height_;
      cells_[i].row = place % pile_height_;  // within its cluster; assign_rows() makes it global
    }
  }

  // --- rows: the lanes of each cluster, then nodes without one -----------------------------------------------------
  void assign_rows() {
    std::map<std::tuple<int, int, int>, int> ids;  // (cluster, lane, place in the pile) -> row
    const auto key = [&](std::size_t i) {
      const int lane = boxes_[i].lane;
      return std::tuple(boxes_[i].cluster, lane < 0 ? static_cast<int>(num_lane_kinds) : lane,
                        lane < 0 ? cells_[i].row : 0);
    };
    for (std::size_t i = 0; i < boxes_.size(); ++i) ids[key(i)];
    for (auto& [where, id] : ids) {
      id             = static_cast<int>(rows_.size());
      const int lane = std::get<1>(where);
      rows_.push_back({std::get<0>(where), lane == static_cast<int>(num_lane_kinds) ? -1 : lane});
    }
    column_widths_.assign(static_cast<std::size_t>(num_columns_), 0);
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
      Cell& cell = cells_[i];
      cell.row   = ids[key(i)];
      Row& row   = rows_[static_cast<std::size_t>(cell.row)];
      row.height = std::max({row.height, cell.height, min_row});
      row.columns.push_back(cell.column);
      double& width = column_widths_[static_cast<std::size_t>(cell.column)];
      width         = std::max(width, cell.width);
    }
    for (Row& row : rows_) std::sort(row.columns.begin(), row.columns.end());
  }

  // --- bands or panels, so that the picture fits a page ------------------------------------------------------------
  void make_frames() {
    constexpr double about_gap = 26, about_hall = 20, about_head = 30;
    double width = 60, height = 0;
    for (const double w : column_widths_) width += w + about_gap;
    for (const Row& row : rows_) height += row.height + about_hall;
    const int num_clusters = static_cast<int>(drawing_.clusters.size());
    height += about_head * num_clusters;
    const double aspect = width / std::max(1.0, height) / best_aspect;
    const int num_bands = aspect > 1.6 ? std::min(static_cast<int>(std::lround(std::sqrt(aspect))), num_columns_) : 1;
    const int num_panels =
        aspect < 0.3 ? std::min(static_cast<int>(std::lround(std::sqrt(0.8 / aspect))), num_clusters) : 1;
    if (num_bands > 1) {
      int first = 0;
      for (const int end : band_ends(num_bands)) {
        frames_.push_back({first, end - 1, 0, num_clusters - 1});
        first = end;
      }
    } else {
      for (int i = 0; i < num_panels; ++i) {
        const int first = num_clusters * i / num_panels, end = num_clusters * (i + 1) / num_panels;
        frames_.push_back({0, num_columns_ - 1, first, end - 1});
      }
    }
    stacked_ = num_bands > 1;
    std::vector<std::set<int>> rows(frames_.size());
    for (Cell& cell : cells_) {
      const int cluster = rows_[static_cast<std::size_t>(cell.row)].cluster;
      while (cell.column > frames_[static_cast<std::size_t>(cell.frame)].last_column ||
             cluster > frames_[static_cast<std::size_t>(cell.frame)].last_cluster)
        ++cell.frame;
      rows[static_cast<std::size_t>(cell.frame)].insert(cell.row);
    }
    for (std::size_t i = 0; i < frames_.size(); ++i) {
      frames_[i].rows.assign(rows[i].begin(), rows[i].end());
      frames_[i].gaps.resize(static_cast<std::size_t>(frames_[i].last_column - frames_[i].first_column + 2));
      frames_[i].halls.resize(2 * frames_[i].rows.size());
    }
    for (Cell& cell : cells_) {
      const std::vector<int>& in = frames_[static_cast<std::size_t>(cell.frame)].rows;
      cell.row_in_frame          = static_cast<int>(std::lower_bound(in.begin(), in.end(), cell.row) - in.begin());
    }
  }

  // Cuts where few lines cross, into bands of nearly equal width.
  std::vector<int> band_ends(int num_bands) const {
    std::vector<int> crossing(static_cast<std::size_t>(num_columns_) + 1, 0);
    for (const Link& link : drawing_.links) {
      const auto [low, high] = std::minmax(cells_[link.from].column, cells_[link.to].column);
      if (link.kind == LinkKind::loop || low == high) continue;
      ++crossing[static_cast<std::size_t>(low) + 1], --crossing[static_cast<std::size_t>(high) + 1];
    }
    for (std::size_t i = 1; i < crossing.size(); ++i) crossing[i] += crossing[i - 1];
    const int wanted = std::max(1, (num_columns_ + num_bands - 1) / num_bands), slack = wanted / 6;
    std::vector<int> ends;
    for (int end = 0; end < num_columns_;) {
      const int target = end + wanted;
      if (target + slack >= num_columns_) {
        end = num_columns_;
      } else {
        end = target;
        for (int other = target - slack; other <= target + slack; ++other) {
          const auto cost = [&](int cut) {
            return std::pair(crossing[static_cast<std::size_t>(cut)], std::abs(cut - target));
          };
          if (cost(other) < cost(end)) end = other;
        }
      }
      ends.push_back(end);
    }
    return ends;
  }

  // --- lines: which gaps and halls they take ------------------------------------------------------------------------
  // The vertical order of rows and halls over the whole picture. Only comparisons matter.
  int row_index(const Cell& cell) const {
    return frame_base_[static_cast<std::size_t>(cell.frame)] + 2 * cell.row_in_frame + 1;
  }

  std::pair<Channel*, int> hall(const Cell& cell, bool above) {
    Frame& frame = frames_[static_cast<std::size_t>(cell.frame)];
    auto row     = static_cast<std::size_t>(cell.row_in_frame);
    const int at = row_index(cell) + (above ? -1 : 1);
    if (!above) return {&frame.halls[2 * row + 1], at};
    const bool first = row == 0 || rows_[static_cast<std::size_t>(frame.rows[row - 1])].cluster !=
                                       rows_[static_cast<std::size_t>(frame.rows[row])].cluster;
    return {&frame.halls[first ? 2 * row : 2 * row - 1], at};
  }

  Channel& gap(const Cell& cell, bool left) {
    Frame& frame = frames_[static_cast<std::size_t>(cell.frame)];
    return frame.gaps[static_cast<std::size_t>(cell.column - frame.first_column + (left ? 0 : 1))];
  }

  // Builds a route step by step: `index` is the row or hall it is at, `column` the gap.
  struct Builder {
    Route route       = {};
    std::uint64_t net = 0;
    int index = 0, column = 0;
    Channel* hall = nullptr;  // the hall it runs in; null: a row
    int hall_from = 0;

    void down(Channel& gap, int gap_column, int to_index, Channel* to_hall) {
      if (hall != nullptr) route.steps.push_back({hall, hall->add(hall_from, gap_column, net)});
      route.steps.push_back({&gap, gap.add(index, to_index, net)});
      route.from_above = index < to_index;
      index            = to_index;
      hall             = to_hall;
      hall_from        = gap_column;
    }
  };

  void route() {
    int base = 1;
    for (const Frame& frame : frames_) {
      frame_base_.push_back(base);
      base += 2 * static_cast<int>(frame.rows.size()) + 2;
    }
    routes_.resize(drawing_.links.size());
    for (std::size_t i = 0; i < routes_.size(); ++i) {
      if (drawing_.links[i].kind != LinkKind::match) routes_[i] = route(drawing_.links[i]);
    }
    for (Frame& frame : frames_) {
      for (Channel& channel : frame.gaps) channel.assign();
      for (Channel& channel : frame.halls) channel.assign();
      frame.gutter.assign();
    }
    left_margin_.assign();
    right_margin_.assign();
  }

  Route route(const Link& link) {
    const Cell &from = cells_[link.from], &to = cells_[link.to];
    const Row &source = rows_[static_cast<std::size_t>(from.row)], &target = rows_[static_cast<std::size_t>(to.row)];
    Builder b;
    b.net            = 4 * std::uint64_t{link.from} + static_cast<std::uint64_t>(link.kind);
    b.index          = row_index(from);
    const bool wraps = from.frame != to.frame;
    if (!wraps && from.column == to.column && std::abs(from.row_in_frame - to.row_in_frame) == 1) return b.route;
    if (!wraps && from.column < to.column) {
      if (from.row == to.row && source.free(from.column, to.column)) return b.route;
      if (from.row != to.row && source.free(from.column, to.column)) {
        b.down(gap(to, true), 2 * to.column, row_index(to), nullptr);
        return b.route;
      }
      if (from.row != to.row && target.free(from.column, to.column)) {
        b.down(gap(from, false), 2 * from.column + 2, row_index(to), nullptr);
        return b.route;
      }
    }
    const bool up = wraps ? false : to.row <= from.row;
    if (!wraps || !source.free(from.column, frames_[static_cast<std::size_t>(from.frame)].last_column + 1)) {
      const auto [channel, at] = hall(from, up);
      b.down(gap(from, false), 2 * from.column + 2, at, channel);
    }
    if (wraps) {
      Frame& frame = frames_[static_cast<std::size_t>(to.frame)];
      // Outside the clusters, loop edges share one line: separate lines would add no information.
      const std::uint64_t own = std::exchange(b.net, link.kind == LinkKind::loop ? ~std::uint64_t{0} : b.net);
      const int gutter        = frame_base_[static_cast<std::size_t>(to.frame)] - 1;
      b.down(right_margin_, 2 * num_columns_ + 2, gutter, &frame.gutter);
      if (target.free(frame.first_column - 1, to.column)) {
        b.down(left_margin_, -1, row_index(to), nullptr);
        return b.route;
      }
      const auto [channel, at] = hall(to, true);
      b.down(left_margin_, -1, at, channel);
      b.net = own;
    }
    b.down(gap(to, true), 2 * to.column, row_index(to), nullptr);
    return b.route;
  }

  // --- coordinates --------------------------------------------------------------------------------------------------
  void settle() {
    out_.boxes.resize(boxes_.size());
    double left = left_margin_.size() > 0 ? left_margin_.size() + 6 : 0, top = 0, bottom = 0;
    left_margin_.begin = 0;
    std::vector<std::vector<double>> column_left(frames_.size());
    std::vector<std::vector<double>> row_top(frames_.size());
    std::vector<std::vector<std::uint32_t>> boxes_of_row(rows_.size());
    for (std::uint32_t i = 0; i < boxes_.size(); ++i)
      boxes_of_row[static_cast<std::size_t>(cells_[i].row)].push_back(i);
    double right_edge = 0;
    for (std::size_t f = 0; f < frames_.size(); ++f) {
      Frame& frame = frames_[f];
      if (stacked_ || f == 0) top = bottom + (f > 0 ? 10 : 0);
      if (frame.gutter.num_tracks > 0) {
        frame.gutter.begin = top;
        top += frame.gutter.size() + 6;
      }
      double label = 0;
      for (const int row : frame.rows) {
        const int lane = rows_[static_cast<std::size_t>(row)].lane;
        if (lane >= 0) label = std::max(label, text_width(to_string(static_cast<LaneKind>(lane)), lane_font) + 10);
      }
      double x = left + 6 + label;
      for (std::size_t g = 0; g < frame.gaps.size(); ++g) {
        const bool first = g == 0, last = g + 1 == frame.gaps.size();
        frame.gaps[g].begin = x + (first ? 2 : 7);
        x += frame.gaps[g].size() + (first ? 4 : 7) + (last ? 2 : 11);
        if (last) break;
        column_left[f].push_back(x);
        x += column_widths_[static_cast<std::size_t>(frame.first_column) + g];
      }
      const double right = x + 6;
      double y           = top;
      for (std::size_t i = 0; i < frame.rows.size(); ++i) {
        const Row& row   = rows_[static_cast<std::size_t>(frame.rows[i])];
        const bool first = i == 0 || rows_[static_cast<std::size_t>(frame.rows[i - 1])].cluster != row.cluster;
        if (first) {
          if (i > 0) y += 10;
          out_.clusters.push_back({row.cluster, static_cast<int>(stacked_ ? f : 0), {left, y, right, y}, {}});
          y += rank_font + 8;
          frame.halls[2 * i].begin = y;
          y += frame.halls[2 * i].size();
        }
        ClusterArea& area = out_.clusters.back();
        const double pad  = row.lane >= 0 ? lane_pad : 3;
        const Rect rect{left + 5, y, right - 5, y + row.height + 2 * pad};
        // Lines from the previous band run along the middle of a row, so the label is placed above.
        area.lanes.push_back({row.lane, rect, {rect.left + 4, stacked_ ? rect.top + 6.5 : rect.center().y}, {}});
        row_top[f].push_back(y + pad);
        y += row.height + 2 * pad;
        frame.halls[2 * i + 1].begin = y + 2;
        y += std::max(4.0, frame.halls[2 * i + 1].size() + 4);
        area.rect.bottom = y + 1;
        for (const std::uint32_t box : boxes_of_row[static_cast<std::size_t>(frame.rows[i])]) {
          const Cell& cell = cells_[box];
          if (cell.frame != static_cast<int>(f)) continue;
          area.lanes.back().boxes.push_back(box);
          const auto column      = static_cast<std::size_t>(cell.column - frame.first_column);
          const double box_left  = column_left[f][column];
          const double box_width = column_widths_[static_cast<std::size_t>(cell.column)];
          const double box_top   = row_top[f][i] + (row.height - cell.height) / 2;
          out_.boxes[box]        = {box_left, box_top, box_left + box_width, box_top + cell.height};
        }
      }
      bottom     = std::max(bottom, y + 1);
      right_edge = std::max(right_edge, right);
      if (!stacked_) left = right + 14;
    }
    if (stacked_) {
      for (ClusterArea& area : out_.clusters) {
        area.rect.right = right_edge;
        for (LaneArea& lane : area.lanes) lane.rect.right = right_edge - 5;
      }
    }
    right_margin_.begin = right_edge + 6;
    out_.width          = right_edge + (right_margin_.num_tracks > 0 ? right_margin_.size() + 8 : 0);
    out_.height         = bottom;
  }

  void draw_lines() {
    std::vector<int> above(boxes_.size(), 0), below(boxes_.size(), 0);
    out_.lines.resize(routes_.size());
    for (std::size_t i = 0; i < routes_.size(); ++i) {
      const Link& link = drawing_.links[i];
      if (link.kind == LinkKind::match) continue;
      const Rect &from = out_.boxes[link.from], &to = out_.boxes[link.to];
      const Route& route       = routes_[i];
      std::vector<Point>& line = out_.lines[i];
      if (route.steps.empty() && cells_[link.from].column == cells_[link.to].column) {
        const bool down = from.top < to.top;
        const double x  = from.center().x;
        line            = {{x, down ? from.bottom : from.top}, {x, down ? to.top : to.bottom}};
        continue;
      }
      const double exit = from.center().y + (link.kind == LinkKind::loop ? from.height() * 0.3 : 0);
      line.push_back({from.right, exit});
      if (route.steps.empty()) {
        line.push_back({to.left, exit});
        continue;
      }
      int& used          = route.from_above ? above[link.to] : below[link.to];
      const double shift = std::min(++used * port_step, to.height() / 2 - 3);
      const double enter = to.center().y + (route.from_above ? -shift : shift);
      for (std::size_t k = 0; k < route.steps.size(); k += 2) {
        const double x = route.steps[k].channel->at(route.steps[k].use);
        line.push_back({x, line.back().y});
        const bool last = k + 1 >= route.steps.size();
        line.push_back({x, last ? enter : route.steps[k + 1].channel->at(route.steps[k + 1].use)});
      }
      line.push_back({to.left, enter});
    }
    draw_matches();
  }

  // Parts in one column are joined by a vertical line behind the boxes between them, each pair at its own x.
  void draw_matches() {
    std::map<std::pair<int, int>, Channel> columns;  // (frame, column)
    std::map<std::size_t, std::size_t> uses;
    const auto in_column = [&](const Link& link) {
      return cells_[link.from].column == cells_[link.to].column && cells_[link.from].frame == cells_[link.to].frame;
    };
    for (std::size_t i = 0; i < routes_.size(); ++i) {
      const Link& link = drawing_.links[i];
      const Cell &from = cells_[link.from], &to = cells_[link.to];
      if (link.kind != LinkKind::match || !in_column(link)) continue;
      // The chain of a collective's members is one net, so its line may continue on the same track.
      uses[i] = columns[{from.frame, from.column}].add(2 * from.row_in_frame + (from.row < to.row),
                                                       2 * to.row_in_frame + (to.row < from.row), 2 * i);
    }
    for (auto& [where, channel] : columns) channel.assign();
    for (std::size_t i = 0; i < routes_.size(); ++i) {
      const Link& link = drawing_.links[i];
      if (link.kind != LinkKind::match) continue;
      const Rect &from = out_.boxes[link.from], &to = out_.boxes[link.to];
      Point a = from.center(), b = to.center();
      if (in_column(link)) {
        const Channel& channel = columns.at({cells_[link.from].frame, cells_[link.from].column});
        const double step      = std::min(8.0, (from.width() - 12) / std::max(1, channel.num_tracks));
        a.x = b.x = a.x + (channel.uses[uses.at(i)].track - (channel.num_tracks - 1) / 2.0) * step;
      }
      a.y           = from.top < to.top ? from.bottom : from.top;
      b.y           = from.top < to.top ? to.top : to.bottom;
      out_.lines[i] = {a, b};
    }
  }

  const Drawing& drawing_;
  const std::vector<Box>& boxes_;
  std::vector<Cell> cells_;
  std::vector<std::vector<Before>> before_;                        // by box
  std::vector<std::pair<std::uint32_t, std::uint32_t>> together_;  // matched parts that share a column
  std::vector<std::vector<std::uint32_t>> beside_;                 // the same, by box
  std::map<int, std::map<int, int>> piles_;                        // column -> cluster -> boxes without a lane
  int num_columns_ = 0, pile_height_ = 1;
  bool stacked_ = false;
  std::vector<Row> rows_;
  std::vector<double> column_widths_;
  std::vector<Frame> frames_;
  std::vector<int> frame_base_;
  std::vector<Route> routes_;
  Channel left_margin_, right_margin_;  // outside all clusters, for lines between bands
  Placement out_;
};

}  // namespace

Placement place(const Drawing& drawing) { return Placer(drawing).place(); }

double text_width(std::string_view text, double font_size) {
  // Thousandths of the font size, in DejaVu Sans, the widest substitute for Helvetica.
  static constexpr int widths[95] = {318,  401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337,
                                     636,  636, 636, 636, 636, 636, 636, 636, 636, 636, 337, 337, 838, 838, 838, 531,
                                     1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295, 656, 557, 863, 748, 787,
                                     603,  787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500,
                                     500,  613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612,
                                     635,  635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636, 337, 636, 838};
  double width                    = 0;
  for (const char c : text) {
    const auto letter = static_cast<unsigned char>(c);
    if (letter >= 32 && letter < 127) width += widths[letter - 32];
    if (letter >= 0xC0) width += 1000;  // the first byte of any other letter
  }
  return width * font_size / 1000;
}

}  // namespace stepgraph::drawing
