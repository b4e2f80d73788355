#include "backends/init_world.hpp"

#include <csignal>
#include <iostream>
#include <mutex>
#include <utility>

#ifdef STEPGRAPH_WITH_GLOO
#include "backends/gloo/world.hpp"
#endif
#ifdef STEPGRAPH_WITH_MPI
#include "backends/mpi/world.hpp"
#endif
#include "backends/process/socket.hpp"
#include "backends/process/watchdog.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

// Errors have been thrown before.
constexpr auto watchdog_margin = std::chrono::seconds(5);

// A write to a connection that the peer has closed is an error then, and not the end of the process. Gloo relies on it.
void ignore_broken_pipes() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

std::string_view remedy(std::string_view backend) {
  if (backend == "nccl")
    return "install the CUDA Toolkit and libnccl-dev, and configure with STEPGRAPH_WITH_CUDA=ON and "
           "STEPGRAPH_WITH_NCCL=ON";
  return backend == "mpi" ? "install libopenmpi-dev and configure with STEPGRAPH_WITH_MPI=ON"
                          : "install libgloo-dev and configure with STEPGRAPH_WITH_GLOO=ON";
}

}  // namespace

bool has_process_backend([[maybe_unused]] std::string_view backend) noexcept {
#ifdef STEPGRAPH_WITH_GLOO
  if (backend == "gloo") return true;
#endif
#ifdef STEPGRAPH_WITH_MPI
  if (backend == "mpi") return true;
#endif
#ifdef STEPGRAPH_WITH_NCCL
  if (backend == "nccl") return true;
#endif
  return false;
}

std::unique_ptr<ProcessWorld> init_world(std::string_view backend, const InitOptions& options) {
  if (backend != "gloo" && backend != "mpi" && backend != "nccl")
    throw Error(ErrorKind::config, str("backend '", backend, "': has no processes (known: gloo, mpi, nccl)"));
  if (!has_process_backend(backend))
    throw Error(ErrorKind::backend, str("backend ", backend, ": not in this build (", remedy(backend), ")"));
  ignore_broken_pipes();
  allow_many_files();
  // The first process that ends brings the end of the others. So each looks for the cause before any of them ends.
  std::mutex mutex;
  std::string cause;
  const auto look = [&] {
    const std::string found = options.explain_set_up ? options.explain_set_up() : "";
    const std::lock_guard lock(mutex);
    if (cause.empty()) cause = found;
    return cause;
  };
  const Watchdog first_look("", options.world.timeout, look);
  const auto time = options.world.timeout + watchdog_margin;
  const Watchdog watchdog("", time, [&, what = str("the set-up of the ", backend, " world has not ended after ")] {
    const std::string why = look();
    std::cerr << str("stepgraph: ", why, why.empty() ? "" : "; ", what, time.count(), " ms\n") << std::flush;
    end_process(3);
  });
#ifdef STEPGRAPH_WITH_MPI
  if (backend == "mpi") return std::make_unique<MpiWorld>(options.place, options.world);
#endif
#ifdef STEPGRAPH_WITH_NCCL
  if (backend == "nccl")
    return make_nccl_world(find_place(process_environment(), options.place), options.world, options.nccl);
#endif
#ifdef STEPGRAPH_WITH_GLOO
  return std::make_unique<GlooWorld>(find_place(process_environment(), options.place), options.world);
#else
  return nullptr;
#endif
}

std::unique_ptr<ProcessWorld> init_world(std::string_view backend, int rank, int size, std::string_view address,
                                         InitOptions options) {
  options.place.rank    = rank;
  options.place.size    = size;
  options.place.address = std::string(address);
  return init_world(backend, options);
}

}  // namespace stepgraph
