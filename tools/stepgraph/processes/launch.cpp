#include "tools/stepgraph/processes/launch.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iostream>
#include <map>
#include <optional>
#include <string_view>

#include "backends/process/environment.hpp"
#include "backends/process/secret.hpp"
#include "backends/process/socket.hpp"
#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"
#include "tools/stepgraph/processes/relay.hpp"

namespace stepgraph::cli {
namespace {

constexpr std::array passed_on{SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT, SIGTSTP};

// Places that another launcher has told, and that would contradict ours.
bool is_of_another_launcher(std::string_view name) {
  constexpr std::array<std::string_view, 6> beginnings{"OMPI_", "PMIX_", "PMI_", "PRTE_", "TORCHELASTIC_", "SLURM_"};
  constexpr std::array<std::string_view, 9> names{"RANK",        "WORLD_SIZE",     "LOCAL_RANK",
                                                  "MASTER_ADDR", "MASTER_PORT",    "LOCAL_WORLD_SIZE",
                                                  "GROUP_RANK",  "STEPGRAPH_PORT", "STEPGRAPH_LISTEN_FD"};
  for (const std::string_view begin : beginnings)
    if (name.starts_with(begin)) return true;
  for (const std::string_view each : names)
    if (name == each) return true;
  return false;
}

struct Pipe {
  Descriptor out, in;
};
Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw Error(ErrorKind::backend, str("launch: no pipe: ", system_reason(errno)));
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

struct JobEnd {
  int code        = 0;
  bool may_repeat = false;  // whether to start again may help
};

class Launcher {
 public:
  Launcher(const std::string& program, const std::vector<std::string>& arguments, int num_processes,
           const LaunchOptions& options)
      : program_(program), arguments_(arguments), num_processes_(num_processes), options_(options) {
    sigset_t wanted;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGCHLD);
    for (const int number : passed_on) sigaddset(&wanted, number);
    ::pthread_sigmask(SIG_BLOCK, &wanted, &before_);
    signals_ = Descriptor(::signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  ~Launcher() {
    for (const auto& [pid, rank] : running_) {  // only after an error
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  Launcher(const Launcher&)            = delete;
  Launcher& operator=(const Launcher&) = delete;

  JobEnd run() {
    start_all();
    passed_.start();
    marked_.start();
    while (!running_.empty()) {
      wait();
      reap();
      hurry();
    }
    passed_.end();
    marked_.end();
    return report();
  }

 private:
  void start_all() {
    allow_many_files();
    const Descriptor listener = listen_on({.address = "127.0.0.1"});
    Environment environment;
    for (const auto& [name, value] : process_environment())
      if (!is_of_another_launcher(name)) environment.emplace(name, value);
    environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = str(num_processes_);
    environment["MASTER_ADDR"]                                  = "127.0.0.1";
    environment["MASTER_PORT"]                                  = str(port_of(listener.get()));
    environment["STEPGRAPH_SECRET"]                             = random_secret();
    for (int rank = 0; rank < num_processes_; ++rank) {
      environment["RANK"] = environment["LOCAL_RANK"] = str(rank);
      Environment mine                                = environment;
      if (rank == 0) mine["STEPGRAPH_LISTEN_FD"] = str(listener.get());
      start(rank, mine, rank == 0 ? listener.get() : -1);
    }
  }

  // All that allocates is done before fork().
  void start(int rank, const Environment& environment, int inherited) {
    Pipe out = make_pipe(), err = make_pipe();
    std::vector<std::string> variables, words{"stepgraph"};
    for (const auto& [name, value] : environment) variables.push_back(str(name, "=", value));
    words.insert(words.end(), arguments_.begin(), arguments_.end());
    const auto pointers = [](std::vector<std::string>& texts) {
      std::vector<char*> all;
      for (std::string& text : texts) all.push_back(text.data());
      all.push_back(nullptr);
      return all;
    };
    const std::vector<char*> envp = pointers(variables), argv = pointers(words);
    const pid_t parent = ::getpid();
    const pid_t pid    = ::fork();
    if (pid < 0) throw Error(ErrorKind::backend, str("launch: cannot start rank ", rank, ": ", system_reason(errno)));
    if (pid == 0) {
      // A group of its own: a terminal's Ctrl-C reaches this process only, which passes it on once.
      ::setpgid(0, 0);
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(127);
      ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
      ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
      ::dup2(out.in.get(), 1);
      ::dup2(err.in.get(), 2);
      if (inherited >= 0) ::fcntl(inherited, F_SETFD, 0);
      ::execve(program_.c_str(), argv.data(), envp.data());
      constexpr std::string_view problem = "stepgraph launch: cannot execute this program again\n";
      static_cast<void>(!::write(2, problem.data(), problem.size()));
      ::_exit(127);
    }
    running_[pid]            = rank;
    const std::string prefix = str("[rank ", rank, "] ");
    if (rank == 0) {
      passed_.add(std::move(out.out), "");
    } else {
      marked_.add(std::move(out.out), prefix);
    }
    marked_.add(std::move(err.out), prefix);
  }

  void wait() {
    pollfd ready{signals_.get(), POLLIN, 0};
    int time_ms = -1;
    if (next_) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next_ - Clock::now()).count();
      time_ms         = static_cast<int>(std::max<std::int64_t>(left, 0));
    }
    ::poll(&ready, 1, time_ms);
    signalfd_siginfo signal{};
    while (::read(signals_.get(), &signal, sizeof signal) == sizeof signal)
      if (signal.ssi_signo == SIGTSTP) {  // Ctrl-Z: the terminal's reaches this process only
        send(SIGSTOP);
        ::raise(SIGSTOP);
      } else if (signal.ssi_signo != SIGCHLD) {
        signalled_ = signalled_ || signal.ssi_signo != SIGCONT;
        send(static_cast<int>(signal.ssi_signo));
      }
  }

  void send(int number) const {
    for (const auto& [pid, rank] : running_) ::kill(pid, number);
  }

  struct End {
    int rank, status, code;
    // Code 3 is that of a process whose peer has failed: the others are the cause.
    [[nodiscard]] bool is_consequence() const { return code == 3; }
    [[nodiscard]] bool is_interrupt() const {
      return code == 128 + SIGINT || code == 128 + SIGTERM || code == 128 + SIGHUP || code == 128 + SIGUSR1;
    }
  };

  void reap() {
    std::vector<End> ends;
    for (auto at = running_.begin(); at != running_.end();) {
      int status = 0;
      if (::waitpid(at->first, &status, WNOHANG) != at->first) {
        ++at;
        continue;
      }
      const int code  = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      const int rank  = at->second;
      at              = running_.erase(at);
      const bool told = told_to_end_ && (code == 128 + SIGTERM || code == 128 + SIGKILL);  // by hurry()
      if (code != 0 && !told) ends.push_back({rank, status, code});
    }
    // Of processes that end at the same time, one that a signal has ended was the cause.
    std::ranges::stable_partition(ends, [](const End& end) { return WIFSIGNALED(end.status); });
    failures_.insert(failures_.end(), ends.begin(), ends.end());
    if (!failures_.empty() && !next_) next_ = Clock::now() + options_.report_time;
  }

  // The exit code: that of the first failure that is no consequence of another one. Prints it.
  [[nodiscard]] JobEnd report() const {
    if (failures_.empty()) return {};
    const auto cause  = std::ranges::find_if_not(failures_, &End::is_consequence);
    const End& first  = cause != failures_.end() ? *cause : failures_.front();
    const bool exited = WIFEXITED(first.status);
    if (first.is_interrupt() && (exited || signalled_)) {
      std::cerr << "stepgraph launch: interrupted\n" << std::flush;
    } else {
      std::cerr << str("stepgraph launch: rank ", first.rank,
                       exited ? " failed with exit code " : " was ended by signal ",
                       exited ? first.code : WTERMSIG(first.status), "\n")
                << std::flush;
    }
    return {first.code, !signalled_ && (!exited || first.is_consequence())};
  }

  // After the first failure.
  void hurry() {
    if (!next_ || Clock::now() < *next_) return;
    send(told_to_end_ ? SIGKILL : SIGTERM);
    send(SIGCONT);  // a stopped process cannot end otherwise
    told_to_end_ = true;
    next_        = Clock::now() + options_.kill_time;
  }

  const std::string& program_;
  const std::vector<std::string>& arguments_;
  const int num_processes_;
  const LaunchOptions& options_;
  sigset_t before_{};
  Descriptor signals_;
  std::map<pid_t, int> running_;  // ranks
  Relay passed_, marked_;         // two threads: a reader of stdout that is slow keeps no message of others waiting
  std::vector<End> failures_;     // in their order
  bool told_to_end_ = false;
  bool signalled_   = false;      // this process was told to end
  std::optional<Deadline> next_;  // when the rest is told to end
};

}  // namespace

int launch(const std::string& program, const std::vector<std::string>& arguments, const LaunchOptions& options) {
  const int processes_again = options.restart_processes > 0 ? options.restart_processes : options.num_processes;
  const auto& words_again   = options.restart_arguments.empty() ? arguments : options.restart_arguments;
  for (int restart = 0;; ++restart) {
    const bool again = restart > 0;
    const JobEnd end =
        Launcher(program, again ? words_again : arguments, again ? processes_again : options.num_processes, options)
            .run();
    if (!end.may_repeat || restart == options.restarts) {
      if (end.may_repeat && restart > 0)
        std::cerr << str("stepgraph launch: gives up after ", restart, restart == 1 ? " restart" : " restarts", "\n")
                  << std::flush;
      return end.code;
    }
    std::cerr << str("stepgraph launch: starts again with ", processes_again,
                     processes_again == 1 ? " process" : " processes", " (restart ", restart + 1, " of ",
                     options.restarts, ")\n")
              << std::flush;
  }
}

}  // namespace stepgraph::cli
