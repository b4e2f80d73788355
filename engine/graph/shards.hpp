#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"

// The sizes of parts: how a side is cut into shards, and whether parts that meet fit together.
namespace stepgraph {

enum class Side : std::uint8_t { in, out };  // what a part sends, what it receives

// Whether that side of a part holds a shard of every member (engine/graph/part.hpp says how it is cut).
[[nodiscard]] bool holds_shards(PartOp op, Side side, bool is_root) noexcept;

// The sizes of the members' shards: all equal, or one for each member.
class ShardSizes {
 public:
  ShardSizes(std::size_t num_members, std::int64_t even) : num_members_(num_members), even_(even) {}
  explicit ShardSizes(std::vector<std::int64_t> each) : num_members_(each.size()), each_(std::move(each)) {}
  [[nodiscard]] std::size_t size() const noexcept { return num_members_; }
  [[nodiscard]] std::int64_t operator[](std::size_t member) const { return each_.empty() ? even_ : each_[member]; }
  [[nodiscard]] std::int64_t begin(std::size_t member) const;  // where its shard begins
  friend bool operator==(const ShardSizes& a, const ShardSizes& b);

 private:
  std::size_t num_members_;
  std::int64_t even_ = 0;
  std::vector<std::int64_t> each_;
};

// Cuts a side whose accesses, without tokens, have `access_bytes`; none when a shard would not be whole elements.
[[nodiscard]] std::optional<ShardSizes> cut_shards(std::span<const std::int64_t> access_bytes, std::size_t num_members,
                                                   DType type);
[[nodiscard]] std::optional<ShardSizes> shard_sizes(const Graph& graph, Node part, Side side);

// The place of the part's rank in its group.
[[nodiscard]] std::size_t member_of(const Graph& graph, Node part);

// What is wrong with the sizes of a part by itself; empty when they are right.
[[nodiscard]] std::string misfit(const Graph& graph, Node part);

// Why the sizes, or the peers and sources, of parts that meet do not fit together; none when they do.
// `nodes`: in group order, all members that the graph holds, or a send and its recv, or one of these two; op, type and
// root are the same.
struct Misfit {
  Node node;  // the part that does not fit
  std::string why;
};
[[nodiscard]] std::optional<Misfit> misfit(const Graph& graph, std::span<const std::uint32_t> nodes);

}  // namespace stepgraph
