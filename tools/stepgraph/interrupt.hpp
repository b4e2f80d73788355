#pragma once

namespace stepgraph::cli {

// While an Interrupt exists, the first SIGINT (Ctrl-C) or SIGTERM only sets a flag, so the program can finish its step
// and save. The second signal ends the program as usual. This holds for background jobs too, for which the shell
// ignores SIGINT. At most one Interrupt may exist at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&)            = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  [[nodiscard]] bool requested() const noexcept;
};

}  // namespace stepgraph::cli
