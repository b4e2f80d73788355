#pragma once
#include <array>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>

#include "ops/transfers/compress.hpp"

// What lies in host memory or on disk instead of in device memory, as data: the section `offload` of a config. Budgets
// are bytes of one rank; 0 is no limit.
namespace stepgraph {

// `manual` offloads what the fields say. The others offload what is needed to bring the planned memory of the device
// under their threshold, and no more. With them the classes whose fields are true may be moved; if none is true, all
// four may.
enum class OffloadStrategy : std::uint8_t { manual, conservative, balanced, aggressive, extreme };
inline constexpr std::array all_offload_strategies{OffloadStrategy::manual, OffloadStrategy::conservative,
                                                   OffloadStrategy::balanced, OffloadStrategy::aggressive,
                                                   OffloadStrategy::extreme};
[[nodiscard]] std::string_view to_string(OffloadStrategy strategy) noexcept;
inline std::ostream& operator<<(std::ostream& out, OffloadStrategy strategy) { return out << to_string(strategy); }

// A strategy acts when planned bytes / budget is above its threshold: 0.9, 0.75, 0.6, 0.4.
[[nodiscard]] double pressure_threshold(OffloadStrategy strategy);
// The share of eligible bytes that it may move: 0.2, 0.5, 0.8, 1.
[[nodiscard]] double most_share(OffloadStrategy strategy);
[[nodiscard]] bool may_use_disk(OffloadStrategy strategy) noexcept;  // manual and extreme

inline constexpr int most_offload_slots = 1024;

struct OffloadPlan {
  bool params      = false;
  bool grads       = false;
  bool optimizer   = false;
  bool activations = false;

  OffloadStrategy strategy        = OffloadStrategy::manual;
  std::int64_t device_bytes       = 0;  // all device memory of a rank, workspaces included
  std::int64_t device_param_bytes = 0;  // with `params`: so many bytes of weights stay on the device; 0: none
  std::int64_t host_bytes         = 0;  // homes and staging
  std::int64_t disk_bytes         = 0;
  std::string disk                = {};  // a folder; empty: no disk

  int slots            = 2;     // units whose bytes are on the device at once: the prefetch depth
  bool async           = true;  // false: transfers run on the compute lane, one after another
  bool overlap         = true;  // false: the update runs at the end of its own step instead of beside the next one
  bool pinned          = true;  // false: pageable host memory
  Compression compress = Compression::none;

  [[nodiscard]] bool moves_something() const noexcept {
    return params || grads || optimizer || activations || strategy != OffloadStrategy::manual;
  }
  // Whether a class may be moved, given its field: may_move(plan.params).
  [[nodiscard]] bool may_move(bool field) const noexcept {
    return field || (strategy != OffloadStrategy::manual && !(params || grads || optimizer || activations));
  }
  // The update of a step runs in the next one: StepOptions::update_first; without clipping and loss scale, in the
  // backward pass. All ranks and processes do so or none, so it does not depend on what a strategy moves.
  [[nodiscard]] bool overlaps_updates() const noexcept { return overlap && optimizer; }
  friend bool operator==(const OffloadPlan&, const OffloadPlan&) = default;
};

// The memory of this machine; 0: not known.
[[nodiscard]] std::int64_t machine_memory_bytes() noexcept;

// Throws Error(config) for fields that are wrong by themselves, contradict each other or have no effect. Messages use
// the names of configs: "offload.slots: ...". A plan can be for another machine, so its folder need not exist here.
void check_offload(const OffloadPlan& plan);

// Throws Error(config) if `disk` is not a folder of this machine in which files can be made. Empty: no disk.
void check_disk_folder(const std::string& disk);

// Throws Error(config) if host_bytes of so many ranks is above the memory of the machine that they are to run on. 0:
// not known. `machine`: its name, for the message.
void check_host_bytes(const OffloadPlan& plan, std::int64_t machine_bytes, std::string_view machine = "this machine",
                      int num_ranks = 1);

}  // namespace stepgraph
