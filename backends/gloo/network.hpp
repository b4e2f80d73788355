#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "backends/process/job.hpp"
#include "backends/process/transport.hpp"
#include "backends/process/world.hpp"

namespace gloo::transport {
class Context;
class Device;
class Pair;
class UnboundBuffer;
}  // namespace gloo::transport

namespace stepgraph {

// The addresses that Gloo listens on.
[[nodiscard]] std::shared_ptr<gloo::transport::Device> make_gloo_device(const Job& job);

// Messages by Gloo's TCP transport: one connection between two ranks that exchange messages, and a thread of Gloo that
// reads and writes for all of them. A request is an unbound buffer of Gloo. One rank in each process.
//
// Gloo cannot take back a message: after an interrupted run, all connections are closed and made again.
class GlooNetwork final : public Network {
 public:
  GlooNetwork(Job& job, ProcessWorld::Hooks hooks, std::chrono::milliseconds timeout);
  ~GlooNetwork() override;
  GlooNetwork(const GlooNetwork&)            = delete;
  GlooNetwork& operator=(const GlooNetwork&) = delete;

  [[nodiscard]] Request send(Rank from, Rank to, std::uint64_t key, std::span<const std::byte> bytes) override;
  [[nodiscard]] Request receive(Rank from, Rank to, std::uint64_t key, std::span<std::byte> bytes) override;
  void wait(Request request) override;
  // Larger than usual: each message takes a round trip between the threads of Gloo.
  [[nodiscard]] std::int64_t chunk_bytes() const override { return 1024 * 1024; }

  void connect(const Connections& connections) override;
  void interrupt(Interruption kind, const std::string& why) noexcept override;
  void drop_requests() noexcept override;
  void recover(std::uint64_t generation) override;
  void close() override;

 private:
  using Buffer = gloo::transport::UnboundBuffer;
  struct Message {
    std::unique_ptr<Buffer> buffer;
    bool sends;
    std::thread::id thread;
  };

  void make_context();
  void connect_to(const std::vector<Rank>& peers);
  void prove(Rank peer, const Nonce& mine, const Nonce& theirs);
  void close_pairs() noexcept;
  [[nodiscard]] Request post(bool sends, Rank peer, std::uint64_t key, void* data, std::size_t size);
  void throw_if_interrupted() const;  // with mutex_
  [[noreturn]] void fail(Rank peer, const std::string& problem);

  Job& job_;
  const ProcessWorld::Hooks hooks_;
  const std::chrono::milliseconds timeout_;
  const Digest key_;  // of the job
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  std::uint64_t generation_ = 0;

  mutable std::mutex mutex_;
  std::set<Rank> peers_;                          // that are connected, or will be by recover()
  std::map<Rank, gloo::transport::Pair*> pairs_;  // of context_
  std::unordered_map<std::uint64_t, Message> messages_;
  std::uint64_t last_ = 0;
  std::optional<std::string> why_;                                        // interrupted
  std::unique_ptr<Interrupt> interrupt_ = std::make_unique<Interrupt>();  // the same, for waits at the store
  bool failed_                          = false;                          // for good
};

}  // namespace stepgraph
