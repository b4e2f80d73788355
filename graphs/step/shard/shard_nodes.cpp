#include "graphs/step/shard/shard_nodes.hpp"

#include "engine/base/error.hpp"
#include "graphs/step/builder/part_node.hpp"
#include "ops/transfers/clear.hpp"

namespace stepgraph {
namespace {

std::int64_t bytes_of(DType type, std::int64_t elements) {
  return elements * static_cast<std::int64_t>(size_bytes(type));
}

Access shard_in(const ShardedWeight& weight, DType type, Buffer whole, int member) {
  const IndexRange range = weight.range(member);
  return whole.range(bytes_of(type, weight.offset + range.begin), bytes_of(type, range.size()));
}

// One access for each member; or one for all, where all shards have the same size.
AccessList all_shards_in(const ShardedWeight& weight, DType type, Buffer whole, int members) {
  if (weight.is_even()) return whole.range(bytes_of(type, weight.offset), bytes_of(type, weight.elements));
  AccessList all;
  for (int member = 0; member < members; ++member) all.push_back(shard_in(weight, type, whole, member));
  return all;
}

// `done` is what the node writes beside `out`.
void add_unit_part(Graph& graph, const Member& member, PartOp op, DType type, std::string name, AccessList in,
                   AccessList out, std::int64_t whole_bytes, const UnitText& text, const AccessList& done) {
  for (const Access& token : text.after.view()) in.push_back(token);
  for (const Access& token : done.view()) out.push_back(token);
  add_part(graph, {.name    = std::move(name),
                   .rank    = member.rank,
                   .lane    = member.lane,
                   .group   = member.group,
                   .op      = op,
                   .type    = type,
                   .reads   = std::move(in),
                   .writes  = std::move(out),
                   .bytes   = whole_bytes,
                   .members = member.size,
                   .labels  = text.labels});
}

}  // namespace

UnitShards shards_in_whole(const ShardUnit& unit, DType type, Buffer whole, int member) {
  UnitShards shards;
  if (unit.flat) {
    const std::int64_t size = bytes_of(type, unit.flat->shard_elements());
    shards.flat             = whole.range(member * size, size);
  }
  for (const ShardedWeight& weight : unit.weights) {
    if (!weight.flat) shards.others.push_back(shard_in(weight, type, whole, member));
  }
  return shards;
}

void gather_unit(Graph& graph, const Member& member, const ShardUnit& unit, DType type, const UnitShards& from,
                 Buffer whole, const UnitText& text) {
  if (unit.flat) {
    const std::int64_t bytes = bytes_of(type, unit.flat->padded_elements());
    add_unit_part(graph, member, PartOp::all_gather, type, "all_gather " + text.name, from.flat, whole.range(0, bytes),
                  bytes, text, {});
  }
  std::size_t other = 0;
  for (const ShardedWeight& weight : unit.weights) {
    if (weight.flat) continue;
    const Access& shard = from.others[other];
    const bool has      = weight.range(member.index).size() > 0;
    add_unit_part(graph, member, PartOp::all_gather, type, str("all_gather ", text.name, " ", text.others[other]),
                  has ? AccessList(shard) : AccessList(), all_shards_in(weight, type, whole, member.size),
                  bytes_of(type, weight.elements), text, {});
    ++other;
  }
}

void reduce_scatter_unit(Graph& graph, const Member& member, const ShardUnit& unit, DType type, Buffer whole,
                         const UnitShards& to, const UnitText& text, const AccessList& done) {
  std::size_t num_others = text.others.size(), other = 0;
  if (unit.flat) {
    const std::int64_t bytes = bytes_of(type, unit.flat->padded_elements());
    add_unit_part(graph, member, PartOp::reduce_scatter, type, "reduce_scatter " + text.name, whole.range(0, bytes),
                  to.flat, bytes, text, num_others == 0 ? done : AccessList());
  }
  for (const ShardedWeight& weight : unit.weights) {
    if (weight.flat) continue;
    const bool has = weight.range(member.index).size() > 0;
    add_unit_part(graph, member, PartOp::reduce_scatter, type,
                  str("reduce_scatter ", text.name, " ", text.others[other]),
                  all_shards_in(weight, type, whole, member.size), has ? AccessList(to.others[other]) : AccessList(),
                  bytes_of(type, weight.elements), text, other + 1 == num_others ? done : AccessList());
    ++other;
  }
}

void clear_padding(Graph& graph, const ShardUnit& unit, DType type, Buffer whole, const Labels& labels) {
  if (!unit.flat || unit.flat->padding() == 0) return;
  clear(graph, {.name   = "clear padding of " + unit.name,
                .values = whole.range(bytes_of(type, unit.flat->num_elements()), bytes_of(type, unit.flat->padding())),
                .labels = labels});
}

}  // namespace stepgraph
