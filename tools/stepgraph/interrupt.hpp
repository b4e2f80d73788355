#pragma once

namespace stepgraph::cli {

// While one lives, the first Ctrl-C (SIGINT) or SIGTERM is only noted, so that what is under way can end properly; the
// second ends the program as usual. A signal that was ignored before, as in a background job, stays so. One at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&)            = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  [[nodiscard]] bool requested() const noexcept;
};

}  // namespace stepgraph::cli
