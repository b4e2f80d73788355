#include "tools/stepgraph/interrupt.hpp"

#include <signal.h>

#include <array>
#include <atomic>
#include <cassert>

namespace stepgraph::cli {
namespace {

// A signal handler can only use globals.
std::atomic<bool> noted{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // required in signal handlers

constexpr std::array signals{SIGINT, SIGTERM};
std::array<struct sigaction, signals.size()> before;
std::atomic<bool> one_lives{false};

void note(int signal) {
  if (!noted.exchange(true)) return;
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // delivered after this handler returns
}

}  // namespace

Interrupt::Interrupt() {
  [[maybe_unused]] const bool other = one_lives.exchange(true);
  assert(!other);
  noted = false;
  for (std::size_t i = 0; i < signals.size(); ++i) {
    struct sigaction action {};
    action.sa_handler = note;
    action.sa_flags   = SA_RESTART;
    sigaction(signals[i], &action, &before[i]);
  }
}

Interrupt::~Interrupt() {
  for (std::size_t i = 0; i < signals.size(); ++i) sigaction(signals[i], &before[i], nullptr);
  one_lives = false;
}

bool Interrupt::requested() const noexcept { return noted; }

}  // namespace stepgraph::cli
