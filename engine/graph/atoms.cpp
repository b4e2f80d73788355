#include "engine/graph/atoms.hpp"

#include <algorithm>
#include <tuple>

namespace stepgraph {
namespace {

void sort_unique(std::vector<std::int64_t>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

std::uint32_t find_cut(const std::vector<std::int64_t>& cuts, std::int64_t value) {
  return static_cast<std::uint32_t>(std::lower_bound(cuts.begin(), cuts.end(), value) - cuts.begin());
}

// Rows [row_begin, row_end) x columns [col_begin, col_end) of a buffer seen as rows of `stride` bytes.
struct Rectangle {
  std::int64_t row_begin, row_end, col_begin, col_end;
};

// A region as at most three rectangles; false when a strided range wraps around a row's end.
bool rectangles(const Region& region, std::int64_t stride, std::vector<Rectangle>& out) {
  const std::int64_t row = region.offset / stride;
  const std::int64_t col = region.offset % stride;
  if (!region.contiguous()) {
    if (col + region.length > stride) return false;
    out.push_back({row, row + region.count, col, col + region.length});
    return true;
  }
  const std::int64_t last_row = (region.end() - 1) / stride;
  const std::int64_t last_col = (region.end() - 1) % stride + 1;
  if (row == last_row) {
    out.push_back({row, row + 1, col, last_col});
    return true;
  }
  const std::int64_t first_full = col == 0 ? row : row + 1;
  const std::int64_t end_full   = last_col == stride ? last_row + 1 : last_row;
  if (first_full > row) out.push_back({row, row + 1, col, stride});
  if (end_full > first_full) out.push_back({first_full, end_full, 0, stride});
  if (end_full == last_row) out.push_back({last_row, last_row + 1, 0, last_col});
  return true;
}

}  // namespace

Atoms::Atoms(const GraphData& data) : num_atoms_(static_cast<std::uint32_t>(data.buffers.size())) {
  const auto mixed     = [&](std::uint32_t buffer) { return data.uses[buffer].state == BufferUse::State::mixed; };
  std::uint32_t buffer = 0;
  while (buffer < data.buffers.size() && !mixed(buffer)) ++buffer;
  if (buffer == data.buffers.size()) return;

  mixed_.assign(data.buffers.size(), Run{0, 0});
  row_of_region_.assign(data.regions.size(), 0);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> uses;  // (buffer, region id) of every partial access
  for (const AccessRecord& access : data.accesses) {
    if (access.region != empty_region && mixed(access.buffer())) uses.emplace_back(access.buffer(), access.region);
  }
  std::sort(uses.begin(), uses.end());
  uses.erase(std::unique(uses.begin(), uses.end()), uses.end());
  std::vector<std::uint32_t> region_ids;
  for (std::size_t i = 0; i < uses.size();) {
    region_ids.clear();
    const std::uint32_t current = uses[i].first;
    for (; i < uses.size() && uses[i].first == current; ++i) {
      if (uses[i].second != whole_region) region_ids.push_back(uses[i].second);
    }
    cut_buffer(data, current, region_ids);
  }
}

void Atoms::cut_buffer(const GraphData& data, std::uint32_t buffer, std::span<const std::uint32_t> region_ids) {
  // Equal regions share one row of runs.
  std::vector<std::uint32_t> order(region_ids.begin(), region_ids.end());
  const auto key = [&](std::uint32_t id) {
    const Region& r = data.regions[id];
    return std::tuple(r.offset, r.length, r.stride, r.count);
  };
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return key(a) < key(b); });
  std::vector<Region> distinct;
  const auto first_row = static_cast<std::uint32_t>(run_begin_.size() - 1);
  for (const std::uint32_t id : order) {
    if (distinct.empty() || distinct.back() != data.regions[id]) distinct.push_back(data.regions[id]);
    row_of_region_[id] = first_row + static_cast<std::uint32_t>(distinct.size() - 1);
  }
  const std::uint32_t first_atom = num_atoms_;
  if (!cut_grid(distinct, data.buffers[buffer].size_bytes)) cut_intervals(distinct);
  mixed_[buffer] = {first_atom, num_atoms_ - first_atom};
}

void Atoms::cut_intervals(std::span<const Region> regions) {
  std::vector<std::int64_t> cuts;
  for (const Region& region : regions) {
    for (std::int64_t i = 0; i < region.count; ++i) {
      cuts.push_back(region.offset + i * region.stride);
      cuts.push_back(cuts.back() + region.length);
    }
  }
  sort_unique(cuts);
  for (const Region& region : regions) {
    for (std::int64_t i = 0; i < region.count; ++i) {
      const std::int64_t begin = region.offset + i * region.stride;
      const std::uint32_t lo   = find_cut(cuts, begin);
      runs_.push_back({num_atoms_ + lo, find_cut(cuts, begin + region.length) - lo});
    }
    close_row();
  }
  // One more atom: the bytes that only accesses of the whole buffer use.
  num_atoms_ += static_cast<std::uint32_t>(cuts.size());
}

bool Atoms::cut_grid(std::span<const Region> regions, std::int64_t size_bytes) {
  std::int64_t stride = 0, num_ranges = 0;
  for (const Region& region : regions) {
    num_ranges += region.count;
    if (region.contiguous()) continue;
    if (stride != 0 && stride != region.stride) return false;
    stride = region.stride;
  }
  if (stride == 0) return false;

  std::vector<Rectangle> cells;
  std::vector<std::size_t> cell_begin{0};
  std::vector<std::int64_t> rows{0, (size_bytes + stride - 1) / stride}, cols{0, stride};
  for (const Region& region : regions) {
    if (!rectangles(region, stride, cells)) return false;
    cell_begin.push_back(cells.size());
  }
  for (const Rectangle& cell : cells) {
    rows.insert(rows.end(), {cell.row_begin, cell.row_end});
    cols.insert(cols.end(), {cell.col_begin, cell.col_end});
  }
  sort_unique(rows);
  sort_unique(cols);
  const auto num_cols = static_cast<std::uint32_t>(cols.size() - 1);
  if (static_cast<std::int64_t>(rows.size() * cols.size()) > 2 * num_ranges + 64) return false;  // intervals are fewer

  for (std::size_t i = 0; i < regions.size(); ++i) {
    for (std::size_t k = cell_begin[i]; k < cell_begin[i + 1]; ++k) {
      const std::uint32_t row_lo = find_cut(rows, cells[k].row_begin), row_hi = find_cut(rows, cells[k].row_end);
      const std::uint32_t col_lo = find_cut(cols, cells[k].col_begin), col_hi = find_cut(cols, cells[k].col_end);
      if (col_lo == 0 && col_hi == num_cols) {
        runs_.push_back({num_atoms_ + row_lo * num_cols, (row_hi - row_lo) * num_cols});
      } else {
        for (std::uint32_t row = row_lo; row < row_hi; ++row) {
          runs_.push_back({num_atoms_ + row * num_cols + col_lo, col_hi - col_lo});
        }
      }
    }
    close_row();
  }
  num_atoms_ += static_cast<std::uint32_t>(rows.size() - 1) * num_cols;
  return true;
}

}  // namespace stepgraph
