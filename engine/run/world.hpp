#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/issue_order.hpp"

namespace stepgraph {

class Device;           // engine/run/device.hpp
class Peers;            // engine/run/peers.hpp
class RunView;          // engine/run/run_view.hpp
struct DeviceQueue;     // engine/run/device.hpp
struct WorkspaceNeeds;  // engine/plan/workspaces.hpp

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

// Matched parts: all those whose ranks live in this process. Communicator and turn name the communication within a run,
// on every process alike: two groups of the same ranks never mix.
struct Exchange {
  Graph::PartView what;  // the first local member's
  const GroupSpec& group;
  std::uint32_t communicator;  // the group's number from World::prepare
  std::uint32_t turn;  // k: the group's k-th operation of a run; for a message, the k-th from sender to receiver
  std::span<const LocalPart> parts;  // by member; for a message: the sender, then the receiver
};

// A group of a program that has operations.
struct Communicator {
  const GroupSpec& group;
  std::uint32_t num_operations;  // of this process in a run, messages included
};

// Lanes for collectives and messages. Worlds of processes wait on these. Worlds without a device wait on disk lanes.
[[nodiscard]] bool is_for_parts(LaneKind kind) noexcept;

// Where ranks live and how a communication is executed: the interface to networks and devices. Implementations are in
// backends/; users can write others. A world must outlive the programs that use it.
class World {
 public:
  virtual ~World() = default;

  [[nodiscard]] virtual int num_ranks() const = 0;
  // The ranks that live in this process. A program has the nodes of these ranks and of no others.
  [[nodiscard]] virtual RankSet local_ranks() const { return RankSet::all(num_ranks()); }
  [[nodiscard]] bool is_local(Rank rank) const { return local_ranks().contains(rank); }
  [[nodiscard]] virtual bool waits(LaneKind) const     = 0;  // nodes on such a lane block their thread
  [[nodiscard]] virtual IssueOrder issue_order() const = 0;
  // Whether reductions have the bits of sums in group order. False: they agree within a tolerance.
  [[nodiscard]] virtual bool reduces_in_order() const { return true; }

  // The device that has the memory of its ranks and runs their work; null: memory and bodies are on the host.
  [[nodiscard]] virtual Device* device() const { return nullptr; }

  // The most bytes of its queue's workspace that communicate() uses for a part of a graph. The memory plan counts them.
  // The needs of parts that a rank issues together on one lane add up.
  [[nodiscard]] virtual std::int64_t part_workspace(const Graph& graph, Node part) const {
    static_cast<void>(graph), static_cast<void>(part);
    return 0;
  }

  // Called when a program is made, with its groups in the order of their names. Groups of the same ranks have different
  // names: else the program was refused. A world of several processes makes its communicators here: all processes make
  // the same programs in the same order. Returns a number for each group, which its exchanges will have. Throws
  // Error(config) for a program that the world cannot run.
  [[nodiscard]] virtual std::vector<std::uint32_t> prepare(const Graph& graph, std::span<const Communicator> groups);

  // Host data between the processes of this world; null: this process has all ranks.
  [[nodiscard]] virtual Peers* peers() { return nullptr; }

  // Called before a run. Leftovers of an earlier run (an abort, a message that was not received) must not affect it.
  // All processes run the same programs in the same order, also where a process has no nodes in one of them: so the
  // number of a run, a communicator and a turn name a communication in all of them. A world can keep `run`, for
  // heartbeats and reports, until end_step.
  virtual void begin_step(std::shared_ptr<const RunView> run) { static_cast<void>(run); }
  // Nothing of the run goes on any more, or the engine has given up a device that does not finish. Called once for each
  // begin_step that returned, except for a run in which a body never returns. After a body that outlasted the drain
  // time-out, it is called by the next Executor::start.
  virtual void end_step() noexcept {}

  // Executes the local members' share of one communication, whose sizes fit; throws Error(backend). Called by a node's
  // task: `context` is that of the first local part, for parallel_for and stopping().
  virtual void communicate(const Context& context, const Exchange& exchange) = 0;

  // Whether parts that a rank issues together, with equal issue positions, are one task and reach the world in one
  // call.
  [[nodiscard]] virtual bool batches() const { return false; }

  // Executes several communications that this process issues together. `context` is that of the first part.
  virtual void communicate_batch(const Context& context, std::span<const Exchange> batch);

  // Why no run can go on: a peer has failed. None: all is well. Asked from any thread while a run is under way; the run
  // then stops with Error(backend). Must not wait.
  [[nodiscard]] virtual std::optional<std::string> failure() const { return std::nullopt; }

  // The run has failed in this process: wake all threads that wait in communicate(), and tell the peers. Called from
  // any thread, at most once in a run, before the run ends. Must not wait, neither for a node nor for a peer: threads
  // that ask about the run wait meanwhile.
  virtual void abort(std::string_view why) noexcept = 0;
};

// The least memory that a rank of this process has on its device; 0: not known, or the ranks are on the host.
[[nodiscard]] std::int64_t device_memory_bytes(const World& world);

// The workspace that nodes need in a world: none without a device. It refers to the world, which must outlive it.
[[nodiscard]] WorkspaceNeeds workspace_needs(const World& world);

}  // namespace stepgraph
