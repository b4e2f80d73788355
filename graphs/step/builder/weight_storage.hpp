#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/base/types.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/step/memory_role.hpp"
#include "graphs/step/step_graph.hpp"

// Which tensors a rank stores for a weight, and how: a table of one entry per weight and tensor. Internal to graphs/.
namespace stepgraph {

// In the order in which their buffers are declared.
enum class WeightTensor : std::uint8_t { value, gradient, master, first_moment, second_moment };
inline constexpr std::array all_weight_tensors{WeightTensor::value, WeightTensor::gradient, WeightTensor::master,
                                               WeightTensor::first_moment, WeightTensor::second_moment};
[[nodiscard]] std::string_view to_string(WeightTensor tensor) noexcept;

// How much of the tensor the rank keeps. `whole` is whole on the rank: tensor parallelism has cut the weight before.
enum class Extent : std::uint8_t { none, whole, shard };

// Where the elements lie.
enum class Placement : std::uint8_t {
  own,     // in a buffer of the weight
  flat,    // in the flat buffer of the shard unit: the whole flat, or the rank's shard of it
  unit,    // in the unit's whole gradients, of which the rank keeps its shard
  bucket,  // in a gradient bucket
  tied,    // in the buffer of the weight that this one is tied to
};

struct WeightEntry {
  Extent extent                                                  = Extent::none;
  Placement placement                                            = Placement::own;
  DType type                                                     = DType::f32;
  Lifetime lifetime                                              = Lifetime::step;
  Space space                                                    = Space::device;
  friend bool operator==(const WeightEntry&, const WeightEntry&) = default;
};
[[nodiscard]] std::string to_string(const WeightEntry& entry);  // "shard f32 persistent device flat", "none"

// The properties of a weight that its entries depend on.
struct WeightTraits {
  bool norm      = false;  // WeightSpec::norm
  bool sharded   = false;  // the weight belongs to a shard unit
  bool flat      = false;  // and lies in the unit's flat
  bool tied_here = false;  // tied to a weight of the same rank: they share value, master and moments
  // Its gradient is added to that of its owner before it is reduced: it is in no bucket.
  bool joined_first = false;
};

// `plan` is a resolved plan: with dp 1 nothing is sharded.
struct WeightStorageOptions {
  bool trains         = true;   // false: a forward step, which has values only
  bool keep_gradients = false;  // StepOptions::keep_gradients
  bool update_first   = false;  // StepOptions::update_first: gradients last until the next step updates
};
[[nodiscard]] WeightEntry weight_entry(const Plan& plan, const WeightTraits& weight, WeightTensor tensor,
                                       const WeightStorageOptions& options = {});

// Gradients stay in the type in which data-parallel ranks send them.
[[nodiscard]] bool keeps_rounded_gradients(const Plan& plan) noexcept;

[[nodiscard]] MemoryRole role_of(WeightTensor tensor) noexcept;
[[nodiscard]] StoredRange& stored(StepWeight& weight, WeightTensor tensor) noexcept;
[[nodiscard]] const StoredRange& stored(const StepWeight& weight, WeightTensor tensor) noexcept;

}  // namespace stepgraph
