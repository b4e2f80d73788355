#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/types.hpp"
#include "ops/tape/tensor_shape.hpp"

// The manifest of a training checkpoint: which file has which elements of which tensor. graphs/files/README.md has the
// format.
namespace stepgraph {

// The states of a tensor that an optimizer keeps. `weight` is the optimizer's own precision: the master where there is
// one, else the value.
// `waiting` is no state of a tensor: bytes of one rank that belong to gradients which wait for their update.
enum class StateKind : std::uint8_t { weight, first_moment, second_moment, waiting };
inline constexpr std::array all_state_kinds{StateKind::weight, StateKind::first_moment, StateKind::second_moment};
[[nodiscard]] std::string_view to_string(StateKind state) noexcept;  // "first_moment", "waiting"

struct LossScaleState {
  double scale                                                         = 0;  // of the next step
  std::int64_t good_steps                                              = 0;  // since the scale last changed
  friend bool operator==(const LossScaleState&, const LossScaleState&) = default;
};

// Gradients that wait for their update (UpdatePlan::delays). They are saved as each rank has them, so they fit only a
// run with the same placement.
struct WaitingState {
  int max_staleness                                                = 0;
  int num_sets                                                     = 0;   // that are not empty
  std::string placement                                            = {};  // layout, sharding and precision, as a text
  friend bool operator==(const WaitingState&, const WaitingState&) = default;
};

// The state of a run beside its tensors.
struct CheckpointState {
  std::int64_t steps    = 0;  // completed
  std::int64_t updates  = 0;  // applied: steps less those that were skipped and those whose gradients wait
  std::int64_t position = 0;  // sequences of the data that were consumed
  std::int64_t seq      = 0;  // tokens of each of these sequences
  std::uint64_t seed    = 0;
  std::optional<LossScaleState> loss_scale = {};  // none: the run does not scale
  std::optional<WaitingState> waiting      = {};  // none: the run does not delay its updates
  std::string config                       = {};  // JSON of the run's config; may be empty
  friend bool operator==(const CheckpointState&, const CheckpointState&) = default;
};

// What one file has of one tensor: take indices [begin, begin + size) of the tensor's `dim` in row-major order; of
// these elements the part has [first, last), as a 1-D tensor of the safetensors file.
// A part of StateKind::waiting is a whole buffer: `tensor` is its number in the rank, and it has elements [0, last).
struct CheckpointPart {
  std::size_t tensor  = 0;  // in CheckpointManifest::tensors
  StateKind state     = StateKind::weight;
  DType type          = DType::f32;  // or f64; of waiting gradients also bf16 and f16
  int dim             = 0;
  std::int64_t begin  = 0;
  std::int64_t size   = 0;
  std::int64_t first  = 0;
  std::int64_t last   = 0;
  std::int64_t offset = 0;  // of its first byte in the file
  // ops/transfers/hash.hpp: of each block of `checkpoint_block_bytes` bytes, counted from the part's first byte.
  std::vector<std::uint64_t> hashes                                    = {};
  friend bool operator==(const CheckpointPart&, const CheckpointPart&) = default;

  [[nodiscard]] std::int64_t num_elements() const noexcept { return last - first; }
  [[nodiscard]] std::int64_t num_bytes() const noexcept {
    return num_elements() * static_cast<std::int64_t>(size_bytes(type));
  }
};
inline constexpr std::int64_t checkpoint_block_bytes    = std::int64_t{1} << 20;
inline constexpr std::int64_t checkpoint_blocks_at_once = 8;  // of one read
[[nodiscard]] std::int64_t num_blocks(const CheckpointPart& part) noexcept;

struct CheckpointFile {
  std::string name                                                     = {};  // "rank-00003.safetensors"
  std::int64_t num_bytes                                               = 0;
  std::int64_t header_bytes                                            = 0;  // all bytes before the first part
  std::uint64_t header_hash                                            = 0;
  std::vector<CheckpointPart> parts                                    = {};  // end to end
  friend bool operator==(const CheckpointFile&, const CheckpointFile&) = default;
};

struct CheckpointTensor {
  std::string name                                                         = {};  // in Hugging Face folders
  TensorShape shape                                                        = {};
  friend bool operator==(const CheckpointTensor&, const CheckpointTensor&) = default;
};

inline constexpr int checkpoint_format                   = 2;  // 2: with waiting gradients; others are written as 1
inline constexpr std::string_view checkpoint_format_name = "stepgraph checkpoint";

struct CheckpointManifest {
  CheckpointState state                 = {};
  std::string optimizer                 = {};  // "adamw"
  std::string model_config              = {};  // config.json of a Hugging Face folder
  std::vector<CheckpointTensor> tensors = {};
  std::vector<CheckpointFile> files     = {};
  friend bool operator==(const CheckpointManifest&, const CheckpointManifest&) = default;

  [[nodiscard]] bool has(StateKind wanted) const noexcept;
  [[nodiscard]] std::int64_t num_bytes() const noexcept;     // of all files
  [[nodiscard]] std::int64_t num_elements() const noexcept;  // of all tensors, once
};

// Throws Error(config) unless the parts of each tensor and state that is there cover it exactly once, fill their
// files without gaps, and have all their hashes. `subject` begins the message.
void check_coverage(const CheckpointManifest& manifest, std::string_view subject);

// A JSON document. Its last field is a hash of the text before it, so that a damaged manifest is noticed.
[[nodiscard]] std::string to_json(const CheckpointManifest& manifest);
// Throws Error(config), which says whether the text is no manifest, of a newer format, or damaged.
[[nodiscard]] CheckpointManifest parse_checkpoint_manifest(std::string_view text, std::string_view subject);

[[nodiscard]] std::string with_zeros(std::int64_t number, std::size_t digits);  // 00012
[[nodiscard]] std::string checkpoint_folder_name(std::int64_t steps);           // "step-000000120"
// The completed steps that a folder name says; none: another name.
[[nodiscard]] std::optional<std::int64_t> steps_of_checkpoint(std::string_view folder_name);
[[nodiscard]] std::string checkpoint_file_name(int rank);  // "rank-00003.safetensors"

}  // namespace stepgraph
