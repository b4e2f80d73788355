#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "backends/nccl/calls.hpp"
#include "backends/process/socket.hpp"
#include "engine/run/device.hpp"

namespace stepgraph::nccl {

// What we need of NCCL, for one process with one GPU. No type of the vendor. make(), group(), local(), reset() and
// close() are called by one thread at a time; each function says if others may call it beside them.
class Library {
 public:
  virtual ~Library() = default;  // frees what is left, without its peers: after a failure, or after close()

  using Id = std::array<std::byte, 128>;  // ncclUniqueId
  // Of a new communicator. One member makes it and gives it to the others.
  [[nodiscard]] virtual Id make_id() = 0;

  struct New {
    std::uint32_t number = 0;  // the communicator's name in later calls; no two live ones have the same
    Id id                = {};
    int rank             = 0;  // this process in the communicator
    int size             = 0;
    std::string name     = {};  // for messages: that of the group
  };
  // Makes the communicators, one after another in this order, and returns when all of them can be used. Collective: all
  // members make theirs in the same order. Throws Error(backend) with the communicator's name at the deadline, when the
  // interrupt is raised, or after abort() from another thread. No program captures meanwhile. After an error only
  // abort(), reset() and the destructor are called.
  virtual void make(std::span<const New> communicators, const Patience& patience) = 0;

  struct Grouped {
    std::uint32_t communicator = 0;
    const Call* call           = nullptr;  // neither a copy nor a fold; valid during the call
    const DeviceQueue* queue   = nullptr;
  };
  // Enqueues the calls as one group, ncclGroupStart to ncclGroupEnd. The streams may be in a capture. A group can have
  // several communicators and several streams. Never empty. Throws Error(backend), also after abort().
  virtual void group(std::span<const Grouped> calls) = 0;

  // Enqueues a copy or a fold. Throws Error(backend).
  virtual void local(const Call& call, const DeviceQueue& queue) = 0;

  // An asynchronous error of a communicator, if there is one. None after abort(). Any thread; does not wait.
  [[nodiscard]] virtual std::optional<std::string> failure() = 0;

  // Ends all communicators at once: their kernels end, make() and group() throw, until reset(). Any thread. Waits for
  // no peer.
  virtual void abort() noexcept = 0;

  // After abort(), when the device is idle and captured graphs with their kernels are destroyed: frees the
  // communicators. Others can then be made, also with the same numbers. Without abort(): aborts first.
  virtual void reset() = 0;

  // The normal end, after the last call: frees the communicators. Collective.
  virtual void close() = 0;
};

}  // namespace stepgraph::nccl
