#include "tests/support/processes/pseudo_terminal.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace stepgraph::testing {

TerminalForStderr::TerminalForStderr(int columns, const char* kind) {
  master_ = posix_openpt(O_RDWR | O_NOCTTY);
  if (master_ < 0 || grantpt(master_) != 0 || unlockpt(master_) != 0) throw std::runtime_error("no pseudo-terminal");
  const int slave = open(ptsname(master_), O_RDWR | O_NOCTTY);
  if (slave < 0) throw std::runtime_error("no pseudo-terminal");
  resize(columns);
  stderr_before_ = dup(STDERR_FILENO);
  dup2(slave, STDERR_FILENO);
  close(slave);
  if (const char* before = std::getenv("TERM")) {
    had_kind_    = true;
    kind_before_ = before;
  }
  setenv("TERM", kind, 1);
}

TerminalForStderr::~TerminalForStderr() {
  dup2(stderr_before_, STDERR_FILENO);
  close(stderr_before_);
  close(master_);
  had_kind_ ? setenv("TERM", kind_before_.c_str(), 1) : unsetenv("TERM");
}

void TerminalForStderr::resize(int columns) {
  const winsize size{.ws_row = 24, .ws_col = static_cast<unsigned short>(columns), .ws_xpixel = 0, .ws_ypixel = 0};
  ioctl(master_, TIOCSWINSZ, &size);
}

std::string TerminalForStderr::written() {
  std::string text;
  for (pollfd waiting{.fd = master_, .events = POLLIN, .revents = 0}; poll(&waiting, 1, 50) > 0;) {
    char block[4096];
    const ssize_t size = read(master_, block, sizeof block);
    if (size <= 0) break;
    text.append(block, static_cast<std::size_t>(size));
  }
  return text;
}

std::string last_line(const std::string& written) {
  std::string line;
  std::size_t column = 0;
  for (std::size_t i = 0; i < written.size(); ++i) {
    if (written[i] == '\r') {
      column = 0;
    } else if (written[i] == '\n') {
      line.clear();
    } else if (written.compare(i, 3, "\x1b[K") == 0) {
      line.resize(std::min(line.size(), column));
      i += 2;
    } else {
      line.resize(std::max(line.size(), column + 1), ' ');
      line[column++] = written[i];
    }
  }
  return line;
}

}  // namespace stepgraph::testing
