#include "backends/process/siblings.hpp"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

// An abstract name: its first byte is zero, and no file is made.
std::pair<sockaddr_un, socklen_t> address_of(const std::string& job, int rank) {
  sockaddr_un address{};
  address.sun_family     = AF_UNIX;
  const std::string name = str("stepgraph ", rank, " ", job);
  const std::size_t size = std::min(name.size(), sizeof address.sun_path - 1);
  name.copy(address.sun_path + 1, size);
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size)};
}

Descriptor make_socket() { return Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

bool is_stopped(pid_t process) {
  std::ifstream status(str("/proc/", process, "/status"));
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("State:")) return line.find("T (stopped)") != line.npos;
  return false;
}

}  // namespace

Siblings::Siblings(std::string job, int rank, int size)
    : job_(std::move(job)), rank_(rank), size_(size), listener_(make_socket()) {
  const auto [address, length] = address_of(job_, rank_);
  constexpr int most_askers    = 4096;
  if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener_.get(), most_askers) != 0)
    listener_ = Descriptor();  // only messages are worse
}

std::optional<Siblings> Siblings::of_mpirun(const Environment& environment) {
  const auto text = [&](std::string_view name) {
    const auto at = environment.find(name);
    return at == environment.end() ? std::string() : at->second;
  };
  const auto number = [&](std::string_view name) { return to_number<int>(text(name)); };
  const auto rank   = number("OMPI_COMM_WORLD_RANK");
  const auto size = number("OMPI_COMM_WORLD_SIZE"), here = number("OMPI_COMM_WORLD_LOCAL_SIZE");
  const std::string job = text("PMIX_NAMESPACE");
  if (!rank || !size || here != size || job.empty()) return std::nullopt;
  return Siblings(str(job, " ", text("PMIX_SERVER_URI2")), *rank, *size);
}

std::string Siblings::missing() const {
  std::string all;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const Descriptor asks        = make_socket();
    const auto [address, length] = address_of(job_, rank);
    const bool there             = ::connect(asks.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0;
    // No process listens there. Other errors, such as a full queue, say nothing about that process.
    const bool refused = !there && errno == ECONNREFUSED;
    ucred peer{};
    socklen_t peer_length = sizeof peer;
    const bool stopped =
        there && ::getsockopt(asks.get(), SOL_SOCKET, SO_PEERCRED, &peer, &peer_length) == 0 && is_stopped(peer.pid);
    if (!refused && !stopped) continue;
    all += str(all.empty() ? "" : ", ", "rank ", rank, stopped ? " is stopped" : " is gone or has not started");
  }
  return all;
}

}  // namespace stepgraph
