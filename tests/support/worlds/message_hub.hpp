#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "backends/process/message_exchange.hpp"
#include "engine/run/world.hpp"

namespace stepgraph::testing {

// Delivers the messages of all processes of a world, which are threads here. Messages arrive in random order, some of
// them late. All members are thread-safe.
class MessageHub {
 public:
  explicit MessageHub(int num_ranks, std::uint64_t seed = 1);
  ~MessageHub();
  MessageHub(const MessageHub&)            = delete;
  MessageHub& operator=(const MessageHub&) = delete;

  [[nodiscard]] int num_ranks() const noexcept { return num_ranks_; }
  [[nodiscard]] std::uint32_t number_of(const GroupSpec& group);  // equal in all processes

  using Id = std::uint64_t;  // of a message that was posted
  struct Address {
    Rank from, to;
    std::uint64_t key;
    friend auto operator<=>(const Address&, const Address&) = default;
  };
  struct Message {
    Address address;
    std::uint64_t run;
    bool sends;
    std::byte* data;
    std::size_t size;
  };
  [[nodiscard]] Id post(const Message& message);
  void wait(Id request);
  void fail(std::uint64_t run, std::string_view why);
  // Removes the messages that ranks have posted in earlier runs: none of them is delivered any more.
  void forget(const RankSet& ranks, std::uint64_t before_run);
  [[nodiscard]] std::size_t num_left();  // messages that were posted and not delivered

 private:
  struct Entry {
    Message message;
    Id other         = 0;  // 0: not met yet
    bool done        = false;
    std::string flaw = {};
  };
  void deliver();

  int num_ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::map<Id, Entry> entries_;
  std::map<std::pair<Address, bool>, Id> waiting_;  // not met yet
  std::vector<Id> met_;                             // sends that are to be delivered
  std::map<std::uint64_t, std::string> failed_;     // by run
  std::map<std::pair<std::string, RankList>, std::uint32_t> numbers_;
  Id last_   = 0;
  bool stop_ = false;
  std::thread thread_;
};

// One process of a world that exchanges by messages: the collectives of process worlds, without processes.
class MessageHubWorld : public World {
 public:
  MessageHubWorld(MessageHub& hub, RankSet ranks, Peers* peers = nullptr)
      : hub_(hub), ranks_(std::move(ranks)), peers_(peers), transport_(*this) {}

  [[nodiscard]] int num_ranks() const override { return hub_.num_ranks(); }
  [[nodiscard]] RankSet local_ranks() const override { return ranks_; }
  [[nodiscard]] bool waits(LaneKind kind) const override;
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  [[nodiscard]] std::vector<std::uint32_t> prepare(const Graph& graph, std::span<const Communicator> groups) override;
  [[nodiscard]] Peers* peers() override { return peers_; }
  void begin_step(std::shared_ptr<const RunView>) override { hub_.forget(ranks_, ++run_); }
  void communicate(const Context&, const Exchange& exchange) override {
    exchange_by_messages(exchange, transport_, run_);
  }
  void abort(std::string_view why) noexcept override { hub_.fail(run_, why); }

 private:
  class HubTransport final : public Transport {
   public:
    explicit HubTransport(MessageHubWorld& world) : world_(world) {}
    Request send(Rank from, Rank to, std::uint64_t key, std::span<const std::byte> bytes) override {
      return {post(from, to, key, true, const_cast<std::byte*>(bytes.data()), bytes.size()), to};
    }
    Request receive(Rank from, Rank to, std::uint64_t key, std::span<std::byte> bytes) override {
      return {post(from, to, key, false, bytes.data(), bytes.size()), from};
    }
    void wait(Request request) override { world_.hub_.wait(request.id); }

   private:
    std::uint64_t post(Rank from, Rank to, std::uint64_t key, bool sends, std::byte* data, std::size_t size) {
      return world_.hub_.post({{from, to, key}, world_.run_, sends, data, size});
    }
    MessageHubWorld& world_;
  };

  MessageHub& hub_;
  RankSet ranks_;
  Peers* peers_;
  std::uint64_t run_ = 0;  // written between runs only
  HubTransport transport_;
};

}  // namespace stepgraph::testing
