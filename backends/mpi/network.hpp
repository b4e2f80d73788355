#pragma once
#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "backends/process/job.hpp"
#include "backends/process/transport.hpp"
#include "backends/process/world.hpp"

namespace stepgraph {

// Messages by MPI. One rank in each process: its rank in MPI_COMM_WORLD. Each group has an MPI communicator.
//
// One thread at a time is in MPI. Of the threads that wait, one leads: it tests the requests of all of them. The others
// sleep until theirs is done, or until the leader has gone. So communication goes on while other threads compute,
// without a thread of its own. After a failure MPI is never called again.
class MpiNetwork final : public Network {
 public:
  MpiNetwork(Job& job, ProcessWorld::Hooks hooks);
  ~MpiNetwork() override;
  MpiNetwork(const MpiNetwork&)            = delete;
  MpiNetwork& operator=(const MpiNetwork&) = delete;

  [[nodiscard]] Request send(Rank from, Rank to, std::uint64_t key, std::span<const std::byte> bytes) override;
  [[nodiscard]] Request receive(Rank from, Rank to, std::uint64_t key, std::span<std::byte> bytes) override;
  void wait(Request request) override;

  void connect(const Connections& connections) override;
  void interrupt(Interruption kind, const std::string& why) noexcept override;
  void drop_requests() noexcept override;
  void recover(std::uint64_t generation) override;
  void close() override;

 private:
  struct Group {
    MPI_Comm comm               = MPI_COMM_NULL;
    std::map<Rank, int> rank_in = {};  // empty: the rank itself
  };
  struct Message {
    bool sends = false, done = false, cancelled = false;
    int error = MPI_SUCCESS;
    Rank peer{-1};
    std::thread::id thread = {};
  };
  using Lock = std::unique_lock<std::mutex>;
  class Pause;

  [[nodiscard]] Request post(bool sends, Rank peer, std::uint64_t key, void* data, std::size_t size);
  [[nodiscard]] int tag_of(const MessageKey& key) const noexcept;
  void add_group(std::uint32_t number, MPI_Comm comm, std::map<Rank, int> rank_in);
  [[nodiscard]] bool progress();                                     // with mutex_; whether some message was done
  [[nodiscard]] bool receive_stray(const Group& group, int source);  // with mutex_; whether there was one
  void drain();                                                      // a thread, between an abort and recover()
  void stop_draining() noexcept;
  void check(int code, const char* doing, Rank peer = Rank{-1});  // with mutex_
  void throw_if_interrupted();

  Job& job_;
  const ProcessWorld::Hooks hooks_;
  MPI_Comm world_    = MPI_COMM_NULL;  // a copy of MPI's
  int tag_turn_bits_ = 0, tag_step_bits_ = 0;

  std::mutex mutex_;  // for MPI, and for what follows
  std::condition_variable changed_;
  bool leading_ = false;
  std::map<std::uint32_t, Group> groups_;
  std::unordered_map<std::uint64_t, Message> messages_;
  std::vector<MPI_Request> requests_;  // under way
  std::vector<std::uint64_t> ids_;     // theirs
  std::uint64_t last_ = 0;
  std::vector<std::uint64_t> num_sent_, num_received_;  // by rank, since the beginning
  std::vector<int> indices_;                            // of MPI_Testsome
  std::vector<MPI_Status> statuses_;

  // Set without mutex_: a thread that holds it may hang in MPI.
  std::atomic<bool> interrupted_ = false, failed_ = false;
  std::atomic<bool> undrained_ = false;  // there is no thread for drain()
  std::mutex why_mutex_;
  std::string why_;

  std::atomic<bool> drains_ = false;
  std::thread drainer_;
};

}  // namespace stepgraph
