#include "engine/run/threads/thread_limit.hpp"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

// The number in a file of the kernel; empty if there is none: no such file, or "max".
std::string number_in(const std::filesystem::path& path) {
  std::string text;
  std::ifstream(path) >> text;
  return text.find_first_not_of("0123456789") == std::string::npos ? text : std::string();
}

bool is_lower(const std::string& a, const std::string& b) { return a.size() != b.size() ? a.size() < b.size() : a < b; }

// The lowest pids.max for this process, in either version of control groups. Lines of /proc/self/cgroup are
// "0::/path" in version 2 and "4:pids:/path" in version 1.
std::string pids_max() {
  const std::filesystem::path root = "/sys/fs/cgroup";
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t names = line.find(':'), path = line.find(':', names + 1);
    if (path == std::string::npos) continue;
    const std::string controllers = str(",", line.substr(names + 1, path - names - 1), ",");
    const bool pids               = controllers.find(",pids,") != std::string::npos;
    if (!pids && controllers != ",,") continue;
    const std::string most = lowest_pids_max(pids ? root / "pids" : root, line.substr(path + 1));
    if (!most.empty()) return most;
  }
  return {};
}

// The limits that can keep a thread from starting: "RLIMIT_NPROC is 64, vm.max_map_count is 65530". The kernel does not
// say which of them was reached: pthread_create returns EAGAIN for all, also when there is no memory for the stack.
std::string limits() {
  std::string text;
  const auto name = [&](const char* limit, const std::string& value) {
    if (!value.empty()) text += str(text.empty() ? "" : ", ", limit, " is ", value);
  };
  const auto value_of = [](auto resource, const char* unit) {
    rlimit limit{};
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::string();
    return str(limit.rlim_cur, unit);
  };
  name("RLIMIT_NPROC", value_of(RLIMIT_NPROC, ""));
  name("pids.max of its control groups", pids_max());
  name("kernel.threads-max", number_in("/proc/sys/kernel/threads-max"));
  name("RLIMIT_AS", value_of(RLIMIT_AS, " bytes"));
  name("RLIMIT_STACK, the size of each stack,", value_of(RLIMIT_STACK, " bytes"));
  name("vm.max_map_count", number_in("/proc/sys/vm/max_map_count"));
  return text;
}

// Waits until the kernel has forgotten the threads: pthread_join returns a little earlier, and until then they count
// against its limits. Gives up after a second: another thread of this process may have got the number of one of them.
void wait_until_gone(const std::vector<std::atomic<pid_t>>& threads, std::size_t count) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (std::size_t i = 0; i < count; ++i) {
    while (syscall(SYS_tgkill, getpid(), threads[i].load(), 0) == 0 && std::chrono::steady_clock::now() < end)
      std::this_thread::yield();
  }
}

}  // namespace

std::string lowest_pids_max(const std::filesystem::path& mount, const std::string& group) {
  std::string lowest;
  for (std::string path = group;; path.erase(path.find_last_of('/'))) {
    const std::string most = number_in(mount.string() + path + "/pids.max");
    if (!most.empty() && (lowest.empty() || is_lower(most, lowest))) lowest = most;
    if (path.find('/') == std::string::npos) return lowest;
  }
}

void check_threads(int count) {
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  std::vector<std::atomic<pid_t>> numbers(static_cast<std::size_t>(count));
  std::string failure;
  threads.reserve(static_cast<std::size_t>(count));
  try {
    for (std::atomic<pid_t>& number : numbers) {
      threads.emplace_back([&over, &number] {
        number = gettid();
        over.wait(false);
      });
    }
  } catch (const std::system_error& error) {
    failure = error.code().message();
  }
  over = true;
  over.notify_all();
  for (std::thread& thread : threads) thread.join();
  wait_until_gone(numbers, threads.size());
  if (failure.empty()) return;
  throw Error(ErrorKind::backend, str("executor: cannot start ", count, " threads, only ", threads.size(), ": ",
                                      failure, " (fewer threads, or a higher limit: ", limits(), ")"));
}

}  // namespace stepgraph
