#include "engine/draw/layout.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "engine/draw/grid.hpp"

namespace stepgraph::drawing {
namespace {

constexpr double track_step  = 4;   // between parallel lines
constexpr double max_channel = 64;  // lines in a busier gap are squeezed
constexpr double port_step   = 5;   // between the arrow heads that enter a box
constexpr double lane_pad    = 5;   // from a box to the frame of its lane

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

// The channels of a frame.
struct Channels {
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

// Routes the lines through the gaps of the grid, which gives the gaps their widths, then computes coordinates.
class Placer {
 public:
  explicit Placer(const Drawing& drawing) : drawing_(drawing), boxes_(drawing.boxes), grid_(make_grid(drawing)) {}

  Placement place() {
    route();
    settle();
    draw_lines();
    return std::move(out_);
  }

 private:
  // --- lines: which gaps and halls they take ------------------------------------------------------------------------
  // The vertical order of rows and halls over the whole picture. Only comparisons matter.
  int row_index(const Cell& cell) const {
    return frame_base_[static_cast<std::size_t>(cell.frame)] + 2 * cell.row_in_frame + 1;
  }

  std::pair<Channel*, int> hall(const Cell& cell, bool above) {
    const Frame& frame          = grid_.frames[static_cast<std::size_t>(cell.frame)];
    std::vector<Channel>& halls = channels_[static_cast<std::size_t>(cell.frame)].halls;
    const auto row              = static_cast<std::size_t>(cell.row_in_frame);
    const int at                = row_index(cell) + (above ? -1 : 1);
    if (!above) return {&halls[2 * row + 1], at};
    const bool first = row == 0 || grid_.rows[static_cast<std::size_t>(frame.rows[row - 1])].cluster !=
                                       grid_.rows[static_cast<std::size_t>(frame.rows[row])].cluster;
    return {&halls[first ? 2 * row : 2 * row - 1], at};
  }

  Channel& gap(const Cell& cell, bool left) {
    const auto frame = static_cast<std::size_t>(cell.frame);
    const int column = cell.column - grid_.frames[frame].first_column;
    return channels_[frame].gaps[static_cast<std::size_t>(left ? column : column + 1)];
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
    for (const Frame& frame : grid_.frames) {
      frame_base_.push_back(base);
      base += 2 * static_cast<int>(frame.rows.size()) + 2;
      Channels& channels = channels_.emplace_back();
      channels.gaps.resize(static_cast<std::size_t>(frame.last_column - frame.first_column + 2));
      channels.halls.resize(2 * frame.rows.size());
    }
    routes_.resize(drawing_.links.size());
    for (std::size_t i = 0; i < routes_.size(); ++i) {
      if (drawing_.links[i].kind != LinkKind::match) routes_[i] = route(drawing_.links[i]);
    }
    for (Channels& channels : channels_) {
      for (Channel& channel : channels.gaps) channel.assign();
      for (Channel& channel : channels.halls) channel.assign();
      channels.gutter.assign();
    }
    left_margin_.assign();
    right_margin_.assign();
  }

  Route route(const Link& link) {
    const Cell &from = grid_.cells[link.from], &to = grid_.cells[link.to];
    const Row &source = grid_.rows[static_cast<std::size_t>(from.row)],
              &target = grid_.rows[static_cast<std::size_t>(to.row)];
    Builder b;
    b.net            = num_link_kinds * std::uint64_t{link.from} + static_cast<std::uint64_t>(link.kind);
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
    if (!wraps || !source.free(from.column, grid_.frames[static_cast<std::size_t>(from.frame)].last_column + 1)) {
      const auto [channel, at] = hall(from, up);
      b.down(gap(from, false), 2 * from.column + 2, at, channel);
    }
    if (wraps) {
      const auto frame = static_cast<std::size_t>(to.frame);
      // Outside the clusters, loop edges share one line: separate lines would add no information.
      const std::uint64_t own = std::exchange(b.net, link.kind == LinkKind::loop ? ~std::uint64_t{0} : b.net);
      const int gutter        = frame_base_[frame] - 1;
      b.down(right_margin_, 2 * grid_.num_columns() + 2, gutter, &channels_[frame].gutter);
      if (target.free(grid_.frames[frame].first_column - 1, to.column)) {
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
    std::vector<std::vector<double>> column_left(grid_.frames.size());
    std::vector<std::vector<double>> row_top(grid_.frames.size());
    std::vector<std::vector<std::uint32_t>> boxes_of_row(grid_.rows.size());
    for (std::uint32_t i = 0; i < boxes_.size(); ++i)
      boxes_of_row[static_cast<std::size_t>(grid_.cells[i].row)].push_back(i);
    double right_edge = 0;
    for (std::size_t f = 0; f < grid_.frames.size(); ++f) {
      const Frame& frame = grid_.frames[f];
      Channels& channels = channels_[f];
      if (grid_.stacked || f == 0) top = bottom + (f > 0 ? 10 : 0);
      if (channels.gutter.num_tracks > 0) {
        channels.gutter.begin = top;
        top += channels.gutter.size() + 6;
      }
      double label = 0;
      for (const int row : frame.rows) {
        const int lane = grid_.rows[static_cast<std::size_t>(row)].lane;
        if (lane >= 0) label = std::max(label, text_width(to_string(static_cast<LaneKind>(lane)), lane_font) + 10);
      }
      double x = left + 6 + label;
      for (std::size_t g = 0; g < channels.gaps.size(); ++g) {
        const bool first = g == 0, last = g + 1 == channels.gaps.size();
        channels.gaps[g].begin = x + (first ? 2 : 7);
        x += channels.gaps[g].size() + (first ? 4 : 7) + (last ? 2 : 11);
        if (last) break;
        column_left[f].push_back(x);
        x += grid_.column_widths[static_cast<std::size_t>(frame.first_column) + g];
      }
      const double right = x + 6;
      double y           = top;
      for (std::size_t i = 0; i < frame.rows.size(); ++i) {
        const Row& row   = grid_.rows[static_cast<std::size_t>(frame.rows[i])];
        const bool first = i == 0 || grid_.rows[static_cast<std::size_t>(frame.rows[i - 1])].cluster != row.cluster;
        if (first) {
          if (i > 0) y += 10;
          out_.clusters.push_back({row.cluster, static_cast<int>(grid_.stacked ? f : 0), {left, y, right, y}, {}});
          y += rank_font + 8;
          channels.halls[2 * i].begin = y;
          y += channels.halls[2 * i].size();
        }
        ClusterArea& area = out_.clusters.back();
        const double pad  = row.lane >= 0 ? lane_pad : 3;
        const Rect rect{left + 5, y, right - 5, y + row.height + 2 * pad};
        // Lines from the previous band run along the middle of a row, so the label is placed above.
        area.lanes.push_back({row.lane, rect, {rect.left + 4, grid_.stacked ? rect.top + 6.5 : rect.center().y}, {}});
        row_top[f].push_back(y + pad);
        y += row.height + 2 * pad;
        channels.halls[2 * i + 1].begin = y + 2;
        y += std::max(4.0, channels.halls[2 * i + 1].size() + 4);
        area.rect.bottom = y + 1;
        for (const std::uint32_t box : boxes_of_row[static_cast<std::size_t>(frame.rows[i])]) {
          const Cell& cell = grid_.cells[box];
          if (cell.frame != static_cast<int>(f)) continue;
          area.lanes.back().boxes.push_back(box);
          const auto column      = static_cast<std::size_t>(cell.column - frame.first_column);
          const double box_left  = column_left[f][column];
          const double box_width = grid_.column_widths[static_cast<std::size_t>(cell.column)];
          const double box_top   = row_top[f][i] + (row.height - cell.height) / 2;
          out_.boxes[box]        = {box_left, box_top, box_left + box_width, box_top + cell.height};
        }
      }
      bottom     = std::max(bottom, y + 1);
      right_edge = std::max(right_edge, right);
      if (!grid_.stacked) left = right + 14;
    }
    if (grid_.stacked) {
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
      if (route.steps.empty() && grid_.cells[link.from].column == grid_.cells[link.to].column) {
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
      return grid_.cells[link.from].column == grid_.cells[link.to].column &&
             grid_.cells[link.from].frame == grid_.cells[link.to].frame;
    };
    for (std::size_t i = 0; i < routes_.size(); ++i) {
      const Link& link = drawing_.links[i];
      const Cell &from = grid_.cells[link.from], &to = grid_.cells[link.to];
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
        const Channel& channel = columns.at({grid_.cells[link.from].frame, grid_.cells[link.from].column});
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
  const Grid grid_;
  std::vector<Channels> channels_;  // by frame
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
