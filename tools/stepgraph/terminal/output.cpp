#include "tools/stepgraph/terminal/output.hpp"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "engine/base/partial.hpp"

namespace stepgraph::cli {
namespace {

// The reading end of a pipe or socket has been closed.
bool reader_has_gone() {
  pollfd descriptor{.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
  return poll(&descriptor, 1, 0) > 0 && (descriptor.revents & (POLLERR | POLLHUP)) != 0;
}

[[noreturn]] void fail(int reason) {
  if (reader_has_gone()) throw OutputClosed{};
  throw Error(ErrorKind::backend, str("stdout cannot be written", reason == 0 ? "" : ": " + system_reason(reason)));
}

std::string print_number(const char* format, int num_digits, double number) {
  char text[64];
  return {text, static_cast<std::size_t>(std::snprintf(text, sizeof text, format, num_digits, number))};
}

}  // namespace

int exit_code(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::config:
      return 2;
    case ErrorKind::graph:
    case ErrorKind::run:
      return 1;
    case ErrorKind::backend:
      return 3;
  }
  return 1;
}

void print_line(std::string_view line) {
  errno = 0;
  std::cout << line << '\n';
  if (!std::cout.flush()) fail(errno);
}

void flush_output() {
  errno = 0;
  if (!std::cout.flush()) fail(errno);
}

std::string digits(double number) { return std::isfinite(number) ? print_number("%.*g", 17, number) : "null"; }

std::string short_number(double number, int num_digits) { return print_number("%.*g", num_digits, number); }

bool stderr_can_redraw() {
  const char* terminal = std::getenv("TERM");
  return isatty(STDERR_FILENO) == 1 && terminal && std::string_view(terminal) != "dumb";
}

int stderr_columns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void ignore_signals_of_writes() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace stepgraph::cli
