#include "tools/stepgraph/worlds.hpp"

#ifdef STEPGRAPH_WITH_CUDA
#include "backends/cuda/world.hpp"
#endif
#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"

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

void set_capture([[maybe_unused]] World& world, [[maybe_unused]] bool capture) {
#ifdef STEPGRAPH_WITH_CUDA
  if (auto* const cuda = dynamic_cast<CudaWorld*>(&world)) cuda->set_capture(capture);
#endif
}

}  // namespace stepgraph::cli
