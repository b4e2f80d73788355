#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "backends/nccl/library.hpp"
#include "backends/nccl/world.hpp"

namespace stepgraph::nccl {

// The communicators of a process, with the device and the library that they are on. Internal to backends/nccl/. Owned
// by the base of NcclWorld, so it lives until the control thread has ended.
class NcclLinks final : public Links {
 public:
  NcclLinks(Job& job, ProcessWorld::Hooks hooks, std::chrono::milliseconds timeout, NcclWorld::Parts parts,
            bool capture);

  // What an abort ends is made again by recover(), and so is what is registered after an abort. That holds in recover()
  // too: a peer that has recovered can abort its run meanwhile.
  void connect(const Connections& connections) override;
  void interrupt(Interruption kind, const std::string& why) noexcept override;
  void recover(std::uint64_t generation) override;
  void close() override;
  [[nodiscard]] Device* device() const noexcept override { return parts_.device.get(); }

  // Groups for collectives, of which only some members had messages before. Collective among their members.
  void complete(std::span<const NumberedGroup> groups);

  // A communicator of the library. That of a group whose members do not all use it has all ranks of the world.
  struct Target {
    std::uint32_t number;
    bool has_all_ranks;
  };
  [[nodiscard]] Target target(const Exchange& exchange) const;

  [[nodiscard]] Library& library() noexcept { return *parts_.library; }
  // Ends a call of the library that has failed: throws the cause, which may become known soon.
  [[noreturn]] void fail(const std::string& problem);
  // An error of NCCL that was first seen `grace` ago or earlier. Any thread.
  [[nodiscard]] std::optional<std::string> old_failure(std::chrono::milliseconds grace);

  bool capture        = true;   // this process can
  bool agreed_capture = false;  // of the program that is being made
  void set_capture(bool on);

 private:
  struct Member {  // this process, in a communicator
    std::uint32_t number;
    std::string name;
    int leader;  // the process that makes the id
    int rank, size;
  };
  [[nodiscard]] Member member(const NumberedGroup& group) const;
  void add(std::vector<Member> fresh);
  void make(const std::vector<Member>& members);
  void make_unless_aborted(const std::vector<Member>& members);
  [[nodiscard]] Patience patience() const;
  [[nodiscard]] bool is_aborted();  // throws after a failure

  Job& job_;
  const ProcessWorld::Hooks hooks_;
  const std::chrono::milliseconds timeout_;
  NcclWorld::Parts parts_;
  std::vector<Member> members_;      // all of them, by number
  std::set<std::uint32_t> partial_;  // numbers of groups whose messages use a communicator of all ranks
  std::uint64_t generation_ = 0;

  std::mutex mutex_;                // guards the rest
  std::optional<std::string> why_;  // interrupted
  bool failed_                          = false;
  std::unique_ptr<Interrupt> interrupt_ = std::make_unique<Interrupt>();  // the same, for waits
  Deadline next_look_ = {}, first_seen_ = {};
  std::optional<std::string> seen_;  // an error of NCCL
};

}  // namespace stepgraph::nccl
