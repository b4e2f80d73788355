#pragma once
#include <string>

namespace stepgraph::testing {

// During its lifetime, stderr is a terminal with the given number of columns. Its output can be read here.
class TerminalForStderr {
 public:
  explicit TerminalForStderr(int columns, const char* kind = "xterm");
  ~TerminalForStderr();
  TerminalForStderr(const TerminalForStderr&)            = delete;
  TerminalForStderr& operator=(const TerminalForStderr&) = delete;

  void resize(int columns);
  [[nodiscard]] std::string written();  // since the last call

 private:
  int master_ = -1, stderr_before_ = -1;
  bool had_kind_ = false;
  std::string kind_before_;
};

// The last line of a terminal, after interpreting carriage returns and "erase to the end of the line".
[[nodiscard]] std::string last_line(const std::string& written);

}  // namespace stepgraph::testing
