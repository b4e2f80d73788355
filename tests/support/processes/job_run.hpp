#pragma once
#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "tests/support/temp_folder.hpp"

namespace stepgraph::testing {

// Processes of one program that this process starts, each with its own variables, as a launcher would.
class JobRun {
 public:
  using Variables = std::map<std::string, std::string>;

  // RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and STEPGRAPH_SECRET; process 0 inherits a listening socket.
  JobRun(int size, const std::vector<std::string>& command, const Variables& more = {});
  // One process without a place: a launcher.
  explicit JobRun(const std::vector<std::string>& command, const Variables& more = {});
  ~JobRun();  // kills those that have not ended
  JobRun(const JobRun&)            = delete;
  JobRun& operator=(const JobRun&) = delete;

  [[nodiscard]] pid_t pid(int rank) const { return processes_.at(static_cast<std::size_t>(rank)).pid; }
  void signal(int rank, int number) const;
  // Waits until a process has written a text to stdout; false: it has ended before, or not in time.
  [[nodiscard]] bool wait_for_text(int rank, const std::string& text, std::chrono::milliseconds time);

  // Waits for the end of all. By rank: exit codes, 128 + the signal for those that a signal has ended; -1: it has not
  // ended in time; the destructor kills it.
  [[nodiscard]] std::vector<int> wait(std::chrono::milliseconds time);
  [[nodiscard]] int wait_for(int rank, std::chrono::milliseconds time);  // the same for one
  [[nodiscard]] std::string out(int rank) const;
  [[nodiscard]] std::string err(int rank) const;

 private:
  struct Process {
    pid_t pid  = -1;
    bool ended = false;
    int code   = -1;
  };
  void start(int rank, const std::vector<std::string>& command, Variables given, int inherited);
  bool poll();  // whether all have ended

  TempFolder folder_;
  std::vector<Process> processes_;
};

// The processes that this one has started, and that have not ended.
[[nodiscard]] std::vector<pid_t> children_of(pid_t process);
// The processes whose arguments contain a text. Waits a moment for those that are about to end.
[[nodiscard]] std::vector<pid_t> processes_with(const std::string& argument);

}  // namespace stepgraph::testing
