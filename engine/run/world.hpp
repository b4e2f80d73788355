#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "engine/graph/graph.hpp"
#include "engine/graph/issue_order.hpp"

namespace stepgraph {

class Device;        // engine/run/device.hpp
struct DeviceQueue;  // engine/run/device.hpp

// Memory of one access of a part: `region.count` ranges of `region.length` bytes, `region.stride` apart, from `data`
// on.
struct Piece {
  std::byte* data;
  Region region;  // its offset is already in `data`
};

// Bytes [begin, begin + size) of pieces laid end to end.
struct Stretch {
  std::span<const Piece> pieces;
  std::int64_t begin = 0;
  std::int64_t size  = 0;
};

// A side of a part: all of it, and, of one that holds a shard of every member, each shard, cut as engine/graph/part.hpp
// says. What reaches a world fits: sizes were checked when the program was made.
class PartSide {
 public:
  PartSide(std::span<const Piece> pieces, std::size_t num_members) noexcept
      : pieces_(pieces), num_members_(num_members) {}

  [[nodiscard]] Stretch all() const noexcept {
    std::int64_t size = 0;
    for (const Piece& piece : pieces_) size += piece.region.num_bytes();
    return {pieces_, 0, size};
  }
  [[nodiscard]] Stretch shard(std::size_t member) const noexcept {
    if (pieces_.size() == num_members_) {
      const std::span<const Piece> own = pieces_.subspan(member, 1);
      return {own, 0, own.front().region.num_bytes()};
    }
    const std::int64_t even = all().size / static_cast<std::int64_t>(num_members_);
    return {pieces_, static_cast<std::int64_t>(member) * even, even};
  }

 private:
  std::span<const Piece> pieces_;
  std::size_t num_members_;
};

// One member's share of a communication. Tokens aside, `in` are the node's reads and accumulates and `out` its writes
// and accumulates, in the order they were declared; empty ones are kept.
struct LocalPart {
  Node node;
  Rank rank;
  int member;   // position in the group
  Rank peer;    // permute: to whom it sends; -1: nobody
  Rank source;  // permute: from whom it receives; -1: nobody
  std::span<const Piece> in;
  std::span<const Piece> out;
  const DeviceQueue* queue = nullptr;  // where its work goes, on a device
};

// Matched parts: all those whose ranks live in this process.
struct Exchange {
  Graph::PartView what;  // the first local member's
  const GroupSpec& group;
  std::span<const LocalPart> parts;  // by member; for a message: the sender, then the receiver
};

// Where ranks live and how a communication is executed: the seam to the outside. Implementations are in backends/; a
// user can write another. Must outlive the programs that use it.
class World {
 public:
  virtual ~World() = default;

  [[nodiscard]] virtual int num_ranks() const          = 0;
  [[nodiscard]] virtual bool is_local(Rank) const      = 0;
  [[nodiscard]] virtual bool waits(LaneKind) const     = 0;  // nodes on such a lane block their thread
  [[nodiscard]] virtual IssueOrder issue_order() const = 0;

  // Where the memory of its ranks is and bodies enqueue their work; null: in this process, where they compute.
  [[nodiscard]] virtual Device* device() { return nullptr; }

  // A step begins; what an earlier step left behind (an abort, a message nobody took) must not touch it.
  virtual void begin_step() {}

  // Executes the local members' share of one communication, whose sizes fit; throws Error(backend). Called by a node's
  // task: `context` is that of the first local part, for parallel_for and stopping().
  virtual void communicate(const Context& context, const Exchange& exchange) = 0;

  // The step has failed here: wake whoever waits and tell the peers. Called from any thread, at most once a step,
  // before the step ends; must not wait for a node.
  virtual void abort(std::string_view why) noexcept = 0;
};

}  // namespace stepgraph
