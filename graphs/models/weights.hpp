#pragma once
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "graphs/layout/index_range.hpp"
#include "graphs/models/model.hpp"

// The elements of a weight that a tensor-parallel rank holds.
namespace stepgraph {

// The piece of a TensorSection that one tensor-parallel rank holds: indices [begin, begin + size) of the tensor's dim
// lie at [local, local + size) of the rank's weight.
struct TpPiece {
  std::string tensor;
  std::int64_t tensor_size = 0;  // of that dim, in the whole tensor
  std::int64_t begin       = 0;
  std::int64_t size        = 0;
  std::int64_t local       = 0;
  int num_holders          = 1;     // neighbouring ranks that hold the same piece
  bool first_holder        = true;  // this is the first of them
};

// The sections of a weight; one with the name of the weight where the spec has none.
[[nodiscard]] std::vector<TensorSection> sections_of(const WeightSpec& weight);

// The names of weights in the whole model: see Block.
class WeightNames {
 public:
  explicit WeightNames(const Model& model);
  [[nodiscard]] std::string full(const Block& block, const WeightSpec& weight) const;

 private:
  std::set<std::string> repeated_;
};

// The indices of a dim of `size` on one tensor-parallel rank. The first size % tp_size ranks have one more than the
// others.
[[nodiscard]] IndexRange tp_range(std::int64_t size, int tp_size, int tp_index);

// Throws Error(config) where the weight cannot be cut over so many ranks.
[[nodiscard]] std::vector<TpPiece> tp_pieces(const WeightSpec& weight, int tp_size, int tp_index);
[[nodiscard]] TensorShape local_shape(const WeightSpec& weight, int tp_size, int tp_index);
[[nodiscard]] TensorShape tensor_shape(const WeightSpec& weight, const TpPiece& piece);  // of the whole tensor

// Copies a piece from the whole tensor to the rank's weight, and back.
template <class T>
void take_piece(const WeightSpec& weight, const TpPiece& piece, std::span<const T> tensor, std::span<T> local);
// The same for a range of the rank's weight, which has `elements` elements: `part` begins at element `begin`. Elements
// of other pieces stay as they are.
template <class T>
void take_piece(const WeightSpec& weight, const TpPiece& piece, std::span<const T> tensor, std::int64_t elements,
                std::int64_t begin, std::span<T> part);
// The same from a tensor of doubles, which are rounded to float and then to T where T is shorter.
template <class T>
void round_piece(const WeightSpec& weight, const TpPiece& piece, std::span<const double> tensor, std::int64_t elements,
                 std::int64_t begin, std::span<T> part);
template <class T>
void put_piece(const WeightSpec& weight, const TpPiece& piece, std::span<const T> local, std::span<T> tensor);

}  // namespace stepgraph
