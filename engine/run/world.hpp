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

// The `in` or the `out` side of a part, as a whole or, if it holds a shard for every member, shard by shard. It is cut
// as engine/graph/part.hpp says. Sizes were checked when the program was made.
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
  int member;   // the rank's place in the group
  Rank peer;    // permute: the rank it sends to; -1: none
  Rank source;  // permute: the rank it receives from; -1: none
  std::span<const Piece> in;
  std::span<const Piece> out;
  const DeviceQueue* queue = nullptr;  // on a device: the queue for its work
};

// Matched parts: all those whose ranks live in this process.
struct Exchange {
  Graph::PartView what;  // the first local member's
  const GroupSpec& group;
  std::span<const LocalPart> parts;  // by member; for a message: the sender, then the receiver
};

// Where ranks live and how a communication is executed: the interface to networks and devices. Implementations are in
// backends/; users can write others. A world must outlive the programs that use it.
class World {
 public:
  virtual ~World() = default;

  [[nodiscard]] virtual int num_ranks() const          = 0;
  [[nodiscard]] virtual bool is_local(Rank) const      = 0;
  [[nodiscard]] virtual bool waits(LaneKind) const     = 0;  // nodes on such a lane block their thread
  [[nodiscard]] virtual IssueOrder issue_order() const = 0;

  // The device that has the memory of its ranks and runs their work; null: memory and bodies are on the host.
  [[nodiscard]] virtual Device* device() const { return nullptr; }

  // Called before a run. Leftovers of an earlier run (an abort, a message that was not received) must not affect it.
  virtual void begin_step() {}

  // Executes the local members' share of one communication, whose sizes fit; throws Error(backend). Called by a node's
  // task: `context` is that of the first local part, for parallel_for and stopping().
  virtual void communicate(const Context& context, const Exchange& exchange) = 0;

  // The run has failed in this process: wake all threads that wait in communicate(), and tell the peers. Called from
  // any thread, at most once in a run, before the run ends. Must not wait for a node.
  virtual void abort(std::string_view why) noexcept = 0;
};

}  // namespace stepgraph
