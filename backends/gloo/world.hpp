#pragma once
#include "backends/process/message_world.hpp"

namespace stepgraph {

// One process of a world whose processes exchange messages by Gloo, over TCP. The constructor is collective. It throws,
// within the time-out, if not all processes come: Error(config) if they do not fit together, else Error(backend).
// Gloo listens on the loopback address if that is the address of the job, else on the address that leads to process 0,
// or on the interface GLOO_SOCKET_IFNAME.
class GlooWorld final : public MessageWorld {
 public:
  explicit GlooWorld(const ProcessPlace& place, ProcessWorldOptions options = {});
  [[nodiscard]] std::unique_ptr<LibraryAllReduce> library_all_reduce() override;
};

}  // namespace stepgraph
