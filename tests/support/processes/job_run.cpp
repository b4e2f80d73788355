#include "tests/support/processes/job_run.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "backends/process/secret.hpp"
#include "backends/process/socket.hpp"
#include "tests/support/processes/asan_options.hpp"

namespace stepgraph::testing {
namespace {

std::string text_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

JobRun::JobRun(int size, const std::vector<std::string>& command, const Variables& more) {
  const Descriptor listener = listen_on({.address = "127.0.0.1"});
  Variables all{{"WORLD_SIZE", std::to_string(size)},
                {"MASTER_ADDR", "127.0.0.1"},
                {"MASTER_PORT", std::to_string(port_of(listener.get()))},
                {"STEPGRAPH_SECRET", random_secret()}};
  for (const auto& [name, value] : more) all[name] = value;
  for (int rank = 0; rank < size; ++rank) {
    all["RANK"]    = std::to_string(rank);
    Variables mine = all;
    if (rank == 0) mine["STEPGRAPH_LISTEN_FD"] = std::to_string(listener.get());
    start(rank, command, mine, rank == 0 ? listener.get() : -1);
  }
}

JobRun::JobRun(const std::vector<std::string>& command, const Variables& more) { start(0, command, more, -1); }

void JobRun::start(int rank, const std::vector<std::string>& command, Variables given, int inherited) {
  given.emplace("ASAN_OPTIONS", asan_options_of_command);
  // All that allocates is done before fork().
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!given.contains(text.substr(0, text.find('=')))) environment.push_back(text);
  }
  for (const auto& [name, value] : given) environment.push_back(name + "=" + value);
  std::vector<char*> variables, arguments;
  for (std::string& each : environment) variables.push_back(each.data());
  std::vector<std::string> words = command;
  for (std::string& word : words) arguments.push_back(word.data());
  variables.push_back(nullptr);
  arguments.push_back(nullptr);
  const std::string out = (folder_ / ("out" + std::to_string(rank))).string();
  const std::string err = (folder_ / ("err" + std::to_string(rank))).string();
  const pid_t parent    = ::getpid();
  const pid_t pid       = ::fork();
  if (pid < 0) throw std::runtime_error("fork failed");
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    ::dup2(::open("/dev/null", O_RDONLY), 0);
    ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 1);
    ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
    if (inherited >= 0) ::fcntl(inherited, F_SETFD, 0);
    ::execve(arguments[0], arguments.data(), variables.data());
    ::_exit(127);
  }
  processes_.push_back({.pid = pid});
}

JobRun::~JobRun() {
  // A launcher ends its processes.
  for (const Process& process : processes_) {
    if (!process.ended) ::kill(process.pid, SIGTERM);
  }
  if (!poll()) static_cast<void>(wait(std::chrono::seconds(2)));
  for (Process& process : processes_) {
    if (process.ended) continue;
    ::kill(process.pid, SIGKILL);
    ::waitpid(process.pid, nullptr, 0);
  }
}

void JobRun::signal(int rank, int number) const { ::kill(pid(rank), number); }

bool JobRun::poll() {
  bool all = true;
  for (Process& process : processes_) {
    int status = 0;
    if (!process.ended && ::waitpid(process.pid, &status, WNOHANG) == process.pid) {
      process.ended = true;
      process.code  = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    all = all && process.ended;
  }
  return all;
}

std::vector<int> JobRun::wait(std::chrono::milliseconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  while (!poll() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  std::vector<int> codes;
  for (Process& process : processes_) codes.push_back(process.ended ? process.code : -1);
  return codes;
}

int JobRun::wait_for(int rank, std::chrono::milliseconds time) {
  const auto until       = std::chrono::steady_clock::now() + time;
  const Process& process = processes_.at(static_cast<std::size_t>(rank));
  for (poll(); !process.ended && std::chrono::steady_clock::now() < until; poll())
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return process.ended ? process.code : -1;
}

bool JobRun::wait_for_text(int rank, const std::string& text, std::chrono::milliseconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < until) {
    if (out(rank).find(text) != std::string::npos) return true;
    poll();
    if (processes_[static_cast<std::size_t>(rank)].ended) return out(rank).find(text) != std::string::npos;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

std::string JobRun::out(int rank) const { return text_of(folder_ / ("out" + std::to_string(rank))); }
std::string JobRun::err(int rank) const { return text_of(folder_ / ("err" + std::to_string(rank))); }

std::vector<pid_t> children_of(pid_t process) {
  const std::string id = std::to_string(process);
  std::ifstream list("/proc/" + id + "/task/" + id + "/children");
  std::vector<pid_t> children;
  for (pid_t child = 0; list >> child;) children.push_back(child);
  return children;
}

std::vector<pid_t> processes_with(const std::string& argument) {
  std::vector<pid_t> found;
  for (int attempt = 0; attempt < 200; ++attempt) {
    found.clear();
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
      const pid_t pid = std::atoi(entry.path().filename().c_str());
      if (pid > 0 && pid != ::getpid() && text_of(entry.path() / "cmdline").find(argument) != std::string::npos)
        found.push_back(pid);
    }
    if (found.empty()) return found;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return found;
}

}  // namespace stepgraph::testing
