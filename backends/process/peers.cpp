#include "backends/process/peers.hpp"

#include <algorithm>
#include <cstdint>

#include "backends/process/message.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t piece_bytes = std::size_t{4} << 20;  // of a frame: a wait lasts no longer than one piece takes

enum class Kind : std::uint8_t { gather = 1, broadcast = 2, failed = 3 };

std::string_view name_of(Kind kind) { return kind == Kind::gather ? "gather" : "broadcast"; }

}  // namespace

// The first frame of each call. The bytes follow in frames of at most piece_bytes.
struct SocketPeers::Header {
  Kind kind;
  std::string subject;     // of a failure: its text
  std::uint64_t size = 0;  // of a failure: its kind

  [[nodiscard]] Bytes bytes() const {
    return MessageWriter().number(static_cast<std::uint8_t>(kind)).number(size).text(subject).bytes();
  }
  [[nodiscard]] static Header read(const Bytes& frame) {
    MessageReader reader(frame);
    Header header{};
    header.kind    = static_cast<Kind>(reader.number<std::uint8_t>());
    header.size    = reader.number<std::uint64_t>();
    header.subject = reader.text();
    return header;
  }
};

SocketPeers::SocketPeers(SocketPeersOptions options)
    : options_(std::move(options)), connections_(static_cast<std::size_t>(options_.num_processes)) {}

void SocketPeers::connect(int process, Connection connection) {
  const std::lock_guard lock(mutex_);
  connections_.at(static_cast<std::size_t>(process)) = std::move(connection);
  connected_.notify_all();
}

Connection& SocketPeers::connection_to(int process) {
  std::unique_lock lock(mutex_);
  Connection& connection = connections_.at(static_cast<std::size_t>(process));
  const Patience until   = patience();
  while (!connection.is_open()) {
    if (until.interrupt != nullptr && until.interrupt->raised())
      throw Error(ErrorKind::backend, until.interrupt->why());
    const Deadline now = Clock::now();
    if (now >= until.deadline) throw Error(ErrorKind::backend, "has not connected in time");
    connected_.wait_until(lock, std::min(until.deadline, now + 20ms));  // an interrupt does not notify
  }
  return connection;  // never moved once it is there
}

// Calls end here when they fail: later calls fail likewise. Process 0 tells all the others.
void SocketPeers::give_up(ErrorKind kind, const std::string& why) {
  broken_             = why;
  const Bytes message = Header{Kind::failed, why, static_cast<std::uint64_t>(kind)}.bytes();
  {
    const std::lock_guard lock(mutex_);
    for (Connection& connection : connections_) {
      if (!connection.is_open()) continue;
      connection.queue(message);
      static_cast<void>(connection.flush());  // what fits: a peer that reads nothing is not waited for
    }
  }
  throw Error(kind, why);
}

void SocketPeers::differ(int process, const Header& mine, const Header& other) {
  if (other.kind == Kind::failed) give_up(static_cast<ErrorKind>(other.size), other.subject);
  give_up(ErrorKind::config, str("processes ", options_.process, " and ", process, ": one calls ", name_of(mine.kind),
                                 " of '", mine.subject, "', the other ", name_of(other.kind), " of '", other.subject,
                                 "' (the same calls in the same order)"));
}

std::optional<SocketPeers::Waiting> SocketPeers::waiting() const {
  const std::lock_guard lock(mutex_);
  return waiting_;
}

// Notes a wait while it lives.
class SocketPeers::Note {
 public:
  Note(SocketPeers& peers, Waiting waiting) : peers_(peers) { set(std::move(waiting)); }
  ~Note() { set(std::nullopt); }
  Note(const Note&)            = delete;
  Note& operator=(const Note&) = delete;

 private:
  void set(std::optional<Waiting> waiting) {
    const std::lock_guard lock(peers_.mutex_);
    peers_.waiting_ = std::move(waiting);
  }
  SocketPeers& peers_;
};

// Adds the name of the process, and what is known about it, to errors of its connection.
template <class Call>
auto SocketPeers::guarded(int process, const std::string& subject, const Call& call) {
  if (!broken_.empty()) throw Error(ErrorKind::backend, broken_);
  const Note note(*this, {process, subject});
  std::string problem;
  try {
    return call();
  } catch (const Error& error) {
    if (!broken_.empty()) throw;
    problem = str("process ", process, ": ", error.what());
  }
  if (options_.interrupt != nullptr && options_.interrupt->raised())
    give_up(ErrorKind::backend, options_.interrupt->why());
  give_up(ErrorKind::backend, options_.explain ? options_.explain(process, problem) : problem);
}

// Process 0 sends nothing while it takes part in a gather. If it does, it has failed.
void SocketPeers::send(int process, const Header& header, const Bytes& bytes) {
  guarded(process, header.subject, [&] {
    Connection& connection = connection_to(process);
    bool sent              = connection.send_unless_input(header.bytes(), patience());
    for (std::size_t begin = 0; sent && begin < bytes.size(); begin += piece_bytes) {
      const std::size_t size = std::min(piece_bytes, bytes.size() - begin);
      sent                   = connection.send_unless_input(std::span(bytes).subspan(begin, size), patience());
    }
    if (!sent) differ(process, header, Header::read(connection.receive(patience())));
  });
}

SocketPeers::Header SocketPeers::receive_header(int process, const Header& expected) {
  return guarded(process, expected.subject, [&] {
    const Header header = Header::read(connection_to(process).receive(patience()));
    if (header.kind != expected.kind || header.subject != expected.subject) differ(process, expected, header);
    return header;
  });
}

Bytes SocketPeers::receive(int process, const Header& expected) {
  const Header header = receive_header(process, expected);
  return guarded(process, expected.subject, [&] {
    Connection& connection = connection_to(process);
    Bytes bytes;
    while (bytes.size() < header.size) {
      const Bytes piece = connection.receive(patience());
      bytes.insert(bytes.end(), piece.begin(), piece.end());
    }
    return bytes;
  });
}

std::vector<Bytes> SocketPeers::gather(std::string_view subject, Bytes mine) {
  const Header header{Kind::gather, std::string(subject), mine.size()};
  std::vector<Bytes> all;
  if (options_.process != 0) {
    send(0, header, mine);
    return all;
  }
  all.push_back(std::move(mine));
  for (int process = 1; process < options_.num_processes; ++process) all.push_back(receive(process, header));
  return all;
}

// All announce the call to process 0. So process 0 sees every call of every process, and finds a difference.
Bytes SocketPeers::broadcast(std::string_view subject, Bytes of_first) {
  Header header{Kind::broadcast, std::string(subject), of_first.size()};
  if (options_.process != 0) {
    header.size = 0;
    send(0, header, {});
    return receive(0, header);
  }
  for (int process = 1; process < options_.num_processes; ++process) static_cast<void>(receive_header(process, header));
  for (int process = 1; process < options_.num_processes; ++process) send(process, header, of_first);
  return of_first;
}

}  // namespace stepgraph
