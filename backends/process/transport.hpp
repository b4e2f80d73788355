#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "backends/process/links.hpp"
#include "engine/base/types.hpp"

namespace stepgraph {

// Messages between ranks of different processes. A key tells the messages between two ranks apart: of those under way
// at one time, no two have the same key. Functions are called from several threads at once.
class Transport {
 public:
  virtual ~Transport() = default;

  struct Request {
    std::uint64_t id = 0;
    Rank peer{-1};  // the other end
  };
  // Both return at once. The bytes must stay, and those of a send must not change, until wait() has returned.
  [[nodiscard]] virtual Request send(Rank from, Rank to, std::uint64_t key, std::span<const std::byte> bytes) = 0;
  [[nodiscard]] virtual Request receive(Rank from, Rank to, std::uint64_t key, std::span<std::byte> bytes)    = 0;

  // Returns when the request is done. Once for each request, and not after an error. Throws Error(backend) if the run
  // was aborted or a peer has failed.
  virtual void wait(Request request) = 0;

  // Exchanges cut what they send into messages of this size: a multiple of every element size, equal in all processes.
  [[nodiscard]] virtual std::int64_t chunk_bytes() const { return 256 * 1024; }
};

// A key: the communicator's number, the run modulo 16, whether it is a message (or a collective), the turn, and the
// step within the operation.
struct MessageKey {
  static constexpr int communicator_bits = 16, run_bits = 4, turn_bits = 23, step_bits = 20;

  std::uint32_t communicator = 0;
  std::uint32_t run          = 0;
  bool is_message            = false;
  std::uint32_t turn         = 0;
  std::uint32_t step         = 0;

  [[nodiscard]] constexpr std::uint64_t packed() const noexcept {
    std::uint64_t bits = communicator;
    bits               = bits << run_bits | run;
    bits               = bits << 1 | (is_message ? 1 : 0);
    bits               = bits << turn_bits | turn;
    return bits << step_bits | step;
  }
  [[nodiscard]] static constexpr MessageKey unpacked(std::uint64_t bits) noexcept {
    const auto take = [&bits](int count) {
      const auto low = static_cast<std::uint32_t>(bits & ((std::uint64_t{1} << count) - 1));
      bits >>= count;
      return low;
    };
    MessageKey key;
    key.step         = take(step_bits);
    key.turn         = take(turn_bits);
    key.is_message   = take(1) != 0;
    key.run          = take(run_bits);
    key.communicator = take(communicator_bits);
    return key;
  }
};

// The network of a world of processes that exchange messages.
class Network : public Transport, public Links {
 public:
  // Ends the requests that the calling thread has made and not waited for. Their memory is not used any more when it
  // returns. Only after an error.
  virtual void drop_requests() noexcept = 0;
};

}  // namespace stepgraph
