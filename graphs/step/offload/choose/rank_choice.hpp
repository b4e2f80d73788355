#pragma once
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "graphs/plan/plan.hpp"
#include "graphs/step/offload/choose/balance.hpp"
#include "graphs/step/offload/choose/units.hpp"

// The homes of one rank. Internal to graphs/step/offload.
namespace stepgraph::offload {

// What a rank needs outside of the device. Host memory counts as if no buffers shared bytes.
struct HomeDemand {
  std::int64_t homes_bytes  = 0;  // in host memory: homes and the staging ring ...
  std::int64_t host_bytes   = 0;  // ... and staging for updates on the host
  std::int64_t shared_bytes = 0;  // of host_bytes: buffers that may share bytes with others, at most
  std::int64_t disk_bytes   = 0;
};

class RankChoice {
 public:
  static constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max() / 2;

  // All of them must outlive it, and `made` gets the homes and updates.
  RankChoice(const StepGraph& step, const OffloadPlan& plan, const OffloadAmounts& amounts,
             const std::optional<OffloadRates>& rates, const RankUnits& units, Rank rank, HomePlan& made);

  // room_bytes: of host memory for homes and staging, as if they shared no bytes. Homes that do not fit lie on disk.
  // Persistent homes must also fit host_bytes, whatever the room is: so weights lie in the same place in training steps
  // and in forward steps, which have other rooms. If there is no disk, all homes lie in host memory, and only the
  // staging for updates is limited. Throws Error(config) if host_bytes is too small for the staging ring.
  HomeDemand choose(std::int64_t room_bytes);

 private:
  struct Chosen {
    OffloadClass offload_class;
    const Candidate* of;
    bool moves_once = false;
  };
  // A unit whose states are not resident.
  struct Updated {
    const Candidate* of;
    bool on_host = false;  // if there is room for its staging
  };
  [[nodiscard]] double share(OffloadClass of) const;
  [[nodiscard]] std::vector<bool> by_layer(const std::vector<Candidate>& all) const;
  void choose_units(OffloadClass of);
  void choose_host_gradients();
  [[nodiscard]] const Candidate* own_gradient(const Candidate& unit) const;
  [[nodiscard]] Compression kind_of(Buffer buffer) const;
  [[nodiscard]] std::int64_t stored_bytes(Buffer buffer) const;
  [[nodiscard]] std::int64_t host_bytes_of(const Chosen& unit, std::optional<Lifetime> lifetime = {}) const;
  [[nodiscard]] std::vector<std::size_t> order_of_rooms() const;
  void place(const Chosen& unit, Space space);
  // The memory that an update on the host needs beside the homes: for gradients and values that are not in host memory.
  // None: it cannot run there.
  [[nodiscard]] std::optional<std::int64_t> staging_of(const Candidate& unit) const;
  void find_moving_gradients();
  [[nodiscard]] UpdateUnit update_unit(const Candidate& unit) const;
  void divide_updates();
  void choose_updates();

  const StepGraph& step_;
  const OffloadPlan& plan_;
  const OffloadAmounts& amounts_;
  const std::optional<OffloadRates>& rates_;
  const RankUnits& units_;
  Rank rank_;
  HomePlan& made_;
  std::vector<Chosen> chosen_;
  std::vector<Updated> updated_;
  std::map<std::string, const Candidate*> moving_gradients_;  // by unit: gradients that the amounts move
  std::set<std::string> gradients_that_stay_;                 // of them: units whose gradients stay nevertheless
  std::map<std::uint32_t, bool> pinned_;                      // by buffer with a home: in host memory, else on disk
  std::int64_t host_left_ = 0;
  HomeDemand demand_;
};

// Chooses a share of units, spread evenly.
[[nodiscard]] std::vector<bool> evenly_spread(std::size_t count, double share);

// The bytes that a buffer takes in pinned memory.
[[nodiscard]] std::int64_t pinned_bytes(std::int64_t size);

[[noreturn]] void refuse_host_bytes(Rank rank, std::int64_t needed, std::string_view what, const OffloadPlan& plan);

}  // namespace stepgraph::offload
