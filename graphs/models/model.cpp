#include "graphs/models/model.hpp"

#include "graphs/models/weights.hpp"

namespace stepgraph {

ParameterInventory Model::parameters(DType type) const {
  ParameterInventory inventory;
  const WeightNames names(*this);
  for (const Block& block : blocks) {
    for (WeightSpec weight : block.weights) {
      if (!weight.tied_to.empty()) continue;
      weight.name = names.full(block, weight);
      for (const TpPiece& piece : tp_pieces(weight, 1, 0)) {
        if (!inventory.contains(piece.tensor)) {
          inventory.add({.name = piece.tensor, .shape = tensor_shape(weight, piece), .type = type});
        }
      }
    }
  }
  return inventory;
}

}  // namespace stepgraph
