#include "tools/stepgraph/worlds.hpp"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <new>

#ifdef STEPGRAPH_WITH_CUDA
#include "backends/cuda/world.hpp"
#endif
#include "backends/init_world.hpp"
#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/peers.hpp"
#include "graphs/layout/layout.hpp"
#include "tools/stepgraph/interrupt.hpp"
#include "tools/stepgraph/output.hpp"

namespace stepgraph::cli {

std::unique_ptr<World> make_world(std::string_view backend, int num_ranks) {
  if (backend == "loopback") return std::make_unique<LoopbackWorld>(num_ranks);
#ifdef STEPGRAPH_WITH_CUDA
  return std::make_unique<CudaWorld>(num_ranks);
#else
  throw Error(ErrorKind::backend, str("backend ", backend,
                                      ": not in this build (configure with STEPGRAPH_WITH_CUDA=ON, "
                                      "or use backend loopback)"));
#endif
}

namespace {

// Where the ranks of a failed job write what they did last: the same folder for all of them.
std::string flight_folder() {
  if (const char* const given = std::getenv("STEPGRAPH_FLIGHT")) return given;
  return "stepgraph-flight";
}

// Whether all processes have this error, as after a result that all of them have looked at. They then end the job as
// usual, and process 0 prints it. An error of one process only is a failure of the job.
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

PlaceOverrides place_of(const WorldSpec& world) {
  PlaceOverrides place{.section = "world."};
  if (world.rank >= 0) place.rank = world.rank;
  if (world.size > 0) place.size = world.size;
  if (!world.address.empty()) place.address = world.address;
  return place;
}

void in_process_world(const Config& config, const std::function<void(World&)>& work) {
  constexpr int least_ms = 1000;  // heartbeats come every 100 ms at best, and a busy machine is late
  if (config.timeout_ms < least_ms)
    throw Error(ErrorKind::config, str("comm.timeout_ms: is ", config.timeout_ms, " (", least_ms,
                                       " or more with backend ", config.backend, ")"));
  InitOptions options;
  options.place               = place_of(config.world);
  options.world.timeout       = std::chrono::milliseconds(config.timeout_ms);
  options.world.flight_folder = flight_folder();
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
  std::unique_ptr<ProcessWorld> world;
  try {
    world = init_world(config.backend, options);
  } catch (const Error& error) {
    if (printed) throw Exit{exit_code(error.kind())};
    throw;
  }
  const SigtermCall told_to_end([](void* data) { static_cast<ProcessWorld*>(data)->note_signal(); }, world.get());
  const auto tell = [&](const char* text) {
    if (!world->fail(text)) throw Exit{3};  // printed already
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
      if (world->place().rank != 0) throw Exit{exit_code(error.kind())};
      throw;
    }
    tell(error.what());
    throw;
  } catch (const std::bad_alloc&) {
    tell("out of memory");
    throw;
  } catch (const Interrupted&) {  // all processes have agreed to end early
    world->end();
    throw;
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

void in_world(const Config& config, const std::function<void(World&)>& work) {
  if (config.backend == "gloo" || config.backend == "mpi") return in_process_world(config, work);
  const std::unique_ptr<World> world = make_world(config.backend, Layout(config.plan.layout).num_ranks());
  work(*world);
}

void set_capture([[maybe_unused]] World& world, [[maybe_unused]] bool capture) {
#ifdef STEPGRAPH_WITH_CUDA
  if (auto* const cuda = dynamic_cast<CudaWorld*>(&world)) cuda->set_capture(capture);
#endif
}

}  // namespace stepgraph::cli
