#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engine/graph/graph.hpp"
#include "ops/transfers/compress.hpp"

// Where the bytes of offloaded buffers lie: data that the pass with_homes is given.
namespace stepgraph {

enum class OffloadClass : std::uint8_t { params, grads, optimizer, activations };
[[nodiscard]] std::string_view to_string(OffloadClass of) noexcept;

// How the update of a unit runs.
enum class UpdateMode : std::uint8_t {
  resident,  // on the device, with states that stay there
  streamed,  // on the device: states are copied there and back
  host,      // on the host: gradients are copied down, weights up
};
[[nodiscard]] std::string_view to_string(UpdateMode mode) noexcept;

// What becomes of a layer's activations between its forward and its backward pass.
enum class ActivationMode : std::uint8_t {
  keep,       // they stay on the device
  recompute,  // the backward pass computes them again from the layer's input, which stays
  offload,    // they have homes
};
[[nodiscard]] std::string_view to_string(ActivationMode mode) noexcept;

struct ActivationCounts {  // of layers
  int kept                                                                 = 0;
  int recomputed                                                           = 0;
  int offloaded                                                            = 0;
  friend bool operator==(const ActivationCounts&, const ActivationCounts&) = default;
};
[[nodiscard]] std::string to_text(const ActivationCounts& counts);  // "3 layers offloaded, 5 recomputed, 4 kept"

// A device buffer of the step that has its home elsewhere. Outside of its uses its bytes are in the home only.
struct Home {
  Buffer buffer           = {};  // of the step before the pass
  OffloadClass of         = OffloadClass::params;
  std::string unit        = {};             // buffers of a rank with the same class and unit move together
  Space space             = Space::pinned;  // or disk
  Compression compression = Compression::none;
  // Of gradients: the buffer stays in its slot from its first to its last access in the step, apart from its update. So
  // it is copied once, whatever the number of microbatches.
  bool moves_once = false;
};

// A unit whose update is not resident. Its rank's update nodes (phase "update") that write an optimizer buffer of the
// unit run as `mode` says.
struct UnitUpdate {
  Rank rank        = {};
  std::string unit = {};
  UpdateMode mode  = UpdateMode::streamed;
};

struct HomePlan {
  std::vector<Home> homes         = {};
  std::vector<UnitUpdate> updates = {};
  int slots                       = 2;
  bool async                      = true;  // false: all transfers on the compute lane
  // Host memory is short: what the host stages for its updates may share bytes. An update can then wait for the copies
  // of an earlier one.
  bool shares_staging = false;
  // Updates follow the gradients of their weights, in the backward pass: no node of theirs reads the norm.
  bool early_updates = false;
  // Pinned memory that disk transfers and losslessly compressed tensors pass through: pieces of a ring, shared by all
  // transfers of a rank. A multiple of Storage::block_bytes each.
  std::int64_t piece_bytes = 0;
  int num_pieces           = 4;
};

// What a buffer of the new graph holds, where it is a home.
struct HomeFormat {
  Buffer home             = {};
  Buffer buffer           = {};  // of the step before the pass
  DType type              = DType::f32;
  std::int64_t elements   = 0;
  Space space             = Space::pinned;
  Compression compression = Compression::none;
  // The elements are compressed in chunks of so many, and a chunk begins every `stride_bytes`. 0: in one chunk.
  std::int64_t chunk_elements = 0;
  std::int64_t stride_bytes   = 0;
};

// Elements [begin, begin + elements) of a home, and their bytes in it.
struct HomeChunk {
  std::int64_t begin    = 0;
  std::int64_t elements = 0;
  std::int64_t offset   = 0;
  std::int64_t bytes    = 0;
};
[[nodiscard]] std::vector<HomeChunk> chunks_of(const HomeFormat& home);
[[nodiscard]] std::int64_t stored_bytes(const HomeFormat& home);  // of the buffer; on disk: whole blocks
// The format of a tensor's home. Lossless kinds pass through the pieces of the ring, so that their chunks fit a piece.
[[nodiscard]] HomeFormat home_format(DType type, std::int64_t elements, Space space, Compression compression,
                                     std::int64_t piece_bytes);

// How much of each class is offloaded, as a share of its units from 0 to 1.
struct OffloadAmounts {
  double optimizer   = 0;
  double grads       = 0;
  double params      = 0;
  double activations = 0;
  // Of the offloaded units of the optimizer, the share that the host updates. The others are streamed. So is a unit
  // whose states are on disk.
  double host_updates = 1;
  // Where OffloadRates divide the updates: the host counts as so many times as fast. A simulation finds it.
  double host_scale = 1;
  // The first units of the optimizer, as many as have so many bytes together, stay on the device, with their gradients.
  std::int64_t resident_bytes = 0;
  // So many bytes of gradients of streamed units stay on the device: they would travel down and up again.
  std::int64_t gradient_bytes = 0;
  // Gradients of units that the host updates have homes, also where `grads` is 0. They are copied down once, when they
  // are complete, and not in the next step, in which the host would have to wait for them. They take no memory of the
  // device in between. A gradient that several units share stays.
  bool host_gradients = false;
  // By layer of the model; the same on all ranks that share a layer. Empty: as Plan::recompute and `activations` say.
  // Otherwise `activations` counts only for tensors outside of layers.
  std::vector<ActivationMode> layers                                   = {};
  friend bool operator==(const OffloadAmounts&, const OffloadAmounts&) = default;
};

// How fast a machine moves and updates, while all of it happens at once.
struct OffloadRates {
  double h2d_bytes_per_s                                           = 0;
  double d2h_bytes_per_s                                           = 0;
  double host_elements_per_s                                       = 0;  // that the host updates
  double device_elements_per_s                                     = 0;  // that the device updates; 0: not limited
  friend bool operator==(const OffloadRates&, const OffloadRates&) = default;
};
// The default for a GPU with a PCIe 5.0 link of 16 lanes and a host of 16 cores, rounded.
inline constexpr OffloadRates usual_offload_rates{
    .h2d_bytes_per_s = 42e9, .d2h_bytes_per_s = 42e9, .host_elements_per_s = 2.1e9};

// A unit that is offloaded.
struct OffloadedUnit {
  Rank rank               = {};
  OffloadClass of         = OffloadClass::params;
  std::string unit        = {};
  Space space             = Space::pinned;         // disk: at least one of its buffers is on disk
  Compression compression = Compression::none;     // of at least one of its buffers; masters have no lossy kind
  std::int64_t bytes      = 0;                     // of its tensors
  UpdateMode update       = UpdateMode::resident;  // of units of the optimizer
};

// What a step offloads.
struct OffloadSummary {
  OffloadAmounts amounts                    = {};
  std::map<Rank, OffloadAmounts> amounts_of = {};  // of some ranks, instead
  HomePlan settings                         = {};  // without homes and updates
  std::vector<OffloadedUnit> units          = {};  // empty: nothing is offloaded
};

// The buffers of the old graph keep their numbers. The home of a buffer has the buffer's number, with another space and
// size. Activations are different: a buffer stays on the device until its first copy, and its home is a new buffer.
struct WithHomes {
  Graph graph;
  std::vector<HomeFormat> homes = {};  // in the order of HomePlan::homes
};

// The pass. For each use of a buffer (the nodes of one rank, unit, microbatch and phase that access it) it adds the
// nodes that fill a slot from the home before the use, where the use reads, and those that write the slot back after
// it, where the use writes. Slots are buffers, so a fill waits for the write-back of the tenant before and for nothing
// else. Host updates use pinned homes in place. Nodes that sum the squares of offloaded gradients move to the
// gradient's last write.
[[nodiscard]] WithHomes with_homes(const Graph& graph, const HomePlan& plan);

}  // namespace stepgraph
