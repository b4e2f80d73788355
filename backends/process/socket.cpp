#include "backends/process/socket.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "backends/process/environment.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

constexpr std::size_t header_bytes = 4;
constexpr std::size_t read_bytes   = std::size_t{64} << 10;
constexpr int most_reads = 32;  // of one fill(): a fast sender must not keep its reader from other connections

// poll() rounds up, so that a wait never ends before its deadline.
int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1 << 30));
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Addresses resolve(const std::string& host, int port, bool passive, std::string& problem) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags    = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  addrinfo* list    = nullptr;
  const int failed  = ::getaddrinfo(host.empty() ? nullptr : host.c_str(), str(port).c_str(), &hints, &list);
  if (failed != 0) problem = failed == EAI_SYSTEM ? system_reason(errno) : ::gai_strerror(failed);
  return Addresses(failed == 0 ? list : nullptr);
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_UNIX) return true;
  if (address->sa_family == AF_INET) {
    const auto* four = reinterpret_cast<const sockaddr_in*>(address);
    return ntohl(four->sin_addr.s_addr) >> 24 == 127;
  }
  if (address->sa_family != AF_INET6) return false;
  const auto* six = reinterpret_cast<const sockaddr_in6*>(address);
  return IN6_IS_ADDR_LOOPBACK(&six->sin6_addr) ||
         (IN6_IS_ADDR_V4MAPPED(&six->sin6_addr) && six->sin6_addr.s6_addr[12] == 127);
}

sockaddr* as_address(sockaddr_storage& storage) { return reinterpret_cast<sockaddr*>(&storage); }

// A connection to a free port of this machine can get that port as its own, and then meets itself.
bool is_connected_to_itself(int socket) {
  sockaddr_storage own{}, peer{};
  socklen_t own_length = sizeof own, peer_length = sizeof peer;
  return ::getsockname(socket, as_address(own), &own_length) == 0 &&
         ::getpeername(socket, as_address(peer), &peer_length) == 0 && own_length == peer_length &&
         std::memcmp(&own, &peer, own_length) == 0;
}

// Listens on one address. On failure errno says why.
Descriptor listen_at(const addrinfo& at) {
  Descriptor socket(::socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open()) return {};
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // ports of connections that ended are free
  if (::bind(socket.get(), at.ai_addr, at.ai_addrlen) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
    const int why = errno;
    socket        = Descriptor();
    errno         = why;
  }
  return socket;
}

// Tries the addresses of a host. A host's name can mean a loopback address on the host itself (Debian's /etc/hosts).
// The other machines cannot reach that one.
Descriptor listen_at_first(const ListenOptions& options, int port, int& why) {
  std::string problem;
  const Addresses list = resolve(options.address, port, true, problem);
  if (!list) {
    throw Error(ErrorKind::config, str("rendezvous address '", options.address, "': ", problem,
                                       " (a name or an address of this machine)"));
  }
  const bool loopback = options.loopback_only || is_loopback_name(options.address);
  why                 = EADDRNOTAVAIL;
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
    if (is_loopback(at->ai_addr) != loopback) continue;
    Descriptor socket = listen_at(*at);
    if (socket.is_open()) return socket;
    why = errno;
  }
  return {};
}

}  // namespace

Interrupt::Interrupt() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_.is_open()) throw Error(ErrorKind::backend, str("eventfd: ", system_reason(errno)));
}

void Interrupt::raise(const std::string& why) noexcept {
  const std::lock_guard lock(mutex_);
  if (raised_) return;
  why_                    = why;
  raised_                 = true;
  const std::uint64_t one = 1;
  static_cast<void>(!::write(event_.get(), &one, sizeof one));
}

std::string Interrupt::why() const {
  const std::lock_guard lock(mutex_);
  return why_;
}

int wait_for(int descriptor, short events, const Patience& patience) {
  std::array<pollfd, 2> polled{pollfd{descriptor, events, 0},
                               pollfd{patience.interrupt ? patience.interrupt->descriptor() : -1, POLLIN, 0}};
  for (;;) {
    const int ready = ::poll(polled.data(), polled.size(), milliseconds_until(patience.deadline));
    if (ready < 0 && errno != EINTR) throw Error(ErrorKind::backend, str("poll: ", system_reason(errno)));
    if (ready > 0 && polled[0].revents != 0) return polled[0].revents;
    if (ready > 0) return -1;
    if (Clock::now() >= patience.deadline) return 0;
  }
}

bool sleep_until(Deadline when, const Interrupt* interrupt) { return wait_for(-1, 0, {when, interrupt}) == 0; }

Connection::Connection(Descriptor socket, std::string peer, std::size_t limit)
    : socket_(std::move(socket)), peer_(std::move(peer)), limit_(limit) {
  prepare_socket(socket_.get());
}

void Connection::admit(std::string peer) {
  peer_  = std::move(peer);
  limit_ = limit_of_members;
}

void Connection::finish() noexcept { ::shutdown(socket_.get(), SHUT_WR); }

void Connection::fail(std::string_view what) const { throw Error(ErrorKind::backend, str(peer_, ": ", what)); }

void Connection::queue(std::span<const std::byte> frame) {
  for (std::size_t i = 0; i < header_bytes; ++i) output_.push_back(static_cast<std::byte>(frame.size() >> (8 * i)));
  output_.insert(output_.end(), frame.begin(), frame.end());
}

bool Connection::flush() noexcept {
  while (output_begin_ < output_.size()) {
    const ssize_t done =
        ::send(socket_.get(), output_.data() + output_begin_, output_.size() - output_begin_, MSG_NOSIGNAL);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    output_begin_ += static_cast<std::size_t>(done);
  }
  output_.clear();
  output_begin_ = 0;
  return true;
}

bool Connection::fill() {
  if (input_begin_ > 0) {
    input_.erase(input_.begin(), input_.begin() + static_cast<std::ptrdiff_t>(input_begin_));
    input_begin_ = 0;
  }
  for (int i = 0; i < most_reads; ++i) {
    const std::size_t size = input_.size();
    input_.resize(size + read_bytes);
    const ssize_t done = ::recv(socket_.get(), input_.data() + size, read_bytes, 0);
    const int why      = errno;
    input_.resize(size + static_cast<std::size_t>(std::max<ssize_t>(done, 0)));
    if (done < 0 && why == EINTR) continue;
    if (done < 0) return why == EAGAIN || why == EWOULDBLOCK;
    if (done == 0) return false;
    if (static_cast<std::size_t>(done) < read_bytes) return true;
  }
  return true;
}

std::optional<Bytes> Connection::next() {
  const std::span<const std::byte> bytes = std::span(input_).subspan(input_begin_);
  if (bytes.size() < header_bytes) return std::nullopt;
  std::size_t size = 0;
  for (std::size_t i = header_bytes; i-- > 0;) size = size << 8 | static_cast<std::size_t>(bytes[i]);
  if (size > limit_) fail(str("a frame of ", size, " bytes (at most ", limit_, ")"));
  if (bytes.size() - header_bytes < size) return std::nullopt;
  input_begin_ += header_bytes + size;
  const std::span<const std::byte> frame = bytes.subspan(header_bytes, size);
  return Bytes(frame.begin(), frame.end());
}

short Connection::wait(short events, const Patience& patience) const {
  const int ready = wait_for(socket_.get(), events, patience);
  if (ready == 0) fail("no answer in time");
  if (ready < 0) fail(patience.interrupt->why());
  return static_cast<short>(ready);
}

void Connection::send(std::span<const std::byte> frame, const Patience& patience) {
  queue(frame);
  for (;;) {
    if (!flush()) fail("the connection is closed");
    if (!has_output()) return;
    wait(POLLOUT, patience);
  }
}

bool Connection::send_unless_input(std::span<const std::byte> frame, const Patience& patience) {
  queue(frame);
  for (;;) {
    if (!flush()) return false;  // a reason may have arrived before the connection was closed
    if (!has_output()) return true;
    if ((wait(POLLOUT | POLLIN, patience) & POLLOUT) == 0) return false;
  }
}

Bytes Connection::receive(const Patience& patience) {
  for (;;) {
    if (std::optional<Bytes> frame = next()) return *std::move(frame);
    wait(POLLIN, patience);
    if (!fill()) {
      if (std::optional<Bytes> frame = next()) return *std::move(frame);
      fail("the connection is closed");
    }
  }
}

void prepare_socket(int socket) {
  ::fcntl(socket, F_SETFD, ::fcntl(socket, F_GETFD) | FD_CLOEXEC);
  ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // fails on other kinds of sockets
}

Descriptor listen_on(const ListenOptions& options) {
  int why = 0;
  for (int port = options.port; port <= options.port + (options.next_too ? 1 : 0); ++port) {
    Descriptor socket = listen_at_first(options, port, why);
    if (socket.is_open()) return socket;
    // The name of this machine, known here only as a loopback address: listen on all. The secret protects the job.
    if (why == EADDRNOTAVAIL && !options.loopback_only && !is_loopback_name(options.address)) {
      ListenOptions any = options;
      any.address.clear();
      socket = listen_at_first(any, port, why);
      if (socket.is_open()) return socket;
    }
    if (why == EADDRNOTAVAIL && options.loopback_only) {
      throw Error(ErrorKind::config,
                  str("rendezvous address '", options.address,
                      "': is not a loopback address, and the job has no secret (set STEPGRAPH_SECRET "
                      "to the same text for all ranks)"));
    }
    if (why != EADDRINUSE) break;
  }
  throw Error(ErrorKind::config, str("rendezvous address ", options.address, ", port ", options.port,
                                     options.next_too ? " and the next" : "", ": ", system_reason(why),
                                     why == EADDRINUSE ? " (another port, with STEPGRAPH_PORT)" : ""));
}

Descriptor adopt_listener(int number) {
  int listens      = 0;
  socklen_t length = sizeof listens;
  if (::getsockopt(number, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0)
    throw Error(ErrorKind::config, str("STEPGRAPH_LISTEN_FD: ", number, " is not a listening socket"));
  prepare_socket(number);
  return Descriptor(number);
}

int port_of(int socket) {
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  if (::getsockname(socket, as_address(own), &length) != 0) return 0;
  if (own.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(own).sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in&>(own).sin_port);
}

bool is_loopback_peer(int socket) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  return ::getpeername(socket, as_address(peer), &length) == 0 && is_loopback(as_address(peer));
}

std::string peer_address_of(int socket) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  std::array<char, 64> host{}, port{};
  if (::getpeername(socket, as_address(peer), &length) != 0 ||
      ::getnameinfo(as_address(peer), length, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "unknown address";
  return str(host.data(), ":", port.data());
}

Descriptor connect_to(const std::string& host, int port, bool loopback_only, const Patience& patience,
                      std::string& problem) {
  const Addresses list = resolve(host, port, false, problem);
  if (!list) return {};
  bool refused = true;
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
    if (loopback_only && !is_loopback(at->ai_addr)) continue;
    refused = false;
    Descriptor socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.is_open()) {
      problem = system_reason(errno);
      continue;
    }
    int why = ::connect(socket.get(), at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
    if (why == EINPROGRESS || why == EINTR) {
      const int ready = wait_for(socket.get(), POLLOUT, patience);
      socklen_t size  = sizeof why;
      if (ready == 0) why = ETIMEDOUT;
      if (ready < 0) why = ECANCELED;
      if (ready > 0) ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &why, &size);
    }
    if (why == 0 && is_connected_to_itself(socket.get())) why = ECONNREFUSED;
    if (why == 0) return socket;
    problem = system_reason(why);
  }
  if (refused) {
    throw Error(ErrorKind::config,
                str("rendezvous address '", host,
                    "': is not a loopback address, and the job has no secret (set STEPGRAPH_SECRET to "
                    "the same text for all ranks)"));
  }
  return {};
}

std::string own_address_of(int socket) {
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  std::array<char, 64> text{};
  if (::getsockname(socket, as_address(own), &length) != 0 ||
      ::getnameinfo(as_address(own), length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0)
    return {};
  constexpr std::string_view mapped = "::ffff:";  // IPv4 at a socket of IPv6
  const std::string_view address    = text.data();
  return std::string(address.starts_with(mapped) ? address.substr(mapped.size()) : address);
}

void allow_many_files() noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace stepgraph
