#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/process/socket.hpp"
#include "backends/process/verdict.hpp"

namespace stepgraph {

struct ControlOptions {
  int rank                          = 0;
  int size                          = 1;
  std::chrono::milliseconds timeout = std::chrono::seconds(30);  // comm.timeout_ms

  // All are called on the control thread, and must not call Control's waiting functions (fail, suspect, bye).
  std::function<Progress()> progress = {};  // what this process does; before every heartbeat, and at a verdict
  // The job has failed. Prints the line and writes what is known; the main thread learns of it afterwards.
  std::function<void(const Verdict&, const std::string& line)> on_verdict = {};
  // The main thread has not ended `unwind_time` after the verdict, or on_verdict has not: ends the process. In the
  // second case on another thread.
  std::function<void()> on_overdue = {};
  // A signal came (note_signal) and, for `signal_time`, no verdict: something wants this process to end. `then`: what
  // this process did when the signal came.
  std::function<void(const Progress& then)> on_signal            = {};
  std::function<void(int rank, const std::string& note)> on_note = {};  // another process has called tell()

  std::chrono::milliseconds unwind_time    = std::chrono::seconds(2);
  std::chrono::milliseconds leaving_time   = std::chrono::milliseconds(400);
  std::chrono::milliseconds suspicion_time = std::chrono::seconds(5);
  std::chrono::milliseconds signal_time    = std::chrono::milliseconds(300);
};

// Notices that a process of the job has failed, in every process, whatever its main thread does. A star: all processes
// send heartbeats to process 0, which sends its own to all of them. Process 0 alone judges the others (verdict.hpp) and
// sends the verdict to all. The others judge only process 0: its connection closed, or it was not heard for `timeout`.
//
// After a verdict every process writes what it knows, says so to process 0, and waits until all have, for
// `leaving_time` at most. Only then do connections close. So no process is blamed because it left early.
//
// One thread of its own. The functions can be called from any other thread.
class Control {
 public:
  explicit Control(ControlOptions options);
  // Without a verdict and without bye() the connections just close: to the others this process is gone.
  ~Control();
  Control(const Control&)            = delete;
  Control& operator=(const Control&) = delete;

  // The connection to another process: process 0 needs all of them within `timeout`, the others that to process 0.
  void connect(int rank, Connection connection);

  [[nodiscard]] std::optional<Verdict> verdict() const;
  [[nodiscard]] std::string line() const;  // of the verdict; empty: none
  [[nodiscard]] const Interrupt& interrupt() const noexcept {
    return interrupt_;
  }  // raised by the verdict, with its line

  // This process has failed; `by`: because another rank has aborted the run, which is then the one that failed. Returns
  // when the verdict has been given and written everywhere, or when that takes too long.
  void fail(const std::string& text, int by = -1);
  // Another process seems to have failed. Waits `suspicion_time` for the verdict; returns its line, or `text` if there
  // is none.
  [[nodiscard]] std::string suspect(int rank, const std::string& text);
  // Process 0: a process with this rank does not belong to the job.
  void misfit(int rank, const std::string& why);

  void tell(const std::string& note);  // to all other processes; not waited for
  void note_signal() noexcept;         // can be called by a signal handler

  // The normal end, after the last communication. False: a verdict came first, or some process has not said it in time.
  bool bye();

 private:
  enum class State {
    working,
    leaving,    // after a verdict: until all have written
    draining,   // process 0: until the others have closed
    departing,  // after bye(): until the connections are closed
    left
  };
  using Message = std::pair<int, Bytes>;  // the rank that sends it

  void run();
  void work(Deadline now);  // all that is due
  void take_posted(Deadline now);
  void add(int rank, Connection connection, Deadline now);
  void handle(int rank, unsigned events, Deadline now);
  void take(int rank, const Bytes& frame, Deadline now);
  void take_as_first(int rank, const Bytes& frame, Deadline now);
  void take_as_other(const Bytes& frame, Deadline now);
  void closed(int rank, Deadline now);
  void beat(Deadline now);
  void judge_all(Deadline now);
  void decide(Verdict verdict, Deadline now);
  void continue_leaving(Deadline now);
  void enter(State state);
  void send(int rank, const Bytes& message);
  void send_all(const Bytes& message, int except = 0);
  void post(Bytes message);
  void wake() noexcept;
  void call_overdue() noexcept;
  [[nodiscard]] Progress progress_now() const;
  [[nodiscard]] bool all_written() const;
  [[nodiscard]] bool all_closed() const;
  [[nodiscard]] int wait_ms(Deadline now) const;

  const ControlOptions options_;
  const std::chrono::milliseconds interval_;  // between heartbeats
  Descriptor events_;                         // epoll
  Descriptor wake_;                           // eventfd
  Descriptor signal_;                         // eventfd
  Interrupt interrupt_;
  std::atomic<bool> overdue_ = false;  // on_overdue was called

  // Of the thread.
  std::vector<Connection> connections_;  // by rank; others: only that to process 0
  std::vector<ProcessRecord> table_;     // by rank; others: only row 0 is used
  std::vector<bool> written_;
  State state_ = State::working;
  Deadline next_beat_, last_turn_, judge_from_, join_until_;
  Deadline state_until_   = Deadline::max();
  Deadline overdue_at_    = Deadline::max();
  Deadline signal_at_     = Deadline::max();
  Deadline stopped_until_ = {};  // process 0 was stopped: until the state of the others is known
  std::chrono::milliseconds stopped_for_{};
  Progress at_signal_ = {};
  int num_failures_   = 0;
  bool judge_due_     = false;  // something has happened, or a heartbeat was due

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<int, Connection>> new_connections_;
  std::vector<Bytes> posted_;       // messages of this process
  std::vector<Verdict> misfits_;    // to be decided
  std::optional<Verdict> verdict_;  // written by the thread
  std::string line_;
  State shown_state_ = State::working;
  bool clean_        = true;  // the normal end was complete
  bool bye_wanted_   = false;
  bool stop_         = false;

  std::thread thread_;
};

}  // namespace stepgraph
