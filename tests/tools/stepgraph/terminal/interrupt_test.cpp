#include "tools/stepgraph/terminal/interrupt.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "tests/support/processes/killed_child.hpp"

namespace sg  = stepgraph;
namespace cli = stepgraph::cli;

namespace {

// The signal that ends a child process which runs `work`; 0: it exits by itself.
template <class Work>
int ending_signal(const Work& work) {
  const pid_t child = sg::testing::fork_when_quiet();
  if (child == 0) {
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    signal(SIGHUP, SIG_DFL);
    signal(SIGUSR1, SIG_DFL);
    work();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

}  // namespace

TEST_CASE("the first signal is noted", "[tools][interrupt]") {
  const int first = GENERATE(SIGINT, SIGTERM, SIGHUP, SIGUSR1);
  signal(SIGHUP, SIG_DFL);
  {
    const cli::Interrupt interrupt;
    CHECK_FALSE(interrupt.requested());
    raise(first);
    CHECK(interrupt.requested());
    CHECK(interrupt.signal() == first);
    CHECK(cli::Interrupted(interrupt.signal(), "why").signal == first);
  }
  const cli::Interrupt next;
  CHECK_FALSE(next.requested());
}

TEST_CASE("signals that are sent together are one request", "[tools][interrupt]") {
  const auto [first, second] = GENERATE(
      table<int, int>({{SIGHUP, SIGHUP}, {SIGINT, SIGINT}, {SIGTERM, SIGTERM}, {SIGTERM, SIGHUP}, {SIGUSR1, SIGTERM}}));
  CAPTURE(first, second);
  CHECK(ending_signal([first = first, second = second] {
          const cli::Interrupt interrupt;
          raise(first);
          usleep(5'000);
          raise(second);
          if (interrupt.signal() != first) raise(SIGKILL);
        }) == 0);
}

TEST_CASE("a hangup never ends the program at once", "[tools][interrupt]") {
  const int first = GENERATE(SIGHUP, SIGINT);
  CHECK(ending_signal([first] {
          const cli::Interrupt interrupt;
          raise(first);
          usleep(1'100'000);
          raise(SIGHUP);
          if (interrupt.signal() != first) raise(SIGKILL);
        }) == 0);
}

TEST_CASE("the second signal ends the program, and so does any signal after the Interrupt is gone",
          "[tools][interrupt]") {
  CHECK(ending_signal([] {
          const cli::Interrupt interrupt;
          raise(SIGINT);
        }) == 0);
  CHECK(ending_signal([] {
          const cli::Interrupt interrupt;
          raise(SIGINT);
          usleep(1'100'000);
          raise(SIGINT);
        }) == SIGINT);
  CHECK(ending_signal([] {
          const cli::Interrupt interrupt;
          raise(SIGHUP);
          usleep(1'100'000);
          raise(SIGTERM);
        }) == SIGTERM);
  CHECK(ending_signal([] {
          const cli::Interrupt interrupt;
          raise(SIGUSR1);
          usleep(1'100'000);
          raise(SIGUSR1);
        }) == SIGUSR1);
  CHECK(ending_signal([] {
          { const cli::Interrupt interrupt; }
          raise(SIGTERM);
        }) == SIGTERM);
}

TEST_CASE("a job in the background can be interrupted, and ignores the signal again afterwards", "[tools][interrupt]") {
  CHECK(ending_signal([] {
          signal(SIGINT, SIG_IGN);
          {
            const cli::Interrupt interrupt;
            raise(SIGINT);
            if (!interrupt.requested()) raise(SIGKILL);
          }
          raise(SIGINT);
        }) == 0);
}

TEST_CASE("a hangup that is ignored, as under nohup, stays ignored", "[tools][interrupt]") {
  CHECK(ending_signal([] {
          signal(SIGHUP, SIG_IGN);
          const cli::Interrupt interrupt;
          raise(SIGHUP);
          raise(SIGHUP);
          if (interrupt.requested()) raise(SIGKILL);
        }) == 0);
}
