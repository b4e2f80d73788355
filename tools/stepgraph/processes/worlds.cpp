#include "tools/stepgraph/processes/worlds.hpp"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#ifdef STEPGRAPH_WITH_CUDA
#include "backends/cuda/devices.hpp"
#include "backends/cuda/world.hpp"
#endif
#include "backends/init_world.hpp"
#include "backends/loopback/world.hpp"
#include "backends/nccl/world.hpp"
#include "backends/process/siblings.hpp"
#include "backends/process/watchdog.hpp"
#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"
#include "engine/run/peers.hpp"
#include "graphs/layout/layout.hpp"
#include "tools/stepgraph/terminal/interrupt.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {

std::unique_ptr<World> make_world(std::string_view backend, int num_ranks,
                                  [[maybe_unused]] const std::vector<int>& devices, [[maybe_unused]] bool pinned) {
  if (backend == "loopback") return std::make_unique<LoopbackWorld>(num_ranks);
#ifdef STEPGRAPH_WITH_CUDA
  return std::make_unique<CudaWorld>(num_ranks, CudaWorldOptions{.devices = devices, .pinned = pinned});
#else
  throw Error(ErrorKind::backend, str("backend ", backend,
                                      ": not in this build (configure with STEPGRAPH_WITH_CUDA=ON, "
                                      "or use backend loopback)"));
#endif
}

std::string device_name([[maybe_unused]] const std::vector<int>& devices) {
#ifdef STEPGRAPH_WITH_CUDA
  const std::vector<CudaDevice> all = cuda_devices();
  const auto number                 = static_cast<std::size_t>(devices.empty() ? 0 : devices.front());
  if (number < all.size()) return all[number].name;
  throw Error(ErrorKind::backend,
              str("devices: ", number, ", but this machine has ", all.size(), " (0 to ", all.size() - 1, ")"));
#else
  throw Error(ErrorKind::backend, "this build has no CUDA (configure with STEPGRAPH_WITH_CUDA=ON)");
#endif
}

namespace {

// Where the ranks of a failed job write what they did last: the same folder for all of them.
std::string flight_folder() {
  if (const char* const given = std::getenv("STEPGRAPH_FLIGHT")) return given;
  return "stepgraph-flight";
}

// Whether all processes have this error, as after a result that all of them have looked at. They then end the job as
// usual. What is wrong with the config, or differs between processes, is printed by each of them; the rest by process
// 0. An error of one process only is a failure of the job.
bool all_have(ProcessWorld& world, const std::string& text) {
  constexpr auto time = std::chrono::seconds(1);  // for the slowest of them
  if (world.failure()) return false;
  try {
    Job& job = world.job();
    const Patience patience{Clock::now() + time, &job.control().interrupt()};
    const auto key_of = [](int rank) { return str("error of rank ", rank); };
    job.store().set(key_of(job.rank()), to_bytes(text), patience);
    for (int rank = 0; rank < job.size(); ++rank)
      if (to_text(job.store().get(key_of(rank), patience)) != text) return false;
    return true;
  } catch (const Error&) {  // it runs on, or has failed
    return false;
  }
}

// SIGTERM in a process of a job: mpirun sends it when another process has died, and a second later SIGKILL. So it does
// not end the process before it has learnt of the failure and has reported it (control.hpp). In the set-up, where it
// may not learn of it, it ends after 600 ms.
class SigtermWatch {
 public:
  // `reported`: whether a failure was. `what`: the phase until made() is called, for a message; `explain`: which
  // process has ended then, if it is known.
  SigtermWatch(std::string what, const std::atomic<bool>& reported, std::function<std::string()> explain)
      : what_(std::move(what)),
        reported_(reported),
        explain_(std::move(explain)),
        thread_([this] { run(); }),
        call_([](void* data) { static_cast<SigtermWatch*>(data)->wake(); }, this) {}
  ~SigtermWatch() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    wake();
    thread_.join();
  }
  SigtermWatch(const SigtermWatch&)            = delete;
  SigtermWatch& operator=(const SigtermWatch&) = delete;

  void made(ProcessWorld& world) {  // must outlive this
    const std::lock_guard lock(mutex_);
    world_ = &world;
    changed_.notify_all();
  }

  // The process is to end at once.
  [[noreturn]] static void end() { end_process(128 + SIGTERM); }

 private:
  void wake() noexcept {
    const std::uint64_t one = 1;
    static_cast<void>(!::write(event_.get(), &one, sizeof one));
  }

  void run() {
    for (std::uint64_t count = 0;;) {
      const ssize_t done = ::read(event_.get(), &count, sizeof count);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) return;
      const std::string why = explain_();  // now: soon others end too
      std::unique_lock lock(mutex_);
      const Deadline until = Clock::now() + std::chrono::milliseconds(200);
      while (!stop_ && world_ == nullptr && Clock::now() < until)
        changed_.wait_for(lock, std::chrono::milliseconds(10));
      if (stop_) return;
      if (world_ != nullptr) {
        world_->note_signal();
      } else if (!reported_) {
        std::cerr << str("stepgraph: ", why, why.empty() ? "" : "; ", "told to end (SIGTERM) in ", what_, "\n")
                  << std::flush;
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::milliseconds(400));  // mpirun kills the others after the first end
        end();
      }
    }
  }

  const std::string what_;
  const std::atomic<bool>& reported_;
  const std::function<std::string()> explain_;
  Descriptor event_{::eventfd(0, EFD_CLOEXEC)};
  std::mutex mutex_;
  std::condition_variable changed_;
  ProcessWorld* world_ = nullptr;
  bool stop_           = false;
  std::thread thread_;
  SigtermCall call_;  // ends first
};

void in_process_world(const WorldOptions& given, const Config& config, const std::function<void(World&)>& work) {
  constexpr int least_ms = 1000;  // heartbeats come every 100 ms at best, and a busy machine is late
  if (config.timeout_ms < least_ms)
    throw Error(ErrorKind::config, str("comm.timeout_ms: is ", config.timeout_ms, " (", least_ms,
                                       " or more with backend ", config.backend, ")"));
  InitOptions options;
  options.place               = place_of(config.world);
  options.world.timeout       = std::chrono::milliseconds(config.timeout_ms);
  options.nccl                = {.devices   = config.devices.value_or(std::vector<int>{}),
                                 .exact     = config.exact,
                                 .pinned    = config.plan.offload.pinned,
                                 .algorithm = std::string(to_string(config.nccl_algorithm))};
  options.world.flight_folder = given.flight.value_or(flight_folder());
  // Why the job has failed. If this process is the cause, it prints its own error.
  std::atomic<bool> printed = false;
  options.world.on_failure  = [&printed, folder = options.world.flight_folder](const Verdict& verdict,
                                                                              const std::string& line) {
    if (verdict.kind == VerdictKind::failed && line.starts_with(str("rank ", verdict.rank, " (this process)"))) return;
    const bool has_flight = !folder.empty() && verdict.kind != VerdictKind::misfit;
    std::cerr << str("stepgraph: ", line, has_flight ? str("; see: stepgraph flight ", folder) : "", "\n")
              << std::flush;
    printed = true;
  };
  options.world.after_report = [&given] {
    remove_own_partials();  // mpirun may kill this process before its main thread removes them
    for (const std::string& path : given.to_write) {
      // The lock of a process that is dying right now is still there for a moment.
      for (int attempt = 0; !remove_leftovers(path) && attempt < 5; ++attempt)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  };
  options.world.on_signal = [] {
    if (Interrupt::exists()) return;  // the run ends after its step
    std::cerr << "stepgraph: told to end (SIGTERM)\n" << std::flush;
    SigtermWatch::end();
  };
  std::unique_ptr<ProcessWorld> world;
  std::optional<Siblings> siblings;
  if (config.backend == "mpi") siblings = Siblings::of_mpirun(process_environment());
  options.explain_set_up = [&siblings] { return siblings ? siblings->missing() : std::string(); };
  SigtermWatch sigterm(str("the set-up of the ", config.backend, " world"), printed, options.explain_set_up);
  try {
    world = init_world(config.backend, options);
  } catch (const Error& error) {
    if (printed) throw Exit{exit_code(error.kind())};
    throw;
  }
  sigterm.made(*world);
  const auto tell = [&](const char* text) {
    if (!world->fail(text) || printed) throw Exit{3};
  };
  try {
    if (const int num_ranks = Layout(config.plan.layout).num_ranks(); world->num_ranks() != num_ranks) {
      throw Error(ErrorKind::config,
                  str("layout: has ", num_ranks, num_ranks == 1 ? " rank" : " ranks", ", but the job has ",
                      world->num_ranks(), world->num_ranks() == 1 ? " process" : " processes", " (as many)"));
    }
    work(*world);
  } catch (const Error& error) {
    if (all_have(*world, error.what())) {
      world->end();
      if (world->place().rank != 0 && error.kind() != ErrorKind::config) throw Exit{exit_code(error.kind())};
      throw;
    }
    tell(error.what());
    throw;
  } catch (const std::bad_alloc&) {
    tell("out of memory");
    throw;
  } catch (const Interrupted& end) {  // all processes have agreed to end early
    // Before the end of MPI, which mpirun does not let end after a signal to it.
    if (world->place().rank == 0) std::cerr << str("stepgraph ", given.command, ": ", end.what(), "\n") << std::flush;
    world->end();
    throw Exit{128 + end.signal};
  } catch (const std::exception& error) {
    tell(error.what());
    throw;
  } catch (const OutputClosed&) {  // the same
    world->end();
    throw;
  }
  if (!world->end()) throw Exit{3};  // a process has failed after its work; printed already
}

}  // namespace

PlaceOverrides place_of(const WorldSpec& world) {
  PlaceOverrides place{.section = "world."};
  if (world.rank >= 0) place.rank = world.rank;
  if (world.size > 0) place.size = world.size;
  if (!world.address.empty()) place.address = world.address;
  return place;
}

void add_flight_option(Command command, std::optional<std::string>& folder) {
  command.option("--flight", folder,
                 "Over processes: the folder for the reports of all ranks if the job fails, for stepgraph flight "
                 "(default: stepgraph-flight, or the variable STEPGRAPH_FLIGHT; empty: none)");
}

void in_world(const WorldOptions& options, const Config& config, const std::function<void(World&)>& work) {
  if (has_processes(config.backend)) return in_process_world(options, config, work);
  if (const std::optional<RankOfSize> place = launched_among(process_environment()))
    throw Error(ErrorKind::config, str("backend: is ", config.backend, ", but this is process ", place->rank, " of ",
                                       place->size, " (gloo, mpi or nccl; or start one process)"));
  const std::unique_ptr<World> world =
      make_world(config.backend, Layout(config.plan.layout).num_ranks(), config.devices.value_or(std::vector<int>{0}),
                 config.plan.offload.pinned);
  work(*world);
}

void set_capture(World& world, bool capture) {
#ifdef STEPGRAPH_WITH_CUDA
  if (auto* const cuda = dynamic_cast<CudaWorld*>(&world)) cuda->set_capture(capture);
#endif
  if (auto* const nccl = dynamic_cast<NcclWorld*>(&world)) nccl->set_capture(capture);
}

}  // namespace stepgraph::cli
