#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "graphs/step/offload/bytes.hpp"
#include "graphs/step/offload/homes.hpp"
#include "graphs/step/offload/pass/early_norm.hpp"

// When the nodes of a step use the buffers that have a home elsewhere. Internal to graphs/step/offload.
namespace stepgraph::offload {

inline constexpr std::uint32_t none = ~std::uint32_t{0};

// Buffers of a rank that move together.
struct Unit {
  Rank rank        = {};
  OffloadClass of  = OffloadClass::params;
  std::string name = {};
  // Not offloaded: a buffer of the device that nodes on the host use. Other nodes use it in place.
  bool staged = false;
  bool once   = false;  // Home::moves_once
};

// A home in the table. Its compression is `none` where the kind would not make its type smaller.
struct KnownHome : HomeFormat {
  std::uint32_t unit = 0;
  std::int64_t bytes = 0;  // of the buffer
  Lifetime lifetime  = Lifetime::step;

  // Only all bytes together can be copied.
  [[nodiscard]] bool is_whole() const noexcept { return space == Space::disk || compression != Compression::none; }
};

// The homes of a plan, and those that nodes on the host need beside them.
struct HomeTable {
  std::vector<KnownHome> homes         = {};
  std::vector<Unit> units              = {};
  std::vector<std::uint32_t> by_buffer = {};  // by buffer of the step before: index into homes, or none
  [[nodiscard]] const Unit& unit_of(const KnownHome& home) const { return units[home.unit]; }
};

// Throws Error(config) for homes that a buffer of the graph cannot have.
[[nodiscard]] HomeTable table_of(const Graph& graph, const HomePlan& plan);

// Where the bytes of a buffer are during a use.
enum class During : std::uint8_t {
  slot,
  home,  // in place: nodes on the host, and pinned homes
  own,   // in the buffer itself, which is not the home: activations until the first copy
};

// A buffer in a use.
struct UsedBuffer {
  std::uint32_t home = 0;
  During during      = During::slot;
  ByteSet accessed = {}, read_first = {}, written = {};  // read_first: read before the use has written them
  ByteSet fill = {}, back = {};                          // copied from the home before the use, and back after it
  ByteSet clear       = {};                              // copied back, but never written: set to 0 first
  std::int64_t offset = 0;                               // of byte 0 of the buffer in the slot
  std::int64_t packed = -1;                              // where the slot holds the compressed bytes
};

// Nodes of a rank between which the buffers of a unit stay in a slot.
struct Use {
  std::uint32_t unit  = 0;
  bool on_host        = false;        // its nodes run on the host
  std::uint32_t first = 0, last = 0;  // places of nodes
  std::uint32_t after = none;  // the place of the node after which the homes hold the bytes; none: from the beginning
  // Of activations: the place of a node, some layers before the use, that ends before the use is filled. The memory of
  // the use is free until then. none: it can be filled at any time.
  std::uint32_t not_before        = none;
  Labels labels                   = {};  // of the first node
  std::vector<UsedBuffer> buffers = {};
  std::uint32_t slot              = none;

  [[nodiscard]] UsedBuffer* find(std::uint32_t home) {
    for (UsedBuffer& buffer : buffers) {
      if (buffer.home == home) return &buffer;
    }
    return nullptr;
  }
  [[nodiscard]] bool needs_slot() const;
};

// The uses of all units, in the order of their first nodes. `on_host`: by node. Activations are filled `depth` layers
// before their use, or later.
[[nodiscard]] std::vector<Use> find_uses(const Graph& graph, const NodeOrder& order, const HomeTable& table,
                                         const std::vector<bool>& on_host, int depth = 2);

}  // namespace stepgraph::offload
