#pragma once
#include <stdexcept>
#include <string>

namespace stepgraph::cli {

// While an Interrupt exists, the first SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal was closed) or SIGUSR1 (a batch
// system's warning before the end of the time, as by Slurm's --signal) is only noted, so the program can finish its
// step and save. A second one of them but SIGHUP ends the program as usual. Signals within a second of the first one
// are ignored: a closing terminal, GNU timeout and service managers send several at once. For the same reason SIGHUP is
// never the second signal. All this holds for background jobs too, for which the shell ignores SIGINT. SIGHUP stays
// ignored where it was, as under nohup. At most one Interrupt may exist at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&)            = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  [[nodiscard]] bool requested() const noexcept { return signal() != 0; }
  [[nodiscard]] int signal() const noexcept;  // the first one; 0: none yet
  [[nodiscard]] static bool exists() noexcept;
};

// While it exists, SIGTERM calls this, besides an Interrupt that may exist. Without an Interrupt SIGTERM does nothing
// else. Where SIGTERM was ignored it stays so. One at a time, of the whole program; an Interrupt must not outlive it.
class SigtermCall {
 public:
  SigtermCall(void (*call)(void* data), void* data) noexcept;  // `call` must be allowed in signal handlers
  ~SigtermCall();
  SigtermCall(const SigtermCall&)            = delete;
  SigtermCall& operator=(const SigtermCall&) = delete;
};

// A command that ended early because of a signal. The exit code of the program is 128 + signal, as in shells: 129 after
// SIGHUP, 130 after SIGINT, 138 after SIGUSR1, 143 after SIGTERM.
struct Interrupted : std::runtime_error {
  Interrupted(int by, const std::string& what) : std::runtime_error(what), signal(by) {}
  int signal;
};

}  // namespace stepgraph::cli
