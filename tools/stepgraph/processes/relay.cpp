#include "tools/stepgraph/processes/relay.hpp"

#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>

#include "backends/process/socket.hpp"

namespace stepgraph::cli {
namespace {

using namespace std::chrono_literals;

constexpr auto last_output_time    = 200ms;  // after the last process: something it has started may hold its pipes open
constexpr std::size_t longest_line = std::size_t{1} << 20;

// False: it is not read any more.
bool write_all(int descriptor, std::string_view bytes) noexcept {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) {  // it was made non-blocking
      pollfd ready{descriptor, POLLOUT, 0};
      ::poll(&ready, 1, -1);
      continue;
    }
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

}  // namespace

void Relay::start() {
  thread_ = std::thread([this] { run(); });
}

void Relay::end() {
  ended_                  = true;
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof one));
  thread_.join();
}

void Relay::run() {
  std::optional<Deadline> until;
  for (;;) {
    std::vector<pollfd> ready;
    for (const Source& source : sources_)
      if (source.pipe.is_open()) ready.push_back({source.pipe.get(), POLLIN, 0});
    if (ready.empty()) break;
    if (!until) ready.push_back({wake_.get(), POLLIN, 0});
    if (ended_ && !until) until = Clock::now() + last_output_time;
    int time_ms = -1;
    if (until) {
      time_ms = static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(*until - Clock::now()).count());
      if (time_ms <= 0) break;
    }
    if (::poll(ready.data(), ready.size(), time_ms) <= 0) continue;
    for (const pollfd& each : ready) {
      if (each.revents == 0) continue;
      for (Source& source : sources_)
        if (source.pipe.get() == each.fd) copy(source);
    }
  }
  for (Source& source : sources_) finish(source);
}

void Relay::copy(Source& source) {
  std::array<char, 65536> bytes;
  const ssize_t size = ::read(source.pipe.get(), bytes.data(), bytes.size());
  if (size < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (size <= 0) {
    source.pipe = Descriptor();
    return finish(source);
  }
  const std::string_view text(bytes.data(), static_cast<std::size_t>(size));
  if (source.prefix.empty()) {
    if (!write_all(1, text)) source.pipe = Descriptor();  // its process notices
    return;
  }
  std::string lines;
  for (const char c : text) {
    source.line += c;
    if (c != '\n' && source.line.size() < longest_line) continue;
    lines += source.prefix + source.line;
    if (c != '\n') lines += '\n';
    source.line.clear();
  }
  write_all(2, lines);
}

void Relay::finish(Source& source) {
  if (!source.line.empty()) write_all(2, source.prefix + source.line + "\n");
  source.line.clear();
}

}  // namespace stepgraph::cli
