#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/graph/part.hpp"

namespace stepgraph {

class Device;  // engine/run/device.hpp

struct NumberedGroup {
  const GroupSpec* group;
  std::uint32_t number;  // of the communicator
};

// What a program needs of the links, from all processes alike.
struct Connections {
  std::vector<NumberedGroup> groups  = {};  // the new ones of this process; all their members make them now. By number
  std::vector<std::uint32_t> partial = {};  // new ones, some of whose members take no part: all processes make these
  std::vector<Rank> peers            = {};  // ranks of other processes that this one exchanges messages with
};

// How the processes of a world reach each other: what is needed around runs.
class Links {
 public:
  virtual ~Links() = default;

  // Makes the communications of a program possible. Collective, outside runs. A peer may abort its run meanwhile: that
  // is no error of this call.
  virtual void connect(const Connections& connections) = 0;

  // All waits throw Error(backend) with this text, those to come too, until recover(). Any thread; must not wait for
  // another process. There is no recovery from a failure.
  enum class Interruption : std::uint8_t { aborted, failed };  // all processes live; one of them has failed
  virtual void interrupt(Interruption kind, const std::string& why) noexcept = 0;

  // After an interrupted run: nothing of it arrives any more, and communications are possible again. Collective,
  // outside runs. `generation` counts the calls.
  virtual void recover(std::uint64_t generation) = 0;

  // The normal end. Collective, after the last communication.
  virtual void close() = 0;

  // The device that communications run on; null: the host.
  [[nodiscard]] virtual Device* device() const noexcept { return nullptr; }
};

}  // namespace stepgraph
