#include "tests/support/processes/killed_child.hpp"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>

namespace stepgraph::testing {
namespace {

[[noreturn]] void run_and_exit(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child process: %s\n", error.what());
    _exit(1);
  }
  _exit(0);
}

int wait_status(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

constexpr auto flags = offsetof(seccomp_data, args) + 4 * sizeof(std::uint64_t);  // the fifth argument, its low half

void set_filter(std::span<sock_filter> filter) {
  const sock_fprog program{.len = static_cast<unsigned short>(filter.size()), .filter = filter.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    throw std::runtime_error("system calls cannot be filtered");
}

Ended ended(int status) {
  if (WIFSIGNALED(status)) return Ended::killed;
  return WEXITSTATUS(status) == 0 ? Ended::done : Ended::failed;
}

// Whether all other threads of this process sleep.
bool others_sleep() {
  const std::string own = std::to_string(gettid());
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == own) continue;
    std::ifstream file(task.path() / "stat");
    const std::string text(std::istreambuf_iterator<char>(file), {});  // "id (name) state ..."; empty if it has ended
    const std::size_t name_end = text.rfind(") ");
    if (name_end != text.npos && text[name_end + 2] != 'S') return false;
  }
  return true;
}

}  // namespace

pid_t fork_when_quiet() {
  for (int attempt = 0; attempt < 2000 && !others_sleep(); ++attempt)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return fork();
}

Ended run_killed_at(int call, const std::function<void()>& work) {
  const pid_t child = fork_when_quiet();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(2);
    raise(SIGSTOP);
    run_and_exit(work);
  }
  if (!WIFSTOPPED(wait_status(child))) throw std::runtime_error("a child process cannot be traced");
  ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
  // The child stops before and after each call.
  for (int stop = 0;; ++stop) {
    ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    if (const int status = wait_status(child); !WIFSTOPPED(status)) return ended(status);
    if (stop == 2 * call) {
      kill(child, SIGKILL);
      return ended(wait_status(child));
    }
  }
}

int start_child(const std::function<void()>& work) {
  const pid_t child = fork_when_quiet();
  if (child == 0) run_and_exit(work);
  return child;
}

Ended wait_for(int child) { return ended(wait_status(child)); }

void forbid_exchange() {
  sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 0, 3),
                          BPF_STMT(BPF_LD | BPF_W | BPF_ABS, flags),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, RENAME_EXCHANGE, 0, 1),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  set_filter(filter);
}

void forbid_renames() {
#ifdef SYS_rename
  constexpr std::uint32_t other_call = SYS_rename;
#else
  constexpr std::uint32_t other_call = SYS_renameat;
#endif
  sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, other_call, 4, 0),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat, 3, 0),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 0, 3),
                          BPF_STMT(BPF_LD | BPF_W | BPF_ABS, flags),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, RENAME_NOREPLACE, 1, 0),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EXDEV),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  set_filter(filter);
}

}  // namespace stepgraph::testing
