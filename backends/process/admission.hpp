#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "backends/process/secret.hpp"
#include "backends/process/socket.hpp"

// How a connection to the rendezvous begins:
//
//   client: hello, with a nonce            server: challenge, with a nonce
//   client: its claim, with a proof        server: its answer, with a proof
//
// Only then does one side act on what the other says. Both proofs are of the secret (secret.hpp).
namespace stepgraph {

// What a connection is for. Each process has one of each.
enum class Purpose : std::uint8_t { store = 1, control = 2, peers = 3 };
[[nodiscard]] std::string_view to_string(Purpose purpose) noexcept;

// What a process says of itself.
struct Claim {
  Purpose purpose     = Purpose::store;
  int rank            = 0;
  int size            = 1;
  std::string version = {};  // of the program
};

struct Answer {
  enum class Kind : std::uint8_t { admitted = 1, refused = 2, ended = 3 };  // ended: there is no job to join any more
  Kind kind        = Kind::admitted;
  std::string text = {};  // why
};

// The messages. Those that read one return none for anything else.
[[nodiscard]] Bytes hello_message(ProofSide side, const Nonce& nonce);
[[nodiscard]] std::optional<Nonce> read_hello(ProofSide side, std::span<const std::byte> message);

struct Handshake {  // what both sides know after the first two messages
  Digest key;
  Nonce client{}, server{};

  [[nodiscard]] Bytes message(const Claim& claim) const;
  [[nodiscard]] Bytes message(const Answer& answer) const;
  [[nodiscard]] std::optional<Claim> read_claim(std::span<const std::byte> message) const;
  [[nodiscard]] std::optional<Answer> read_answer(std::span<const std::byte> message) const;
};

// Where a job meets.
struct MeetingPoint {
  std::string address;
  int port           = 0;
  bool next_port_too = false;  // try both
  Digest key{};
  bool loopback_only = false;
};

// Connects this process to process 0. Tries again until the deadline: process 0 may not listen yet, and another program
// may use the port. Error(backend): it was not admitted by then. Error(config): the job has ended, because this
// process or another one does not fit.
[[nodiscard]] Connection join(const MeetingPoint& point, const Claim& claim, const Patience& patience);

}  // namespace stepgraph
