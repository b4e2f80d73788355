#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/graph/rank_set.hpp"
#include "engine/run/device.hpp"

// The ranks of this process on CUDA devices: memory, streams and captured steps, without communication. CudaWorld and
// NcclWorld add that. Internal to backends/. No vendor types, so that it can be included in every build; it is defined
// in builds with CUDA.
namespace stepgraph::cuda {

struct RanksOptions {
  // The device of each rank: the k-th rank of this process uses devices[k % size]. A number that comes
  // several times is several logical devices. Must not be empty, nor longer than the number of ranks.
  std::vector<int> devices = {0};
  // Captures whole steps as CUDA graphs: the second run is captured, later runs replay it. Steps with host nodes and
  // recorded steps are issued node by node every time.
  bool capture = true;
  bool tf32    = false;  // f32 products may use 19 bits of each operand
  // False: Space::pinned is pageable memory, whose copies are slower and keep the issuing thread waiting. Nothing is
  // captured then.
  bool pinned = true;
  // Synchronizes after every node, so that a kernel error names the node that enqueued it. Slow.
  bool check_nodes = false;
  // For a world of several processes: whether a program is captured. Called by lower(), once for each program, with
  // what this process could do (capture is on, and the program has no host nodes). All processes make the same programs
  // in the same order, so it can ask them all. Empty: as this process wishes.
  std::function<bool(bool wishes)> may_capture = {};
  // Whether the device tells the host how far it is, in captured runs too (Device::progress). Two
  // small writes for each part and for every few other nodes.
  bool markers = false;
};

// The numbers of all visible devices. Throws Error(backend) if there is none.
[[nodiscard]] std::vector<int> all_devices();

// One thread issues the runs of all programs of a Ranks. Programs of other Ranks objects, in other threads, do not
// disturb it: nothing waits for a whole device, and nothing uses the legacy stream.
class Ranks final : public Device, public std::enable_shared_from_this<Ranks> {
 public:
  // Throws Error(config) for a list of devices that cannot work, and Error(backend) if a device does not exist, two of
  // them cannot use each other's memory, or the driver is too old. Shared: it keeps itself alive if a device never
  // finishes a step.
  [[nodiscard]] static std::shared_ptr<Ranks> make(const RankSet& ranks, RanksOptions options);
  ~Ranks() override;
  Ranks(const Ranks&)            = delete;
  Ranks& operator=(const Ranks&) = delete;

  [[nodiscard]] const RankSet& ranks() const noexcept;
  [[nodiscard]] int device_of(Rank rank) const;

  [[nodiscard]] DeviceMemory& memory() override;
  [[nodiscard]] std::unique_ptr<DeviceStreams> lower(const Graph& graph, StreamPlan plan) override;
  [[nodiscard]] std::optional<DeviceProgress> progress() override;
  // Every program forgets its captured step, and begins again with an issued run. Not during a run: waits for the
  // streams of this world first. Does nothing if a device was given up.
  void drop_captures() override;

  void set_capture(bool capture);  // as in the options, from the next step on; not during a step
  void synchronize();              // waits for all work of these ranks; throws Error(backend) if it failed

 private:
  struct Impl;
  explicit Ranks(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepgraph::cuda
