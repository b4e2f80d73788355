#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backends/process/agreement.hpp"
#include "backends/process/job.hpp"
#include "backends/process/library_all_reduce.hpp"
#include "backends/process/links.hpp"
#include "engine/run/device.hpp"
#include "engine/run/run_view.hpp"
#include "engine/run/world.hpp"

namespace stepgraph {

struct ProcessWorldOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(30);  // comm.timeout_ms
  std::string version               = {};                        // of the program; empty: that of this library
  std::string flight_folder         = {};                        // for the flight recorder's files; empty: none

  // On the control thread. The job has failed: by default, prints the line to stderr.
  std::function<void(const Verdict& verdict, const std::string& line)> on_failure = {};
  // After that, and after the flight file, for example to remove temporary files. Within 100 ms.
  std::function<void()> after_report = {};
  // The main thread has not ended 2 s after that: by default, removes temporary files and ends the process with
  // status 3.
  std::function<void()> on_overdue = {};
  // A signal was noted, and no failure has followed: something wants the job to end. If this process has waited for a
  // peer since then, a line is printed and the flight file is written before.
  std::function<void()> on_signal = {};
};

// The ranks of one process of a job: what all worlds of processes have in common. Derived worlds communicate, over the
// links that they make.
//
// Constructor and destructor are collective: all processes of the job make the world, and end it. A destructor that
// runs because of an exception reports a failure of this process instead.
class ProcessWorld : public World {
 public:
  // What links ask of their world. Any thread.
  struct Hooks {
    // A communication with this rank has failed; -1: with some rank. The cause may be known soon: an abort, or a
    // verdict. Returns the text of the error to throw.
    std::function<std::string(Rank peer, const std::string& problem)> explain;
    // Whether no thread of this process computes: then a thread that waits can use the core.
    std::function<bool()> is_idle;
    // Why the last run, or the next one, was aborted; in Links::recover(): a run of the new generation, by a peer that
    // has recovered already. None: it was not.
    std::function<std::optional<std::string>()> abort_reason;
  };
  using MakeLinks = std::function<std::unique_ptr<Links>(Job& job, Hooks hooks)>;

  // `ranks`: of this process. Together the processes of the job have the ranks 0 to num_ranks - 1.
  ProcessWorld(const ProcessPlace& place, int num_ranks, RankSet ranks, ProcessWorldOptions options,
               const MakeLinks& make_links);
  // One rank in each process.
  ProcessWorld(const ProcessPlace& place, ProcessWorldOptions options, const MakeLinks& make_links)
      : ProcessWorld(place, place.size, Rank{place.rank}, std::move(options), make_links) {}
  ~ProcessWorld() override;
  ProcessWorld(const ProcessWorld&)            = delete;
  ProcessWorld& operator=(const ProcessWorld&) = delete;

  [[nodiscard]] int num_ranks() const override { return num_ranks_; }
  [[nodiscard]] RankSet local_ranks() const override { return ranks_; }
  [[nodiscard]] std::vector<std::uint32_t> prepare(const Graph& graph, std::span<const Communicator> groups) override;
  [[nodiscard]] Peers* peers() override { return &job_->peers(); }
  void begin_step(std::shared_ptr<const RunView> run) override;
  void end_step() noexcept override;
  [[nodiscard]] std::optional<std::string> failure() const override;
  void abort(std::string_view why) noexcept override;

  [[nodiscard]] const ProcessPlace& place() const noexcept { return job_->place(); }
  [[nodiscard]] Job& job() noexcept { return *job_; }

  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept { return options_.timeout; }

  // The library's own all-reduce, for benchmarks. Collective. Must not outlive the world. Null: it has none.
  [[nodiscard]] virtual std::unique_ptr<LibraryAllReduce> library_all_reduce() { return nullptr; }

  // This process has failed. All others are told, and end with this text. False: another process has failed before, or
  // has aborted the run that failed here; failure() is about that one.
  bool fail(const std::string& text) noexcept;

  void note_signal() noexcept;  // this process was told to end; can be called by a signal handler

  // The normal end, which the destructor makes otherwise. Collective. False: the job has failed.
  bool end() noexcept;

 protected:
  [[nodiscard]] Links& links() noexcept { return *links_; }
  [[nodiscard]] std::uint64_t run() const noexcept { return run_; }  // the number of the run; not from other threads
  // Why the run that is under way cannot go on: a verdict, or an abort by any process. Any thread.
  [[nodiscard]] std::optional<std::string> interruption() const;
  [[nodiscard]] std::chrono::milliseconds grace() const;  // for the cause of an error to become known

 private:
  [[nodiscard]] Progress progress() const;
  void add_device_progress(Progress& progress, const Graph& graph) const;
  [[nodiscard]] std::optional<DeviceProgress> device_progress(const Graph& graph) const;
  void take_verdict(const Verdict& verdict, const std::string& line);
  void take_signal(const Progress& then);
  void record_flight(const std::string& line) const;
  void write_flight(const std::string& line) const;
  void take_note(int rank, const std::string& note);
  [[nodiscard]] std::string explain(Rank peer, const std::string& problem);
  [[nodiscard]] bool is_idle() const;
  [[nodiscard]] bool is_aborted() const;
  [[nodiscard]] bool next_is_aborted() const;
  [[nodiscard]] std::optional<std::string> abort_reason() const;
  void recover();
  void recover_links();
  void tell_end();
  [[nodiscard]] Patience patience() const;

  const int process_, num_processes_;
  const int num_ranks_;
  const RankSet ranks_;
  const ProcessWorldOptions options_;
  const int num_exceptions_;  // under way when the world was made
  std::optional<bool> ended_;

  // A generation of runs ends with an aborted one. Processes learn of an abort at different times, some before they
  // begin that run: it then fails there too. All begin the next generation together; links are made after that, so a
  // peer can abort a run of it before they are all made here.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t generation_  = 0;
  std::uint64_t good_from_   = 0;  // earlier generations were aborted; greater than generation_: recovery is needed
  std::uint64_t aborted_run_ = 0;
  int aborted_by_            = -1;  // the process
  std::string why_aborted_   = {};
  std::string verdict_       = {};       // empty: none
  std::string job_id_        = {};       // empty: not all processes have joined yet
  const Job* live_job_       = nullptr;  // for the control thread, once all processes have joined
  std::uint64_t run_         = 0;        // written between runs only, with mutex_
  std::shared_ptr<const RunView> view_;  // of the run that is under way

  Agreement agreement_;
  Links* live_links_ = nullptr;  // for the control thread, once they are made; with mutex_
  std::unique_ptr<Job> job_;
  std::unique_ptr<Links> links_;
};

// Of this library: processes with another version do not fit into a job.
[[nodiscard]] std::string_view program_version() noexcept;

}  // namespace stepgraph
