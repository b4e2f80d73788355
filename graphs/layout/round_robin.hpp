#pragma once
#include <cstdint>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/types.hpp"

namespace stepgraph {

// The owner of each of many partitions, as ZeRO assigns them: partition i belongs to rank i mod world_size. Local
// indices count a rank's own partitions from 0.
class RoundRobin {
 public:
  RoundRobin(std::int64_t num_partitions, int world_size);

  [[nodiscard]] std::int64_t num_partitions() const noexcept { return num_partitions_; }
  [[nodiscard]] int world_size() const noexcept { return world_size_; }

  [[nodiscard]] Rank owner(std::int64_t partition) const;
  [[nodiscard]] std::int64_t local_index(std::int64_t partition) const;  // among its owner's
  [[nodiscard]] std::int64_t global_index(Rank rank, std::int64_t local_index) const;
  [[nodiscard]] std::int64_t num_owned(Rank rank) const;
  [[nodiscard]] std::vector<std::int64_t> owned(Rank rank) const;  // ascending

  friend auto operator<=>(const RoundRobin&, const RoundRobin&) = default;

 private:
  void check_rank(Rank rank) const;
  void check_partition(std::int64_t partition) const;

  std::int64_t num_partitions_;
  int world_size_;
};
[[nodiscard]] std::string to_string(const RoundRobin& ownership);  // "5 partitions round-robin over 2 ranks"
inline std::ostream& operator<<(std::ostream& out, const RoundRobin& ownership) { return out << to_string(ownership); }

// Each parameter is a partition, in the order of the list.
[[nodiscard]] std::vector<std::pair<std::string, Rank>> round_robin_owners(std::span<const std::string> parameters,
                                                                           int world_size);

}  // namespace stepgraph
