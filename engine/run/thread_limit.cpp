#include "engine/run/thread_limit.hpp"

#include <sys/resource.h>

#include <atomic>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

// The number in a file of the kernel; empty if there is none: no such file, or "max".
std::string number_in(const std::string& path) {
  std::string text;
  std::ifstream(path) >> text;
  return text.find_first_not_of("0123456789") == std::string::npos ? text : std::string();
}

// The control group of this process, as cgroup v2 names it: "0::/path".
std::string control_group() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("0::")) return line.substr(3);
  }
  return {};
}

// "RLIMIT_NPROC is 64, pids.max of its control group 512"
std::string limits() {
  std::string text;
  const auto name = [&](const char* limit, const std::string& value) {
    if (!value.empty()) text += str(text.empty() ? "" : ", ", limit, " is ", value);
  };
  rlimit processes{};
  if (getrlimit(RLIMIT_NPROC, &processes) == 0 && processes.rlim_cur != RLIM_INFINITY)
    name("RLIMIT_NPROC", str(processes.rlim_cur));
  std::string most = number_in("/sys/fs/cgroup" + control_group() + "/pids.max");
  if (most.empty()) most = number_in("/sys/fs/cgroup/pids.max");       // inside a container
  if (most.empty()) most = number_in("/sys/fs/cgroup/pids/pids.max");  // cgroup v1
  name("pids.max of its control group", most);
  name("kernel.threads-max", number_in("/proc/sys/kernel/threads-max"));
  return text;
}

}  // namespace

void check_threads(int count) {
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  std::string failure;
  threads.reserve(static_cast<std::size_t>(count));
  try {
    for (int i = 0; i < count; ++i) threads.emplace_back([&over] { over.wait(false); });
  } catch (const std::system_error& error) {
    failure = error.code().message();
  }
  over = true;
  over.notify_all();
  for (std::thread& thread : threads) thread.join();
  if (failure.empty()) return;
  throw Error(ErrorKind::backend, str("executor: cannot start ", count, " threads, only ", threads.size(), ": ",
                                      failure, " (fewer threads, or a higher limit: ", limits(), ")"));
}

}  // namespace stepgraph
