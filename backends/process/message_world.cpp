#include "backends/process/message_world.hpp"

#include "backends/process/message_exchange.hpp"
#include "engine/run/context.hpp"

namespace stepgraph {
namespace {

// Notes the rank that the thread of a node waits for.
class Watched final : public Transport {
 public:
  Watched(Network& network, const Context& context) : network_(network), context_(context) {}

  [[nodiscard]] Request send(Rank from, Rank to, std::uint64_t key, std::span<const std::byte> bytes) override {
    return network_.send(from, to, key, bytes);
  }
  [[nodiscard]] Request receive(Rank from, Rank to, std::uint64_t key, std::span<std::byte> bytes) override {
    return network_.receive(from, to, key, bytes);
  }
  [[nodiscard]] std::int64_t chunk_bytes() const override { return network_.chunk_bytes(); }
  void wait(Request request) override {
    context_.waiting_for(request.peer);
    network_.wait(request);
    context_.waiting_for(Rank{-1});
  }

 private:
  Network& network_;
  const Context& context_;
};

}  // namespace

MessageWorld::MessageWorld(const ProcessPlace& place, int num_ranks, RankSet ranks, ProcessWorldOptions options,
                           const MakeNetwork& make_network)
    : ProcessWorld(place, num_ranks, std::move(ranks), std::move(options), make_network),
      network_(dynamic_cast<Network&>(links())) {}

void MessageWorld::communicate(const Context& context, const Exchange& exchange) {
  Watched transport(network_, context);
  try {
    exchange_by_messages(exchange, transport, run());
  } catch (...) {
    network_.drop_requests();
    throw;
  }
}

}  // namespace stepgraph
