#include "engine/draw/grid.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "engine/draw/layout.hpp"

namespace stepgraph::drawing {
namespace {

constexpr double min_row     = 32;
constexpr double best_aspect = 1.7;  // width to height, similar to a page

class GridMaker {
 public:
  explicit GridMaker(const Drawing& drawing) : drawing_(drawing), boxes_(drawing.boxes) {}

  Grid make() {
    measure();
    assign_columns();
    assign_rows();
    make_frames();
    return std::move(grid_);
  }

 private:
  void measure() {
    grid_.cells.resize(boxes_.size());
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
      double width = 44;
      for (const std::string& line : boxes_[i].title) width = std::max(width, text_width(line, title_font));
      for (const std::string& line : boxes_[i].facts) width = std::max(width, text_width(line, fact_font));
      grid_.cells[i].width  = width + 12;
      grid_.cells[i].height = 9 + static_cast<double>(boxes_[i].title.size()) * title_font * 1.22 +
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
    return grid_.cells[pair.first].column != grid_.cells[pair.second].column;
  }

  // Moves box i right of the boxes before it.
  void push(std::uint32_t i) {
    for (const Before& b : before_[i])
      grid_.cells[i].column = std::max(grid_.cells[i].column, grid_.cells[b.box].column + b.distance);
  }
  // Moves box i and its counterparts to the rightmost of their columns.
  void align(std::uint32_t i) {
    for (const std::uint32_t other : beside_[i])
      grid_.cells[i].column = grid_.cells[other].column = std::max(grid_.cells[i].column, grid_.cells[other].column);
  }

  // Puts every box as far left as the constraints allow. Returns false if some pairs do not come to share a column.
  // Boxes are processed by level, so that one pass is enough if boxes are single nodes.
  bool try_columns() {
    constexpr int max_passes = 50;
    for (std::size_t i = 0; i < boxes_.size(); ++i)
      grid_.cells[i].column = drawing_.keep_levels ? static_cast<int>(boxes_[i].level) : 0;
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
      if (lone && latest[i] != unlimited) grid_.cells[i].column = std::max(grid_.cells[i].column, latest[i]);
      for (const Before& b : before_[i]) latest[b.box] = std::min(latest[b.box], grid_.cells[i].column - b.distance);
    }
  }

  // Boxes without a lane form a pile in their column, one per cluster.
  void measure_piles() {
    std::size_t num_laneless = 0;
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
      int& height = piles_[grid_.cells[i].column][boxes_[i].cluster];
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
      const int column      = grid_.cells[i].column;
      grid_.cells[i].column = start[column];
      if (boxes_[i].lane >= 0) continue;
      const int place = piled[{boxes_[i].cluster, column}]++;
      grid_.cells[i].column += place / pile_height_;
      grid_.cells[i].row = place % pile_height_;  // within its cluster; assign_rows() makes it global
    }
  }

  // --- rows: the lanes of each cluster, then nodes without one -----------------------------------------------------
  void assign_rows() {
    std::map<std::tuple<int, int, int>, int> ids;  // (cluster, lane, place in the pile) -> row
    const auto key = [&](std::size_t i) {
      const int lane = boxes_[i].lane;
      return std::tuple(boxes_[i].cluster, lane < 0 ? static_cast<int>(num_lane_kinds) : lane,
                        lane < 0 ? grid_.cells[i].row : 0);
    };
    for (std::size_t i = 0; i < boxes_.size(); ++i) ids[key(i)];
    for (auto& [where, id] : ids) {
      id             = static_cast<int>(grid_.rows.size());
      const int lane = std::get<1>(where);
      grid_.rows.push_back({std::get<0>(where), lane == static_cast<int>(num_lane_kinds) ? -1 : lane});
    }
    grid_.column_widths.assign(static_cast<std::size_t>(num_columns_), 0);
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
      Cell& cell = grid_.cells[i];
      cell.row   = ids[key(i)];
      Row& row   = grid_.rows[static_cast<std::size_t>(cell.row)];
      row.height = std::max({row.height, cell.height, min_row});
      row.columns.push_back(cell.column);
      double& width = grid_.column_widths[static_cast<std::size_t>(cell.column)];
      width         = std::max(width, cell.width);
    }
    for (Row& row : grid_.rows) std::sort(row.columns.begin(), row.columns.end());
  }

  // --- bands or panels, so that the picture fits a page ------------------------------------------------------------
  void make_frames() {
    constexpr double about_gap = 26, about_hall = 20, about_head = 30;
    double width = 60, height = 0;
    for (const double w : grid_.column_widths) width += w + about_gap;
    for (const Row& row : grid_.rows) height += row.height + about_hall;
    const int num_clusters = static_cast<int>(drawing_.clusters.size());
    height += about_head * num_clusters;
    const double aspect = width / std::max(1.0, height) / best_aspect;
    const int num_bands = aspect > 1.6 ? std::min(static_cast<int>(std::lround(std::sqrt(aspect))), num_columns_) : 1;
    const int num_panels =
        aspect < 0.3 ? std::min(static_cast<int>(std::lround(std::sqrt(0.8 / aspect))), num_clusters) : 1;
    if (num_bands > 1) {
      int first = 0;
      for (const int end : band_ends(num_bands)) {
        grid_.frames.push_back({first, end - 1, 0, num_clusters - 1});
        first = end;
      }
    } else {
      for (int i = 0; i < num_panels; ++i) {
        const int first = num_clusters * i / num_panels, end = num_clusters * (i + 1) / num_panels;
        grid_.frames.push_back({0, num_columns_ - 1, first, end - 1});
      }
    }
    grid_.stacked = num_bands > 1;
    std::vector<std::set<int>> rows(grid_.frames.size());
    for (Cell& cell : grid_.cells) {
      const int cluster = grid_.rows[static_cast<std::size_t>(cell.row)].cluster;
      while (cell.column > grid_.frames[static_cast<std::size_t>(cell.frame)].last_column ||
             cluster > grid_.frames[static_cast<std::size_t>(cell.frame)].last_cluster)
        ++cell.frame;
      rows[static_cast<std::size_t>(cell.frame)].insert(cell.row);
    }
    for (std::size_t i = 0; i < grid_.frames.size(); ++i) grid_.frames[i].rows.assign(rows[i].begin(), rows[i].end());
    for (Cell& cell : grid_.cells) {
      const std::vector<int>& in = grid_.frames[static_cast<std::size_t>(cell.frame)].rows;
      cell.row_in_frame          = static_cast<int>(std::lower_bound(in.begin(), in.end(), cell.row) - in.begin());
    }
  }

  // Cuts where few lines cross, into bands of nearly equal width.
  std::vector<int> band_ends(int num_bands) const {
    std::vector<int> crossing(static_cast<std::size_t>(num_columns_) + 1, 0);
    for (const Link& link : drawing_.links) {
      const auto [low, high] = std::minmax(grid_.cells[link.from].column, grid_.cells[link.to].column);
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

  const Drawing& drawing_;
  const std::vector<Box>& boxes_;
  std::vector<std::vector<Before>> before_;                        // by box
  std::vector<std::pair<std::uint32_t, std::uint32_t>> together_;  // matched parts that share a column
  std::vector<std::vector<std::uint32_t>> beside_;                 // the same, by box
  std::map<int, std::map<int, int>> piles_;                        // column -> cluster -> boxes without a lane
  int num_columns_ = 0, pile_height_ = 1;
  Grid grid_;
};

}  // namespace

bool Row::free(int after, int before) const {
  const auto at = std::upper_bound(columns.begin(), columns.end(), after);
  return at == columns.end() || *at >= before;
}

Grid make_grid(const Drawing& drawing) { return GridMaker(drawing).make(); }

}  // namespace stepgraph::drawing
