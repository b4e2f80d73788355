#include "tools/stepgraph/worlds.hpp"

#ifdef STEPGRAPH_WITH_CUDA
#include "backends/cuda/world.hpp"
#endif
#include "backends/loopback/world.hpp"
#include "engine/error.hpp"

namespace stepgraph::cli {

std::unique_ptr<World> make_world(std::string_view backend, int num_ranks,
                                  [[maybe_unused]] const WorldOptions& options) {
  if (backend == "loopback") return std::make_unique<LoopbackWorld>(num_ranks);
#ifdef STEPGRAPH_WITH_CUDA
  return std::make_unique<CudaWorld>(num_ranks, CudaWorldOptions{.capture = options.capture});
#else
  throw Error(ErrorKind::backend, str("backend ", backend,
                                      ": not in this build (configure with STEPGRAPH_WITH_CUDA=ON; "
                                      "or backend loopback)"));
#endif
}

}  // namespace stepgraph::cli
