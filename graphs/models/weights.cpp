#include "graphs/models/weights.hpp"

#include <algorithm>
#include <map>

#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "ops/tape/number.hpp"

namespace stepgraph {
namespace {

// The dims before and after the one that is cut, each as one.
struct Around {
  std::int64_t outer = 1, inner = 1;
};
Around around(const WeightSpec& weight) {
  Around dims;
  for (std::size_t i = 0; i < weight.shape.size(); ++i) {
    if (i < static_cast<std::size_t>(weight.dim)) dims.outer *= weight.shape[i];
    if (i > static_cast<std::size_t>(weight.dim)) dims.inner *= weight.shape[i];
  }
  return dims;
}

}  // namespace

std::vector<TensorSection> sections_of(const WeightSpec& weight) {
  if (!weight.sections.empty()) return weight.sections;
  return {{.tensor = weight.name, .size = weight.shape[static_cast<std::size_t>(weight.dim)]}};
}

WeightNames::WeightNames(const Model& model) {
  std::map<std::string, const Block*> first;
  for (const Block& block : model.blocks) {
    for (const WeightSpec& weight : block.weights) {
      const auto [place, fresh] = first.emplace(weight.name, &block);
      if (!fresh && place->second != &block) repeated_.insert(weight.name);
    }
  }
}

std::string WeightNames::full(const Block& block, const WeightSpec& weight) const {
  return repeated_.contains(weight.name) ? str(block.name, ".", weight.name) : weight.name;
}

IndexRange tp_range(std::int64_t size, int tp_size, int tp_index) {
  const std::int64_t each = size / tp_size, more = size % tp_size;
  const std::int64_t begin = each * tp_index + std::min<std::int64_t>(tp_index, more);
  return {begin, begin + each + (tp_index < more ? 1 : 0)};
}

std::vector<TpPiece> tp_pieces(const WeightSpec& weight, int tp_size, int tp_index) {
  const std::vector<TensorSection> sections = sections_of(weight);
  std::vector<TpPiece> pieces;
  std::int64_t local = 0;
  for (const TensorSection& section : sections) {
    std::int64_t tensor_size = 0;
    for (const TensorSection& other : sections) {
      if (other.tensor == section.tensor) tensor_size = std::max(tensor_size, other.begin + other.size);
    }
    TpPiece piece{.tensor       = section.tensor,
                  .tensor_size  = tensor_size,
                  .begin        = section.begin,
                  .size         = section.size,
                  .local        = local,
                  .num_holders  = weight.cut ? 1 : tp_size,
                  .first_holder = weight.cut || tp_index == 0};
    if (weight.cut) {
      if (section.num_heads == 0) {
        const IndexRange range = tp_range(section.size, tp_size, tp_index);
        piece.begin += range.begin;
        piece.size = range.end - range.begin;
        local += piece.size;
        pieces.push_back(std::move(piece));
        continue;
      }
      if (section.num_heads % tp_size != 0 && tp_size % section.num_heads != 0) {
        throw Error(ErrorKind::config, str("weight '", section.tensor, "': ", section.num_heads,
                                           " heads cannot be cut over ", tp_size, " tensor-parallel ranks"));
      }
      const int holders  = section.num_heads < tp_size ? static_cast<int>(tp_size / section.num_heads) : 1;
      piece.size         = section.size / (tp_size / holders);
      piece.begin        = section.begin + piece.size * (tp_index / holders);
      piece.num_holders  = holders;
      piece.first_holder = tp_index % holders == 0;
    }
    local += piece.size;
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

TensorShape local_shape(const WeightSpec& weight, int tp_size, int tp_index) {
  TensorShape shape = weight.shape;
  std::int64_t size = 0;
  for (const TpPiece& piece : tp_pieces(weight, tp_size, tp_index)) size += piece.size;
  shape[static_cast<std::size_t>(weight.dim)] = size;
  return shape;
}

TensorShape tensor_shape(const WeightSpec& weight, const TpPiece& piece) {
  TensorShape shape                           = weight.shape;
  shape[static_cast<std::size_t>(weight.dim)] = piece.tensor_size;
  return shape;
}

namespace {

// Calls visit(element of the tensor, element of the part, elements) for each stretch of a piece in the part.
template <class Visit>
void for_stretches(const WeightSpec& weight, const TpPiece& piece, std::int64_t elements, std::int64_t begin,
                   std::size_t part_size, const Visit& visit) {
  const auto [outer, inner] = around(weight);
  const std::int64_t stride = elements / outer, size = piece.size * inner;  // of one outer index: the weight, the piece
  const std::int64_t end = begin + static_cast<std::int64_t>(part_size);
  for (std::int64_t o = begin / std::max<std::int64_t>(stride, 1); o < outer && o * stride < end; ++o) {
    const std::int64_t first = o * stride + piece.local * inner;
    const std::int64_t from = std::max(first, begin), to = std::min(first + size, end);
    if (from < to) visit((o * piece.tensor_size + piece.begin) * inner + (from - first), from - begin, to - from);
  }
}

}  // namespace

template <class T>
void take_piece(const WeightSpec& weight, const TpPiece& piece, std::span<const T> tensor, std::int64_t elements,
                std::int64_t begin, std::span<T> part) {
  for_stretches(weight, piece, elements, begin, part.size(), [&](std::int64_t from, std::int64_t to, std::int64_t num) {
    std::copy_n(tensor.data() + from, num, part.data() + to);
  });
}

template <class T>
void round_piece(const WeightSpec& weight, const TpPiece& piece, std::span<const double> tensor, std::int64_t elements,
                 std::int64_t begin, std::span<T> part) {
  for_stretches(weight, piece, elements, begin, part.size(), [&](std::int64_t from, std::int64_t to, std::int64_t num) {
    std::transform(tensor.data() + from, tensor.data() + from + num, part.data() + to,
                   [](double value) { return narrow<T>(static_cast<Wide<T>>(value)); });
  });
}

template <class T>
void take_piece(const WeightSpec& weight, const TpPiece& piece, std::span<const T> tensor, std::span<T> local) {
  take_piece(weight, piece, tensor, static_cast<std::int64_t>(local.size()), 0, local);
}

template <class T>
void put_piece(const WeightSpec& weight, const TpPiece& piece, std::span<const T> local, std::span<T> tensor) {
  const auto [outer, inner]     = around(weight);
  const std::int64_t local_size = static_cast<std::int64_t>(local.size()) / (outer * inner);
  for (std::int64_t o = 0; o < outer; ++o) {
    std::copy_n(local.data() + (o * local_size + piece.local) * inner, piece.size * inner,
                tensor.data() + (o * piece.tensor_size + piece.begin) * inner);
  }
}

template void take_piece(const WeightSpec&, const TpPiece&, std::span<const float>, std::int64_t, std::int64_t,
                         std::span<float>);
template void take_piece(const WeightSpec&, const TpPiece&, std::span<const bf16>, std::int64_t, std::int64_t,
                         std::span<bf16>);
template void take_piece(const WeightSpec&, const TpPiece&, std::span<const f16>, std::int64_t, std::int64_t,
                         std::span<f16>);
template void take_piece(const WeightSpec&, const TpPiece&, std::span<const double>, std::int64_t, std::int64_t,
                         std::span<double>);
template void round_piece(const WeightSpec&, const TpPiece&, std::span<const double>, std::int64_t, std::int64_t,
                          std::span<float>);
template void round_piece(const WeightSpec&, const TpPiece&, std::span<const double>, std::int64_t, std::int64_t,
                          std::span<bf16>);
template void round_piece(const WeightSpec&, const TpPiece&, std::span<const double>, std::int64_t, std::int64_t,
                          std::span<f16>);
template void round_piece(const WeightSpec&, const TpPiece&, std::span<const double>, std::int64_t, std::int64_t,
                          std::span<double>);
template void take_piece(const WeightSpec&, const TpPiece&, std::span<const float>, std::span<float>);
template void take_piece(const WeightSpec&, const TpPiece&, std::span<const bf16>, std::span<bf16>);
template void take_piece(const WeightSpec&, const TpPiece&, std::span<const f16>, std::span<f16>);
template void take_piece(const WeightSpec&, const TpPiece&, std::span<const double>, std::span<double>);
template void put_piece(const WeightSpec&, const TpPiece&, std::span<const float>, std::span<float>);
template void put_piece(const WeightSpec&, const TpPiece&, std::span<const bf16>, std::span<bf16>);
template void put_piece(const WeightSpec&, const TpPiece&, std::span<const f16>, std::span<f16>);
template void put_piece(const WeightSpec&, const TpPiece&, std::span<const double>, std::span<double>);

}  // namespace stepgraph
