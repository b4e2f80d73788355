#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"
#include "graphs/layout/partition.hpp"

namespace stepgraph {

// `shard` says where a member's shard lies, as any access of its size (a part of a flat buffer, or its block of a whole
// tensor that is then filled in place). None: a buffer is made for each.
struct DistributedTensorSpec {
  std::string name                  = {};
  TensorShape shape                 = {};  // of the whole tensor
  DType type                        = DType::f32;
  Group group                       = {};  // its members have the shards, in the order of the group
  int dim                           = 0;
  PartitionKind kind                = PartitionKind::ceiling;
  std::function<Access(Rank)> shard = {};
  Lifetime lifetime                 = Lifetime::step;  // of the buffers that are made
  Space space                       = Space::device;
};

// A tensor of which every member of a group has its block of a partition, laid out row by row. Plain data about a
// graph: the functions below add the nodes that cut it, put it together and reduce it. In a graph that holds one rank,
// only that member's shard is known, and only its nodes are added.
class DistributedTensor {
 public:
  DistributedTensor(Graph& graph, const DistributedTensorSpec& spec);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const Partition& partition() const noexcept { return partition_; }
  [[nodiscard]] const TensorShape& shape() const noexcept { return partition_.shape(); }
  [[nodiscard]] DType type() const noexcept { return type_; }
  [[nodiscard]] Group group() const noexcept { return group_; }
  [[nodiscard]] const RankList& ranks() const noexcept { return ranks_; }
  [[nodiscard]] std::int64_t num_bytes() const noexcept;  // of the whole tensor

  // A rank's view of it; refuses a rank that has no shard.
  [[nodiscard]] int member(Rank rank) const;
  [[nodiscard]] TensorShape local_shape(Rank rank) const { return partition_.local_shape(member(rank)); }
  [[nodiscard]] std::int64_t local_bytes(Rank rank) const;
  [[nodiscard]] const Access& shard(Rank rank) const;

  friend bool operator==(const DistributedTensor& a, const DistributedTensor& b);

 private:
  std::string name_;
  Partition partition_;
  DType type_;
  Group group_;
  RankList ranks_;
  std::vector<std::optional<Access>> shards_;  // by member; none: on a rank that is elsewhere
};
[[nodiscard]] std::string to_string(const DistributedTensor& tensor);  // "weight: f32 10x4 dim 0 over 3 ceiling"
inline std::ostream& operator<<(std::ostream& out, const DistributedTensor& tensor) { return out << to_string(tensor); }

// How a tensor is moved. `whole` returns where a member has the whole tensor: a buffer, or one range of exactly its
// size. It is not called for members that do not need the whole tensor.
struct TensorMove {
  std::string name                  = {};  // also the message id; empty: what is done and the tensor's name
  std::function<Access(Rank)> whole = {};
  std::optional<LaneKind> lane      = {};  // none: the usual
  Reduction reduction               = Reduction::sum;
  Rank root                         = Rank{-1};
  Labels labels                     = {};
};

// Each returns the nodes it added, in group order. Blocks are read and written where they lie in the whole tensor, so
// nothing is reordered by an extra copy. A replicated tensor's shards are the whole: putting it together copies,
// scattering broadcasts, reduce-scattering all-reduces. The usual lane is compute for splitting, which communicates
// nothing, reduce for reduce-scattering, and gather for the others.
std::vector<Node> split_tensor(Graph& graph, const DistributedTensor& tensor, const TensorMove& move);
std::vector<Node> scatter_tensor(Graph& graph, const DistributedTensor& tensor, const TensorMove& move);  // from `root`
std::vector<Node> gather_tensor(Graph& graph, const DistributedTensor& tensor, const TensorMove& move);   // at `root`
std::vector<Node> all_gather_tensor(Graph& graph, const DistributedTensor& tensor, const TensorMove& move);
std::vector<Node> reduce_scatter_tensor(Graph& graph, const DistributedTensor& tensor, const TensorMove& move);

}  // namespace stepgraph
