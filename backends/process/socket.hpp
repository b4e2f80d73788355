#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/partial.hpp"
#include "engine/run/peers.hpp"

// TCP sockets that never block: every wait has a deadline. They are closed on exec, and a closed peer is an error and
// not a signal.
namespace stepgraph {

using Clock    = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Ends the waits of other threads, for good. Any thread.
class Interrupt {
 public:
  Interrupt();
  void raise(const std::string& why) noexcept;  // only the first reason is kept
  [[nodiscard]] bool raised() const noexcept { return raised_; }
  [[nodiscard]] std::string why() const;
  [[nodiscard]] int descriptor() const noexcept { return event_.get(); }  // readable once raised

 private:
  Descriptor event_;
  mutable std::mutex mutex_;
  std::string why_;
  std::atomic<bool> raised_ = false;
};

// How long a call waits, and what ends it earlier.
struct Patience {
  Deadline deadline;
  const Interrupt* interrupt = nullptr;
};

// Frames over a connected socket. A frame is its length in 4 bytes, low byte first, and its bytes. One thread at a
// time.
class Connection {
 public:
  static constexpr std::size_t limit_of_strangers = std::size_t{64} << 10;
  static constexpr std::size_t limit_of_members   = std::size_t{64} << 20;

  Connection() = default;
  // `peer` names the other end in messages. Frames that are longer than `limit` are refused.
  Connection(Descriptor socket, std::string peer, std::size_t limit = limit_of_strangers);

  [[nodiscard]] int descriptor() const noexcept { return socket_.get(); }
  [[nodiscard]] bool is_open() const noexcept { return socket_.is_open(); }
  [[nodiscard]] const std::string& peer() const noexcept { return peer_; }
  void admit(std::string peer);  // a member from now on: another name, and longer frames
  void close() noexcept { socket_ = Descriptor(); }
  void finish() noexcept;  // says that nothing more will be sent

  // Without waiting.
  void queue(std::span<const std::byte> frame);  // for flush()
  [[nodiscard]] bool flush() noexcept;           // sends what the system takes; false: the connection is broken
  [[nodiscard]] bool has_output() const noexcept { return !output_.empty(); }
  [[nodiscard]] bool fill();  // takes what has arrived; false: closed or broken
  [[nodiscard]] std::optional<Bytes>
  next();  // a frame that has arrived; throws Error(backend) for one that is too long

  // Waiting. Throws Error(backend): closed, too late, interrupted, or a frame that is too long.
  void send(std::span<const std::byte> frame, const Patience& patience);
  [[nodiscard]] Bytes receive(const Patience& patience);
  // The same, but returns false as soon as a byte arrives while this end cannot send on.
  [[nodiscard]] bool send_unless_input(std::span<const std::byte> frame, const Patience& patience);

 private:
  [[noreturn]] void fail(std::string_view what) const;
  short wait(short events, const Patience& patience) const;

  Descriptor socket_;
  std::string peer_;
  std::size_t limit_ = limit_of_strangers;
  Bytes input_;
  std::size_t input_begin_ = 0;
  Bytes output_;
  std::size_t output_begin_ = 0;
};

// Waits until one of `events` (POLLIN, POLLOUT) or an error is there. Returns 0 at the deadline, -1 if interrupted.
[[nodiscard]] int wait_for(int descriptor, short events, const Patience& patience);
// Sleeps until then; false: interrupted.
bool sleep_until(Deadline when, const Interrupt* interrupt);

struct ListenOptions {
  std::string address;
  int port           = 0;      // 0: any free port
  bool next_too      = false;  // port + 1 if the port is taken
  bool loopback_only = false;  // another address is an error
};
// A listening socket. An address that this machine does not have (a name for a loopback address, or one that is
// translated on the way) means all its addresses. Error(config): not a loopback address but only those are allowed, or
// a taken port.
[[nodiscard]] Descriptor listen_on(const ListenOptions& options);
// One that was inherited. Error(config) if it does not listen.
[[nodiscard]] Descriptor adopt_listener(int number);
[[nodiscard]] int port_of(int socket);                  // its own
[[nodiscard]] bool is_loopback_peer(int socket);        // whether the other end is on this machine
[[nodiscard]] std::string peer_address_of(int socket);  // "127.0.0.1:4711"
void prepare_socket(int socket);                        // non-blocking, closed on exec, without delay

// A connected socket; tries the addresses of the host once. `problem` gets the reason where none is reached.
[[nodiscard]] Descriptor connect_to(const std::string& host, int port, bool loopback_only, const Patience& patience,
                                    std::string& problem);

// This end's address of a connection, in numbers. Empty: it has none.
[[nodiscard]] std::string own_address_of(int socket);

// Raises the limit of open files to the largest that is allowed: process 0 has some sockets for each process.
void allow_many_files() noexcept;

}  // namespace stepgraph
