#include "tools/stepgraph/terminal/interrupt.hpp"

#include <signal.h>
#include <time.h>

#include <array>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <cstdint>

namespace stepgraph::cli {
namespace {

// A signal handler can only use globals.
std::atomic<int> noted{0};
std::atomic<std::int64_t> noted_at_ns{0};              // 0: no signal yet
static_assert(std::atomic<int>::is_always_lock_free);  // required in signal handlers
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

std::atomic<void (*)(void*)> sigterm_call{nullptr};
std::atomic<void*> sigterm_data{nullptr};
static_assert(std::atomic<void*>::is_always_lock_free);

constexpr std::array signals{SIGINT, SIGTERM, SIGHUP, SIGUSR1};
std::array<struct sigaction, signals.size()> before;
struct sigaction before_call;  // that of SIGTERM before a SigtermCall
std::atomic<bool> one_lives{false};

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // allowed in signal handlers
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec + 1;
}

void call_at(int signal) {
  if (void (*const call)(void*) = sigterm_call; call != nullptr && signal == SIGTERM) {
    const int reason = errno;  // of the code that was interrupted
    call(sigterm_data);
    errno = reason;
  }
}

void note(int signal) {
  constexpr std::int64_t one_request_ns = 1'000'000'000;
  const std::int64_t now                = now_ns();
  std::int64_t first                    = 0;
  call_at(signal);
  if (noted_at_ns.compare_exchange_strong(first, now)) {
    noted = signal;
    return;
  }
  if (signal == SIGHUP || now - first < one_request_ns) return;
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // delivered after this handler returns
}

}  // namespace

Interrupt::Interrupt() {
  [[maybe_unused]] const bool other = one_lives.exchange(true);
  assert(!other);
  noted       = 0;
  noted_at_ns = 0;
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

bool Interrupt::exists() noexcept { return one_lives; }

SigtermCall::SigtermCall(void (*call)(void*), void* data) noexcept {
  sigterm_data = data;
  sigterm_call = call;
  sigaction(SIGTERM, nullptr, &before_call);
  if (before_call.sa_handler == SIG_IGN) return;
  struct sigaction action {};
  action.sa_handler = call_at;
  action.sa_flags   = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
}

SigtermCall::~SigtermCall() {
  sigaction(SIGTERM, &before_call, nullptr);
  sigterm_call = nullptr;
}

int Interrupt::signal() const noexcept { return noted; }

}  // namespace stepgraph::cli
