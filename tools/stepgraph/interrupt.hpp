#pragma once

namespace stepgraph::cli {

// While one lives, the first Ctrl-C (SIGINT) or SIGTERM is only noted, so that what is under way can end properly; the
// second ends the program as usual. That holds for a job in the background too, whose shell has SIGINT ignored: who
// sends it one means it. One at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&)            = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  [[nodiscard]] bool requested() const noexcept;
};

}  // namespace stepgraph::cli
