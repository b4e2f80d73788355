#include "backends/loopback/world.hpp"

#include "backends/loopback/operation.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {

LoopbackWorld::LoopbackWorld(int num_ranks) : num_ranks_(num_ranks) {
  if (num_ranks < 1) throw Error(ErrorKind::config, str("loopback: ", num_ranks, " ranks (at least 1)"));
}

void LoopbackWorld::communicate(const Context& context, const Exchange& exchange) {
  loopback::Operation(context, exchange).run();
}

}  // namespace stepgraph
