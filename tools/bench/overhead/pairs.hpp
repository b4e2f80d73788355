#pragma once
#include <cstdint>
#include <functional>
#include <vector>

// Times of `bench overhead`.
namespace stepgraph::bench {

struct OverheadOptions;

[[nodiscard]] double nanoseconds(const std::function<void()>& work);

// Times of two alternatives in nanoseconds per node. They run in turn, each first in every other pair.
struct Pairs {
  std::vector<double> first, second;
};
[[nodiscard]] Pairs alternate(const std::function<void()>& first, const std::function<void()>& second,
                              std::uint32_t nodes, const OverheadOptions& options);

}  // namespace stepgraph::bench
