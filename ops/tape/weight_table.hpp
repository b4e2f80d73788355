#pragma once
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/graph/graph.hpp"
#include "ops/tape/tensor.hpp"

namespace stepgraph {

// The parameters of one rank while its graph is built, by name. The first node that adds to a gradient writes it, later
// nodes accumulate, so no gradient needs clearing.
class WeightTable {
 public:
  struct Entry {
    std::string name  = {};
    std::string block = {};  // of the model; its forward pass reads no other block's weights. Empty: any may
    TensorShape shape = {};
    Access value      = {};  // one contiguous range, like the gradient
    Access gradient   = {};
    bool has_gradient = false;  // a node of the graph has written it
  };

  // Throws if the name exists already. Two entries may share a value (tied weights), each with its own gradient.
  void add(Entry entry);
  // By its name in the whole model. Throws Error(config) for an unknown name.
  [[nodiscard]] Weight find(std::string_view name) const;
  // A weight of a block by the name that its forward pass uses: NAME, or short for BLOCK.NAME.
  [[nodiscard]] Weight find(std::string_view name, std::string_view block) const;
  [[nodiscard]] Entry& operator[](const Weight& weight) { return entries_[static_cast<std::size_t>(weight.id)]; }
  [[nodiscard]] const std::vector<Entry>& entries() const noexcept { return entries_; }

 private:
  [[nodiscard]] Weight at(int id) const;
  void refuse(std::string_view name, std::string_view block) const;

  std::vector<Entry> entries_;
  std::unordered_map<std::string, int> by_name_;
};

}  // namespace stepgraph
