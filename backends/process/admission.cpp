#include "backends/process/admission.hpp"

#include <algorithm>
#include <chrono>

#include "backends/process/message.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

using namespace std::chrono_literals;

constexpr std::string_view magic     = "stepgraph meets";
constexpr std::uint32_t protocol     = 1;
constexpr auto time_of_an_attempt    = 2s;   // until the challenge is there
constexpr auto time_of_an_answer     = 10s;  // long: process 0 may be admitting this one
constexpr auto time_between_attempts = 50ms;

// Why an attempt has failed. What process 0 has answered is worth more than how a later attempt was cut short.
struct Problem {
  std::string text = {};
  bool answered    = false;

  void note(const std::string& why, bool answer) {
    if (answered && !answer) return;
    text     = why;
    answered = answer;
  }
};

Bytes with_proof(const Digest& proof, const Bytes& body) { return MessageWriter().raw(proof).raw(body).bytes(); }

// The body, if its proof is right.
std::optional<std::span<const std::byte>> proved(ProofSide side, const Handshake& handshake,
                                                 std::span<const std::byte> message) {
  Digest proof;
  if (message.size() < proof.size()) return std::nullopt;
  std::copy_n(message.begin(), proof.size(), proof.begin());
  const std::span<const std::byte> body = message.subspan(proof.size());
  const Digest right                    = proof_of(side, handshake.key, handshake.client, handshake.server, body);
  if (!equal_in_constant_time(proof, right)) return std::nullopt;
  return body;
}

// One attempt. None: not admitted, and `problem` says why.
std::optional<Connection> attempt(const MeetingPoint& point, int port, const Claim& claim, const Patience& patience,
                                  Problem& problem) {
  const Patience short_one{std::min(patience.deadline, Clock::now() + time_of_an_attempt), patience.interrupt};
  std::string no_socket;
  Descriptor socket = connect_to(point.address, port, point.loopback_only, short_one, no_socket);
  if (!socket.is_open()) {
    problem.note(no_socket, false);
    return std::nullopt;
  }
  Connection connection(std::move(socket), "rendezvous");
  std::string doing = "another program listens there";
  try {
    Handshake handshake{.key = point.key, .client = random_nonce()};
    connection.send(hello_message(ProofSide::client, handshake.client), short_one);
    const std::optional<Nonce> nonce = read_hello(ProofSide::server, connection.receive(short_one));
    if (!nonce) {
      problem.note(doing, false);
      return std::nullopt;
    }
    handshake.server = *nonce;
    doing            = "no answer";
    const Patience longer{std::min(patience.deadline, Clock::now() + time_of_an_answer), patience.interrupt};
    connection.send(handshake.message(claim), longer);
    const std::optional<Answer> answer = handshake.read_answer(connection.receive(longer));
    if (!answer) {
      problem.note("another secret, or another job (STEPGRAPH_SECRET must be the same for all ranks)", true);
      return std::nullopt;
    }
    if (answer->kind == Answer::Kind::admitted) {
      connection.admit("rank 0");
      return connection;
    }
    if (answer->kind == Answer::Kind::ended) throw Error(ErrorKind::config, answer->text);
    problem.note(answer->text, true);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::backend) throw;
    problem.note(str(doing, " (", error.what(), ")"), false);
  }
  return std::nullopt;
}

}  // namespace

std::string_view to_string(Purpose purpose) noexcept {
  switch (purpose) {
    case Purpose::store:
      return "store";
    case Purpose::control:
      return "control";
    case Purpose::peers:
      return "peers";
  }
  return "unknown";
}

Bytes hello_message(ProofSide side, const Nonce& nonce) {
  return MessageWriter().text(magic).number(protocol).number(static_cast<std::uint8_t>(side)).raw(nonce).bytes();
}

std::optional<Nonce> read_hello(ProofSide side, std::span<const std::byte> message) {
  Nonce nonce;
  const Bytes expected = hello_message(side, nonce = {});
  if (message.size() != expected.size()) return std::nullopt;
  const std::size_t front = expected.size() - nonce.size();
  if (!std::equal(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(front), message.begin()))
    return std::nullopt;
  std::copy(message.begin() + static_cast<std::ptrdiff_t>(front), message.end(), nonce.begin());
  return nonce;
}

Bytes Handshake::message(const Claim& claim) const {
  const Bytes body = MessageWriter()
                         .number(static_cast<std::uint8_t>(claim.purpose))
                         .number(claim.rank)
                         .number(claim.size)
                         .text(claim.version)
                         .bytes();
  return with_proof(proof_of(ProofSide::client, key, client, server, body), body);
}

Bytes Handshake::message(const Answer& answer) const {
  const Bytes body = MessageWriter().number(static_cast<std::uint8_t>(answer.kind)).text(answer.text).bytes();
  return with_proof(proof_of(ProofSide::server, key, client, server, body), body);
}

std::optional<Claim> Handshake::read_claim(std::span<const std::byte> message) const {
  const auto body = proved(ProofSide::client, *this, message);
  if (!body) return std::nullopt;
  MessageReader reader(*body);
  Claim claim;
  claim.purpose = static_cast<Purpose>(reader.number<std::uint8_t>());
  claim.rank    = reader.number<int>();
  claim.size    = reader.number<int>();
  claim.version = reader.text();
  return claim;
}

std::optional<Answer> Handshake::read_answer(std::span<const std::byte> message) const {
  const auto body = proved(ProofSide::server, *this, message);
  if (!body) return std::nullopt;
  MessageReader reader(*body);
  Answer answer;
  answer.kind = static_cast<Answer::Kind>(reader.number<std::uint8_t>());
  answer.text = reader.text();
  return answer;
}

Connection join(const MeetingPoint& point, const Claim& claim, const Patience& patience) {
  const auto begin = Clock::now();
  Problem problem, next_problem;
  for (;;) {
    if (std::optional<Connection> one = attempt(point, point.port, claim, patience, problem)) return *std::move(one);
    if (point.next_port_too) {
      if (std::optional<Connection> one = attempt(point, point.port + 1, claim, patience, next_problem))
        return *std::move(one);
    }
    const Deadline again   = std::min(patience.deadline, Clock::now() + time_between_attempts);
    const bool interrupted = !sleep_until(again, patience.interrupt);
    if (!interrupted && Clock::now() < patience.deadline) continue;
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
    throw Error(
        ErrorKind::backend,
        str("rendezvous at ", point.address, ", port ", point.port, ": rank ", claim.rank,
            " has not reached rank 0 in ", waited, " ms: ", interrupted ? patience.interrupt->why() : problem.text,
            point.next_port_too ? str("; port ", point.port + 1, ": ", next_problem.text) : ""));
  }
}

}  // namespace stepgraph
