#pragma once
#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/process/environment.hpp"
#include "backends/process/socket.hpp"

// Processes of a job as threads of one process.
namespace stepgraph::testing {

// Long enough for a slow machine. Tests that pass do not wait for it.
inline Patience patient(const Interrupt* interrupt = nullptr) {
  return {Clock::now() + std::chrono::seconds(30), interrupt};
}
inline Patience brief(std::chrono::milliseconds time) { return {Clock::now() + time, nullptr}; }

// Two ends of a connection between members of a job.
inline std::pair<Connection, Connection> connected_pair() {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) throw std::runtime_error("no socket pair");
  return {Connection(Descriptor(sockets[0]), "peer", Connection::limit_of_members),
          Connection(Descriptor(sockets[1]), "peer", Connection::limit_of_members)};
}

// What a call throws; empty: nothing.
template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// The processes of a job on this machine, with a listening socket that process 0 inherits.
struct Places {
  explicit Places(int num) : size(num) {
    Descriptor socket = listen_on({.address = "127.0.0.1"});
    port              = port_of(socket.get());
    listener          = socket.release();
  }
  [[nodiscard]] ProcessPlace of(int rank) const {
    ProcessPlace place{.rank = rank, .size = size, .local_rank = rank, .local_size = size, .address = "127.0.0.1"};
    place.port      = port;
    place.secret    = "secret";
    place.listen_fd = rank == 0 ? listener : -1;
    return place;
  }
  int size, port = 0, listener = -1;
};

// Calls `body(process)` on a thread for each process. Returns what each has thrown; empty: nothing.
inline std::vector<std::string> run_processes(int size, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int process = 0; process < size; ++process) {
    threads.emplace_back(
        [&, process] { errors[static_cast<std::size_t>(process)] = error_of([&] { body(process); }); });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Waits until it holds; false after a long time.
template <class Condition>
bool eventually(const Condition& holds) {
  const Deadline until = Clock::now() + std::chrono::seconds(30);
  while (!holds()) {
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace stepgraph::testing
