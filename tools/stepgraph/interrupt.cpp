#include "tools/stepgraph/interrupt.hpp"

#include <signal.h>

#include <array>
#include <atomic>
#include <cassert>

namespace stepgraph::cli {
namespace {

// A signal handler can only use globals.
std::atomic<int> noted{0};
static_assert(std::atomic<int>::is_always_lock_free);  // required in signal handlers

constexpr std::array signals{SIGINT, SIGTERM, SIGHUP};
std::array<struct sigaction, signals.size()> before;
std::atomic<bool> one_lives{false};

void note(int signal) {
  int none = 0;
  if (noted.compare_exchange_strong(none, signal)) return;
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // delivered after this handler returns
}

}  // namespace

Interrupt::Interrupt() {
  [[maybe_unused]] const bool other = one_lives.exchange(true);
  assert(!other);
  noted = 0;
  for (std::size_t i = 0; i < signals.size(); ++i) {
    sigaction(signals[i], nullptr, &before[i]);
    if (signals[i] == SIGHUP && before[i].sa_handler == SIG_IGN) continue;
    struct sigaction action {};
    action.sa_handler = note;
    action.sa_flags   = SA_RESTART;
    sigaction(signals[i], &action, nullptr);
  }
}

Interrupt::~Interrupt() {
  for (std::size_t i = 0; i < signals.size(); ++i) sigaction(signals[i], &before[i], nullptr);
  one_lives = false;
}

int Interrupt::signal() const noexcept { return noted; }

}  // namespace stepgraph::cli
