#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/library.hpp"

// NCCL between processes that are threads of one process. It is stricter than NCCL: a call that breaks a rule of NCCL
// is an error here, and not a hang or a wrong result. A group returns when all its calls are complete.
namespace stepgraph::testing {

class EmulatedNccl;

// What the libraries of all processes share. All members are thread-safe.
class EmulatedNetwork {
 public:
  // Waits end after this long: a hang is an error.
  std::chrono::milliseconds patience = std::chrono::seconds(60);

 private:
  friend class EmulatedNccl;

  // A call that was made and is not complete. Its process waits for it.
  struct Posted {
    const nccl::Call* call;
    bool joins;  // it is in one group with the collective before it
    bool done         = false;
    std::string error = {};
  };
  using PostedPtr = std::shared_ptr<Posted>;
  struct Communicator {
    int size        = 0;
    int num_members = 0;                                                   // that have come
    bool broken     = false;                                               // a member has aborted it
    std::vector<std::deque<PostedPtr>> collectives;                        // by member
    std::map<std::pair<int, int>, std::deque<PostedPtr>> sends, receives;  // by sender and receiver
  };
  void match(Communicator& communicator);
  static void execute(std::span<const PostedPtr> members);

  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::uint64_t last_id_ = 0;
  std::map<nccl::Library::Id, std::shared_ptr<Communicator>> communicators_;
};

// NCCL of one process.
class EmulatedNccl final : public nccl::Library {
 public:
  explicit EmulatedNccl(EmulatedNetwork& network) : network_(network) {}

  [[nodiscard]] Id make_id() override;
  void make(std::span<const New> communicators, const Patience& patience) override;
  void group(std::span<const Grouped> calls) override;
  void local(const nccl::Call& call, const DeviceQueue& queue) override;
  [[nodiscard]] std::optional<std::string> failure() override;
  void abort() noexcept override;
  void reset() override;
  void close() override;

  // What the test makes it do. Set before the call.
  std::atomic<bool> fails_in_group{false};   // the next group throws
  std::atomic<bool> silent_in_group{false};  // groups do not take place, and wait for the abort
  std::atomic<bool> silent_in_make{false};   // communicators are never made
  std::atomic<bool> has_failed{false};       // an asynchronous error
  std::function<void()> before_group;        // for delays
  std::function<void()> after_join;          // likewise: in make(), when peers need not wait for this process any more

  // What it was asked for, by the thread of its process.
  struct Made {
    std::uint32_t number;
    int size;
    std::string name;
  };
  struct Logged {
    std::uint32_t communicator;
    nccl::Call call;
  };
  std::vector<Made> made;
  std::vector<std::vector<Logged>> groups;
  int num_resets = 0;
  bool closed    = false;
  [[nodiscard]] bool aborted();

 private:
  struct Joined {
    std::shared_ptr<EmulatedNetwork::Communicator> communicator;
    int rank;
  };
  template <class Holds>
  void wait(std::unique_lock<std::mutex>& lock, const Patience& patience, const std::string& doing, const Holds& holds);
  void check(const Grouped& each) const;
  void check_apart(std::span<const Grouped> calls) const;

  EmulatedNetwork& network_;
  // With network_.mutex_.
  std::map<std::uint32_t, Joined> joined_;  // by number
  bool aborted_ = false;
};

}  // namespace stepgraph::testing
