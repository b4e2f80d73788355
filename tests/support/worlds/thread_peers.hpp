#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "engine/run/peers.hpp"

namespace stepgraph::testing {

// Host data between the processes of a world, which are threads here. All members are thread-safe; each process has one
// of the Peers. A call gives up after five minutes, so that no test hangs.
class PeersHub {
 public:
  explicit PeersHub(int num_processes);

  [[nodiscard]] Peers& of(int process) { return members_[static_cast<std::size_t>(process)]; }
  void fail(const std::string& why);  // ends all calls; the first reason is kept

 private:
  struct Letter {
    std::string call;  // what the sender is about to do
    Bytes bytes;
  };
  class Member final : public Peers {
   public:
    Member(PeersHub& hub, int process) : hub_(hub), process_(process) {}
    [[nodiscard]] int process() const noexcept override { return process_; }
    [[nodiscard]] int num_processes() const noexcept override { return static_cast<int>(hub_.up_.size()); }
    [[nodiscard]] std::vector<Bytes> gather(std::string_view subject, Bytes mine) override;
    [[nodiscard]] Bytes broadcast(std::string_view subject, Bytes of_first) override;

   private:
    PeersHub& hub_;
    int process_;
  };

  void put(std::deque<Letter>& box, Letter letter);
  [[nodiscard]] Letter take(std::deque<Letter>& box, const std::string& call);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Letter>> up_, down_;  // to and from process 0, by process
  std::string broken_;
  std::deque<Member> members_;
};

}  // namespace stepgraph::testing
