#include "graphs/layout/distributed_tensor.hpp"

#include <algorithm>

#include "engine/base/error.hpp"
#include "ops/tape/streams.hpp"
#include "ops/transfers/collectives.hpp"
#include "ops/transfers/reduce.hpp"

namespace stepgraph {
namespace {

// A region of the whole tensor, as bytes of the buffer that it lies in.
Access inside(const Access& whole, Region region) {
  if (region.num_bytes() != 0 && whole.region.length != Access::whole) region.offset += whole.region.offset;
  return {whole.buffer, region};
}

// One move of one tensor, with its defaults filled in and its whole tensors checked.
class Mover {
 public:
  Mover(Graph& graph, const DistributedTensor& tensor, const TensorMove& move, const char* what, LaneKind usual)
      : graph_(graph),
        tensor_(tensor),
        move_(move),
        name_(move.name.empty() ? str(what, " ", tensor.name()) : move.name),
        lane_(move.lane.value_or(usual)) {
    if (!move.whole) refuse("needs `whole`");
  }

  // Not for longer than this lives.
  [[nodiscard]] Collective collective() const {
    return {.name      = name_,
            .group     = tensor_.group(),
            .lane      = lane_,
            .type      = tensor_.type(),
            .in        = {},
            .out       = {},
            .reduction = move_.reduction,
            .root      = move_.root,
            .peer      = {},
            .labels    = move_.labels};
  }
  [[nodiscard]] auto shard() const {
    return [this](Rank rank) -> AccessList { return tensor_.shard(rank); };
  }
  [[nodiscard]] auto whole() const {
    return [this](Rank rank) -> AccessList { return whole_at(rank); };
  }
  [[nodiscard]] auto blocks() const {
    return [this](Rank rank) {
      const Access all = whole_at(rank);
      AccessList list;
      for (int member = 0; member < tensor_.partition().num_members(); ++member)
        list.push_back(inside(all, tensor_.partition().region(member, tensor_.type())));
      return list;
    };
  }

  Node copy_out(Rank rank) { return copy(tensor_.shard(rank), block_at(rank)); }
  Node copy_in(Rank rank) { return copy(block_at(rank), tensor_.shard(rank)); }

  void check_root() const {
    if (std::find(tensor_.ranks().begin(), tensor_.ranks().end(), move_.root) == tensor_.ranks().end())
      refuse(str("has root ", move_.root, " (a rank that has a shard)"));
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(ErrorKind::config, str("tensor: '", name_, "' ", why));
  }

  [[nodiscard]] Access whole_at(Rank rank) const {
    const Access all         = move_.whole(rank);
    const std::int64_t bytes = stepgraph::num_bytes(graph_, all);
    if (all.region.length != Access::whole && all.region.count != 1)
      refuse(str("has ", all.region.count, " ranges for the whole tensor on rank ", rank, " (one range)"));
    if (bytes != tensor_.num_bytes())
      refuse(str("has ", bytes, " bytes for the whole tensor on rank ", rank, ", but ", tensor_, " has ",
                 tensor_.num_bytes()));
    return all;
  }

  [[nodiscard]] Access block_at(Rank rank) const {
    return inside(whole_at(rank), tensor_.partition().region(tensor_.member(rank), tensor_.type()));
  }

  Node copy(const Access& to, const Access& from) {
    return stepgraph::copy(graph_, {.name = name_, .lane = lane_, .to = to, .from = from, .labels = move_.labels});
  }

  Graph& graph_;
  const DistributedTensor& tensor_;
  const TensorMove& move_;
  std::string name_;
  LaneKind lane_;
};

}  // namespace

DistributedTensor::DistributedTensor(Graph& graph, const DistributedTensorSpec& spec)
    : name_(spec.name),
      partition_({.shape       = spec.shape,
                  .dim         = spec.dim,
                  .num_members = static_cast<int>(graph.spec(spec.group).ranks.size()),
                  .kind        = spec.kind}),
      type_(spec.type),
      group_(spec.group),
      ranks_(graph.spec(spec.group).ranks),
      shards_(ranks_.size()) {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Rank rank = ranks_[i];
    if (!graph.holds(rank)) continue;
    if (!spec.shard) {
      shards_[i] = graph.buffer({.name       = str(name_, " shard"),
                                 .rank       = rank,
                                 .size_bytes = local_bytes(rank),
                                 .type       = type_,
                                 .space      = spec.space,
                                 .lifetime   = spec.lifetime});
      continue;
    }
    shards_[i] = spec.shard(rank);
    if (stepgraph::num_bytes(graph, *shards_[i]) == local_bytes(rank)) continue;
    throw Error(ErrorKind::config, str("tensor: '", name_, "' has ", stepgraph::num_bytes(graph, *shards_[i]),
                                       " bytes for the shard of rank ", rank, " (", local_bytes(rank), ": ", type_, " ",
                                       to_string(local_shape(rank)), ")"));
  }
}

std::int64_t DistributedTensor::num_bytes() const noexcept {
  return num_elements(shape()) * static_cast<std::int64_t>(size_bytes(type_));
}

std::int64_t DistributedTensor::local_bytes(Rank rank) const {
  return partition_.local_elements(member(rank)) * static_cast<std::int64_t>(size_bytes(type_));
}

int DistributedTensor::member(Rank rank) const {
  const auto found = ranks_.find(rank);
  if (!found)
    throw Error(ErrorKind::config, str("tensor: rank ", rank, " has no shard of ", *this, " (not in its group)"));
  return static_cast<int>(*found);
}

const Access& DistributedTensor::shard(Rank rank) const {
  const std::optional<Access>& shard = shards_[static_cast<std::size_t>(member(rank))];
  if (!shard)
    throw Error(ErrorKind::config,
                str("tensor: the shard of ", *this, " on rank ", rank, " is in another rank's graph"));
  return *shard;
}

bool operator==(const DistributedTensor& a, const DistributedTensor& b) {
  const auto same_place = [](const std::optional<Access>& x, const std::optional<Access>& y) {
    return x.has_value() == y.has_value() && (!x || (x->buffer == y->buffer && x->region == y->region));
  };
  return a.name_ == b.name_ && a.partition_ == b.partition_ && a.type_ == b.type_ && a.group_ == b.group_ &&
         a.ranks_ == b.ranks_ &&
         std::equal(a.shards_.begin(), a.shards_.end(), b.shards_.begin(), b.shards_.end(), same_place);
}

std::string to_string(const DistributedTensor& tensor) {
  return str(tensor.name(), ": ", tensor.type(), " ", tensor.partition());
}

std::vector<Node> split_tensor(Graph& graph, const DistributedTensor& tensor, const TensorMove& move) {
  Mover mover(graph, tensor, move, "split", LaneKind::compute);
  std::vector<Node> nodes;
  for (const Rank rank : tensor.ranks()) {
    if (graph.holds(rank)) nodes.push_back(mover.copy_out(rank));
  }
  return nodes;
}

std::vector<Node> scatter_tensor(Graph& graph, const DistributedTensor& tensor, const TensorMove& move) {
  const Mover mover(graph, tensor, move, "scatter", LaneKind::gather);
  mover.check_root();
  Collective spec = mover.collective();
  spec.out        = mover.shard();
  if (tensor.partition().replicated()) {
    spec.in = mover.whole();
    return broadcast(graph, spec);
  }
  spec.in = mover.blocks();
  return scatter(graph, spec);
}

std::vector<Node> gather_tensor(Graph& graph, const DistributedTensor& tensor, const TensorMove& move) {
  Mover mover(graph, tensor, move, "gather", LaneKind::gather);
  mover.check_root();
  if (tensor.partition().replicated())
    return graph.holds(move.root) ? std::vector{mover.copy_in(move.root)} : std::vector<Node>{};
  Collective spec = mover.collective();
  spec.in         = mover.shard();
  spec.out        = mover.blocks();
  return gather(graph, spec);
}

std::vector<Node> all_gather_tensor(Graph& graph, const DistributedTensor& tensor, const TensorMove& move) {
  Mover mover(graph, tensor, move, "all_gather", LaneKind::gather);
  if (tensor.partition().replicated()) {
    std::vector<Node> nodes;
    for (const Rank rank : tensor.ranks()) {
      if (graph.holds(rank)) nodes.push_back(mover.copy_in(rank));
    }
    return nodes;
  }
  Collective spec = mover.collective();
  spec.in         = mover.shard();
  spec.out        = mover.blocks();
  return all_gather(graph, spec);
}

std::vector<Node> reduce_scatter_tensor(Graph& graph, const DistributedTensor& tensor, const TensorMove& move) {
  const Mover mover(graph, tensor, move, "reduce_scatter", LaneKind::reduce);
  Collective spec = mover.collective();
  spec.out        = mover.shard();
  if (tensor.partition().replicated()) {
    spec.in = mover.whole();
    return all_reduce(graph, spec);
  }
  spec.in = mover.blocks();
  return reduce_scatter(graph, spec);
}

}  // namespace stepgraph
