#pragma once
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backends/process/socket.hpp"
#include "engine/base/error.hpp"
#include "engine/run/peers.hpp"

namespace stepgraph {

struct SocketPeersOptions {
  int process       = 0;
  int num_processes = 1;
  // Without a byte for this long, a call gives up. Control (control.hpp) finds dead processes much earlier and raises
  // `interrupt`. So this is only for processes that live and never come to the call.
  std::chrono::milliseconds silence = std::chrono::minutes(30);
  const Interrupt* interrupt        = nullptr;
  // A connection is broken. The cause may be known elsewhere: returns the text of the error to throw.
  std::function<std::string(int process, const std::string& problem)> explain = {};
};

// Peers over one connection from each process to process 0. Only host data uses it, so large tensors do not delay a
// heartbeat.
class SocketPeers final : public Peers {
 public:
  explicit SocketPeers(SocketPeersOptions options);

  // The connection to another process: process 0 needs all of them, the others that to process 0. Any thread; a call
  // waits for a connection that it needs.
  void connect(int process, Connection connection);

  [[nodiscard]] int process() const noexcept override { return options_.process; }
  [[nodiscard]] int num_processes() const noexcept override { return options_.num_processes; }
  [[nodiscard]] std::vector<Bytes> gather(std::string_view subject, Bytes mine) override;
  [[nodiscard]] Bytes broadcast(std::string_view subject, Bytes of_first) override;

  // The call that waits, and the process that it waits for. Any thread.
  struct Waiting {
    int process         = 0;
    std::string subject = {};
  };
  [[nodiscard]] std::optional<Waiting> waiting() const;

 private:
  struct Header;
  class Note;

  [[nodiscard]] Patience patience() const { return {Clock::now() + options_.silence, options_.interrupt}; }
  [[nodiscard]] Connection& connection_to(int process);
  void send(int process, const Header& header, const Bytes& bytes);
  [[nodiscard]] Header receive_header(int process, const Header& expected);
  [[nodiscard]] Bytes receive(int process, const Header& expected);
  [[noreturn]] void differ(int process, const Header& mine, const Header& other);
  [[noreturn]] void give_up(ErrorKind kind, const std::string& why);
  template <class Call>
  auto guarded(int process, const std::string& subject, const Call& call);

  SocketPeersOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable connected_;
  std::vector<Connection> connections_;  // by process
  std::optional<Waiting> waiting_;
  std::string broken_;  // why no call works any more
};

}  // namespace stepgraph
