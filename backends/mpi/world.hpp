#pragma once
#include "backends/process/message_world.hpp"

namespace stepgraph {

// One process of a world whose processes exchange messages by MPI; mpirun or srun has started them. MPI tells rank and
// size, and distributes the address and the secret of the job. The constructor is collective. It starts MPI if that is
// not done yet; then the destructor ends MPI, which can be started only once in a process. One MpiWorld at a time.
//
// After a failure of the job MPI is not called any more: end the process.
class MpiWorld final : public MessageWorld {
 public:
  explicit MpiWorld(const PlaceOverrides& overrides = {}, const ProcessWorldOptions& options = {});
  ~MpiWorld() override;
  [[nodiscard]] std::unique_ptr<LibraryAllReduce> library_all_reduce() override;

 private:
  struct Started;
  MpiWorld(const Started& started, const ProcessWorldOptions& options);

  bool ends_mpi_;
};

}  // namespace stepgraph
