#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "engine/run/context.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/plan/precision.hpp"

// The weights that the ranks of an asynchronous window share, in versions: internal to graphs/.
//
// Its bytes are buffers of the graph, which nodes of their own ranks declare: `open` before the first use, `close`
// after the last. In between, nodes of all ranks use them, in an order that no edge gives. The store orders them:
// - A complete version is never written. Readers pin a version while they copy it.
// - One update at a time reads and writes optimizer states, and makes a version in a slot that no reader has pinned.
// A reader never waits. An update waits only for updates that run, never for a node that has not started.
namespace stepgraph {

// Elements of a weight with one rule.
struct UpdateRange {
  std::int64_t begin = 0, end = 0;
  int group    = 0;  // of the rates
  double decay = 0;
};

struct SharedWeight {
  std::int64_t elements           = 0;
  DType type                      = DType::f32;  // of values
  DType wide                      = DType::f32;  // of states, and of the master, if it differs from `type`
  DType gradient                  = DType::f32;
  std::vector<UpdateRange> ranges = {};
  [[nodiscard]] bool has_master() const noexcept { return wide != type; }
  [[nodiscard]] std::int64_t value_bytes() const noexcept {
    return elements * static_cast<std::int64_t>(size_bytes(type));
  }
};

// Numbers that last from window to window.
struct StoreNumbers {
  std::int64_t num_updates = 0;
  double loss_scale        = 1;
  // Updates since the scale last changed. Between windows steps are counted, as in other modes: each is an update of
  // each rank.
  std::int64_t good_updates = 0;
};

class VersionStore {
 public:
  struct Spec {
    int num_ranks             = 1;
    OptimizerPlan optimizer   = {};
    bool dynamic_scale        = false;
    std::int64_t growth_steps = 0;
    std::vector<SharedWeight> weights;
  };
  // A reader on each rank but the one that updates, the newest version and the one that is made.
  [[nodiscard]] static int num_slots(int num_ranks) noexcept { return num_ranks + 1; }

  explicit VersionStore(Spec spec);

  // --- before the first take -------------------------------------------------------------------------------------
  struct Places {
    std::vector<std::byte*> versions = {};  // by slot
    std::byte *first = nullptr, *second = nullptr, *master = nullptr;
  };
  void open(std::size_t weight, Places places);  // its first slot has the values
  void begin(const StoreNumbers& numbers);

  // --- during the window, on any threads -------------------------------------------------------------------------
  struct Taken {
    std::int64_t version   = 0;  // updates before it, in all
    std::int64_t staleness = 0;  // `step` less the steps that the slowest rank has completed
    double loss_scale      = 1;
  };
  // Copies the newest complete version to `values`, by weight. `step` counts from 0 in each window.
  Taken take(const Context& context, int step, std::span<std::byte* const> values);

  struct Gift {
    int rank                                = 0;
    std::span<const std::byte* const> grads = {};     // by weight
    std::span<const double> rates           = {};     // by group
    double factor                           = 1;      // NaN: the gradient is not applied
    bool overflows                          = false;  // because it is not finite
    double loss_scale                       = 1;      // that the gradient has
  };
  // Applies a gradient to the newest version, and makes the next one. The rank has then completed one more step.
  // Returns the number of the version; none: the gradient was dropped.
  std::optional<std::int64_t> give(const Context& context, const Gift& gift);

  // --- after the last give ---------------------------------------------------------------------------------------
  void copy_newest(const Context& context, std::span<std::byte* const> values) const;
  [[nodiscard]] const StoreNumbers& numbers() const noexcept { return numbers_; }

 private:
  void copy(const Context& context, int slot, std::span<std::byte* const> values) const;
  [[nodiscard]] bool wait_for_turn(const Context& context);  // false: the run has failed
  void drop(const Gift& gift);
  void update(const Context& context, const Gift& gift, int slot);

  Spec spec_;
  std::vector<Places> places_;  // by weight

  std::mutex mutex_;               // guards all below
  std::condition_variable turns_;  // `turn_` has changed
  // Updates run in the order in which they arrive: that with number `turn_` runs, and alone changes `newest_` and
  // `numbers_`.
  std::int64_t num_arrived_ = 0, turn_ = 0;
  int newest_ = 0;  // a slot
  StoreNumbers numbers_;
  std::vector<int> pins_;           // by slot: readers
  std::vector<std::int64_t> done_;  // by rank: steps of this window
};

}  // namespace stepgraph
