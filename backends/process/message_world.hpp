#pragma once
#include <functional>
#include <memory>
#include <utility>

#include "backends/process/transport.hpp"
#include "backends/process/world.hpp"

namespace stepgraph {

// A world of processes that exchange messages: what the worlds of MPI and Gloo have in common. Communications are
// exchanges of messages over a Network (backends/process/message_exchange.hpp). Keys of messages name communicator, run
// and turn, so parts can be issued in any order.
class MessageWorld : public ProcessWorld {
 public:
  using MakeNetwork = std::function<std::unique_ptr<Network>(Job& job, Hooks hooks)>;

  // As those of ProcessWorld.
  MessageWorld(const ProcessPlace& place, int num_ranks, RankSet ranks, ProcessWorldOptions options,
               const MakeNetwork& make_network);
  MessageWorld(const ProcessPlace& place, ProcessWorldOptions options, const MakeNetwork& make_network)
      : MessageWorld(place, place.size, Rank{place.rank}, std::move(options), make_network) {}

  [[nodiscard]] bool waits(LaneKind kind) const override { return is_for_parts(kind) || kind == LaneKind::disk; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  void communicate(const Context& context, const Exchange& exchange) override;

 private:
  Network& network_;  // the links of the base
};

}  // namespace stepgraph
