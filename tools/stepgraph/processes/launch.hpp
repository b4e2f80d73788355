#pragma once
#include <chrono>
#include <string>
#include <vector>

namespace stepgraph::cli {

struct LaunchOptions {
  int num_processes = 1;
  // After the first failure the other processes get this long to report and to end. Then they get SIGTERM, and after
  // `kill_time` SIGKILL.
  std::chrono::milliseconds report_time = std::chrono::seconds(4);
  std::chrono::milliseconds kill_time   = std::chrono::seconds(1);
  // How often all processes are started again, with a new rendezvous and secret, after a failure that may not happen
  // again: a signal that was not sent to this process, or exit code 3.
  int restarts                               = 0;
  int restart_processes                      = 0;   // from the first restart on; 0: as before
  std::vector<std::string> restart_arguments = {};  // from the first restart on; empty: as before
};

// Runs a program once for each rank of a job on this machine, and waits for all of them. Each process has its rank, the
// size, the address of the rendezvous and a random secret in its environment; process 0 inherits the listening socket.
// The stdout of rank 0 goes to stdout. All other lines go to stderr with "[rank R] " before them. Signals that this
// process gets are passed on. When this process ends in any way, the others end too.
//
// Returns 0, or the exit code of the process that failed first, and prints which one that was: 128 + the signal if a
// signal ended it. Code 3, of a process whose peer has failed, counts only if there is no other. Throws Error(backend)
// if processes cannot be started. Starts threads; call it from the main thread, before others exist.
[[nodiscard]] int launch(const std::string& program, const std::vector<std::string>& arguments,
                         const LaunchOptions& options);

}  // namespace stepgraph::cli
