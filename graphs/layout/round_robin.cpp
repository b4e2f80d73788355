#include "graphs/layout/round_robin.hpp"

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::config, "round-robin: " + why); }

}  // namespace

RoundRobin::RoundRobin(std::int64_t num_partitions, int world_size)
    : num_partitions_(num_partitions), world_size_(world_size) {
  if (num_partitions < 0) refuse(str(num_partitions, " partitions (0 or more)"));
  if (world_size < 1) refuse(str("over ", world_size, " ranks (at least 1)"));
}

void RoundRobin::check_rank(Rank rank) const {
  if (index(rank) < 0 || index(rank) >= world_size_)
    refuse(str("rank ", rank, " is not in the world (0 to ", world_size_ - 1, ")"));
}

void RoundRobin::check_partition(std::int64_t partition) const {
  if (partition < 0 || partition >= num_partitions_)
    refuse(str("partition ", partition, " of ", num_partitions_, " (from 0 on)"));
}

Rank RoundRobin::owner(std::int64_t partition) const {
  check_partition(partition);
  return Rank{static_cast<int>(partition % world_size_)};
}

std::int64_t RoundRobin::local_index(std::int64_t partition) const {
  check_partition(partition);
  return partition / world_size_;
}

std::int64_t RoundRobin::global_index(Rank rank, std::int64_t local_index) const {
  const std::int64_t own = num_owned(rank);
  if (local_index < 0 || local_index >= own)
    refuse(str("local index ", local_index, " of rank ", rank, ", which owns ", own, " of ", num_partitions_,
               " partitions"));
  return local_index * world_size_ + index(rank);
}

std::int64_t RoundRobin::num_owned(Rank rank) const {
  check_rank(rank);
  return num_partitions_ / world_size_ + (index(rank) < num_partitions_ % world_size_ ? 1 : 0);
}

std::vector<std::int64_t> RoundRobin::owned(Rank rank) const {
  std::vector<std::int64_t> partitions(static_cast<std::size_t>(num_owned(rank)));
  for (std::size_t i = 0; i < partitions.size(); ++i) partitions[i] = global_index(rank, static_cast<std::int64_t>(i));
  return partitions;
}

std::string to_string(const RoundRobin& ownership) {
  return str(ownership.num_partitions(), " partitions round-robin over ", ownership.world_size(), " ranks");
}

std::vector<std::pair<std::string, Rank>> round_robin_owners(std::span<const std::string> parameters, int world_size) {
  const RoundRobin ownership(static_cast<std::int64_t>(parameters.size()), world_size);
  std::vector<std::pair<std::string, Rank>> owners;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    owners.emplace_back(parameters[i], ownership.owner(static_cast<std::int64_t>(i)));
  return owners;
}

}  // namespace stepgraph
