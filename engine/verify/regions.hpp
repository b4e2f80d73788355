#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "engine/graph/access.hpp"

// Sets of bytes, as the verifier compares them. Regions are in normal form and not empty.
namespace stepgraph::verifier {

struct Range {
  std::int64_t begin, end;
};

// The first bytes that both have.
[[nodiscard]] std::optional<Range> overlap(const Region& a, const Region& b);

// Whether all of `inner` is in `outer`. May say no for strided regions of different strides.
[[nodiscard]] bool covers(const Region& outer, const Region& inner);

// The bytes of one buffer that were written so far.
class WrittenBytes {
 public:
  void add(const Region& region);
  [[nodiscard]] std::optional<Range> first_missing(const Region& region);  // of the bytes asked for

 private:
  void insert(std::int64_t begin, std::int64_t end);
  [[nodiscard]] std::optional<Range> missing(std::int64_t begin, std::int64_t end) const;

  std::map<std::int64_t, std::int64_t> ranges_;  // begin -> end, apart from each other
  std::vector<Region> strided_;                  // written, but not yet cut into ranges
  std::vector<Region> known_;                    // strided regions found to be there
};

}  // namespace stepgraph::verifier
