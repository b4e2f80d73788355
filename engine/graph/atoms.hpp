#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "engine/graph/graph_data.hpp"

namespace stepgraph {

// An atom is a set of bytes of a buffer that each access of the graph uses as a whole or not at all. Derivation keeps
// one history per atom, so it is exact to the byte for all ranges and strides.
//
// A buffer whose accesses all have one region is one atom, with the buffer's own number. A buffer with several regions
// is cut at their borders: into intervals, or, when strided regions share one stride, into a grid of rows and columns.
class Atoms {
 public:
  struct Run {
    std::uint32_t first;
    std::uint32_t count;
  };

  explicit Atoms(const GraphData& data);

  [[nodiscard]] std::uint32_t size() const noexcept { return num_atoms_; }

  // Calls visit(first, count) for the atoms of an access.
  template <class Visit>
  void of(const AccessRecord& access, Visit&& visit) const {
    const std::uint32_t buffer = access.buffer();
    if (access.region == empty_region) return;
    if (mixed_.empty() || mixed_[buffer].count == 0) {
      visit(buffer, std::uint32_t{1});
    } else if (access.region == whole_region) {
      visit(mixed_[buffer].first, mixed_[buffer].count);
    } else {
      const std::uint32_t row = row_of_region_[access.region];
      for (std::uint32_t i = run_begin_[row]; i < run_begin_[row + 1]; ++i) visit(runs_[i].first, runs_[i].count);
    }
  }

 private:
  void cut_buffer(const GraphData& data, std::uint32_t buffer, std::span<const std::uint32_t> region_ids);
  void cut_intervals(std::span<const Region> regions);
  bool cut_grid(std::span<const Region> regions, std::int64_t size_bytes);
  void close_row() { run_begin_.push_back(static_cast<std::uint32_t>(runs_.size())); }

  std::uint32_t num_atoms_ = 0;
  std::vector<Run> mixed_;                    // per buffer; count 0: one atom. Empty when no buffer is cut
  std::vector<std::uint32_t> row_of_region_;  // region id -> row of runs_
  std::vector<std::uint32_t> run_begin_{0};
  std::vector<Run> runs_;
};

}  // namespace stepgraph
