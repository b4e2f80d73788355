#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "backends/nccl/calls.hpp"

namespace stepgraph::nccl {

// The phases of one part while they are built, and its workspace. Memory that NCCL cannot use as it lies is packed into
// workspace before a group, and unpacked after it.
class PhaseBuilder {
 public:
  static constexpr std::int64_t alignment = 64;  // of blocks in the workspace, and of the workspace

  [[nodiscard]] static std::int64_t round_up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }

  // Of all blocks up to now; whole blocks.
  [[nodiscard]] std::int64_t workspace_bytes() const noexcept { return most_; }

 protected:
  // `workspace` is aligned. Nothing is read or written there, so it can be an address without memory.
  PhaseBuilder(DType type, std::byte* workspace) noexcept
      : element_(static_cast<std::uintptr_t>(size_bytes(type))), workspace_(workspace) {}

  // The phase that calls are added to.
  [[nodiscard]] Phase& phase();
  // What follows runs after the group. First of all, what the group has brought is unpacked.
  void next_phase();
  // All phases, without empty ones at the end.
  [[nodiscard]] std::vector<Phase> finish();

  std::byte* take(std::int64_t bytes);  // a block of the workspace
  void free_workspace() { next_ = 0; }  // following calls may use all blocks again

  // Rows of equal length and distance are one call.
  void copy(const Stretch& from, const Stretch& to);
  // Valid until the next call.
  [[nodiscard]] Stretch whole(std::byte* data, std::int64_t bytes);

  enum class Needs : std::uint8_t { contiguous, aligned };

  // Bytes for a call to read: those of the part, or a copy.
  [[nodiscard]] const std::byte* to_read(const Stretch& of, Needs needs = Needs::contiguous);
  [[nodiscard]] const std::byte* pack(const Stretch& of);
  // Bytes for a call to write: those of the part, or a block that next_phase() copies there.
  [[nodiscard]] std::byte* to_write(const Stretch& of, Needs needs = Needs::contiguous);

  // Messages to and from a member. None without bytes.
  void send(const std::byte* from, std::int64_t bytes, int to);
  void receive(std::byte* to, std::int64_t bytes, int from);
  void send(const Stretch& bytes, int to);
  void receive(const Stretch& bytes, int from);

 private:
  [[nodiscard]] std::byte* usable(const Stretch& of, Needs needs) const;  // null: it must be packed

  const std::uintptr_t element_;
  std::byte* const workspace_;
  std::int64_t next_ = 0, most_ = 0;
  std::vector<Phase> phases_;
  std::vector<std::pair<std::byte*, Stretch>> packed_;  // blocks that are unpacked after the group
  Piece piece_{};                                       // of whole()
};

}  // namespace stepgraph::nccl
