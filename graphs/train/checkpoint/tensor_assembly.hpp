#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "engine/base/error.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/step/step_graph.hpp"

// How a tensor of the model is read from the ranks that have its pieces. Internal to graphs/train.
namespace stepgraph {

// A tensor is put together from stretches of the ranks' weights.
template <class T>
class TensorAssembly {
 public:
  TensorAssembly(const StepGraph& step, const std::string& name, std::span<T> out)
      : step_(step), name_(name), out_(out) {}

  void put(Rank rank, std::size_t block, std::size_t number, std::int64_t begin, std::span<const T> values) {
    const int tp = step_.layout.degree(Axis::tp), tp_index = step_.layout.coord(rank).tp;
    std::vector<T>& local = locals_[{block, number, tp_index}];
    if (local.empty())
      local.resize(static_cast<std::size_t>(num_elements(local_shape(spec(block, number), tp, tp_index))));
    if (begin < 0 || static_cast<std::size_t>(begin) + values.size() > local.size())
      throw Error(ErrorKind::backend,
                  str("tensor '", name_, "': rank ", rank, " has sent elements that it cannot have"));
    std::copy(values.begin(), values.end(), local.begin() + static_cast<std::ptrdiff_t>(begin));
  }

  void finish() {
    const int tp = step_.layout.degree(Axis::tp);
    for (const auto& [where, local] : locals_) {
      const auto& [block, number, tp_index] = where;
      for (const TpPiece& piece : tp_pieces(spec(block, number), tp, tp_index)) {
        if (piece.tensor == name_ && piece.first_holder) put_piece<T>(spec(block, number), piece, local, out_);
      }
    }
  }

 private:
  [[nodiscard]] const WeightSpec& spec(std::size_t block, std::size_t number) const {
    return step_.model.blocks.at(block).weights.at(number);
  }
  const StepGraph& step_;
  const std::string& name_;
  std::span<T> out_;
  std::map<std::tuple<std::size_t, std::size_t, int>, std::vector<T>> locals_;  // by block, weight and tp index
};

// The place of a stretch that travels to process 0; its values follow.
struct TensorStretch {
  std::int32_t rank;
  std::uint32_t block, number;
  std::int64_t begin;
};

}  // namespace stepgraph
