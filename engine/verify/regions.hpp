#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "engine/graph/access.hpp"

// Sets of bytes for the verifier. Regions are in normal form and not empty.
namespace stepgraph::verifier {

using Range = ByteInterval;

// Whether `outer` contains all of `inner`. May return false wrongly for strided regions of different strides.
[[nodiscard]] bool covers(const Region& outer, const Region& inner);

// The bytes of one buffer written so far.
class WrittenBytes {
 public:
  void add(const Region& region);
  [[nodiscard]] std::optional<Range> first_missing(const Region& region);  // the first unwritten bytes

 private:
  void insert(std::int64_t begin, std::int64_t end);
  [[nodiscard]] std::optional<Range> missing(std::int64_t begin, std::int64_t end) const;

  std::map<std::int64_t, std::int64_t> ranges_;  // begin -> end; ranges are disjoint
  std::vector<Region> strided_;                  // written, not yet split into ranges
  std::vector<Region> known_;                    // strided regions known to be written completely
};

}  // namespace stepgraph::verifier
