#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "graphs/files/checkpoint_manifest.hpp"
#include "graphs/files/tensor_box.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/step/step_graph.hpp"
#include "graphs/train/stored_values.hpp"

// Where the elements of a tensor are in the memory of a rank. Internal to graphs/train.
namespace stepgraph {

// The elements of a tensor that a rank's weight holds: a box of the tensor, whose element i, in the order of the box,
// is element local(i) of the weight.
struct LocalPiece {
  std::size_t tensor  = 0;  // in the order of Model::parameters()
  int dim             = 0;
  TensorBox box       = {};
  std::int64_t at     = 0;  // the first element of the piece in the weight
  std::int64_t stride = 0;  // elements of the weight for each outer index
  bool first_holder   = true;

  [[nodiscard]] std::int64_t local(std::int64_t i) const noexcept {
    return i / box.row() * stride + at + i % box.row();
  }
  // The elements of the piece before element `local` of the weight. A range of the weight has a range of the piece.
  [[nodiscard]] std::int64_t before(std::int64_t local) const noexcept {
    return local / stride * box.row() + std::clamp<std::int64_t>(local % stride - at, 0, box.row());
  }
  [[nodiscard]] bool contiguous() const noexcept { return box.outer == 1 || stride == box.row(); }
};

class TensorNumbers {  // of Model::parameters()
 public:
  explicit TensorNumbers(const Model& model);
  [[nodiscard]] std::size_t at(const std::string& name) const { return numbers_.at(name); }
  [[nodiscard]] const std::vector<CheckpointTensor>& tensors() const noexcept { return tensors_; }

 private:
  std::vector<CheckpointTensor> tensors_;
  std::map<std::string, std::size_t> numbers_;
};
[[nodiscard]] std::vector<LocalPiece> local_pieces(const WeightSpec& weight, int tp_size, int tp_index,
                                                   const TensorNumbers& numbers);

// A part that a rank writes, and where its elements are: element i of the weight is element i + shift of the buffer.
struct SavedPart {
  CheckpointPart part = {};
  LocalPiece piece    = {};
  Buffer buffer       = {};
  std::int64_t shift  = 0;
  std::string name    = {};  // in the safetensors file
};

// The file of a rank: its header is the same for all checkpoints of a run, and so are the places of its parts.
struct RankFile {
  Rank rank                    = {};
  std::string name             = {};
  std::string header           = {};  // all bytes before the parts
  std::int64_t num_bytes       = 0;
  std::vector<SavedPart> parts = {};
};

// Each element of a state is written by one rank: the first that holds its tensor-parallel piece, and of data-parallel
// ranks that hold the same elements each writes an equal share.
[[nodiscard]] RankFile rank_file(const StepGraph& step, Rank rank, const TensorNumbers& numbers);

// Reads elements [first, first + count) of the part, counted from its begin. Thread-safe.
void read_part(const StoredValues& values, const SavedPart& part, std::int64_t first, std::span<std::byte> out);

}  // namespace stepgraph
