#pragma once
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/graph/graph.hpp"
#include "ops/tape/tensor.hpp"

namespace stepgraph {

// The parameters of one rank while its graph is built: by name, and whether a gradient is in yet. The first node that
// adds to a gradient writes it, those after it accumulate: nothing has to be cleared.
class WeightTable {
 public:
  struct Entry {
    std::string name  = {};
    TensorShape shape = {};
    Access value      = {};  // one range each
    Access gradient   = {};
    bool has_gradient = false;  // some node of the graph has written it
  };

  // Refuses a name that is there already. Two entries may share a value (a tied weight) and have a gradient each.
  void add(Entry entry);
  [[nodiscard]] Weight find(std::string_view name) const;  // refuses a name that is not there
  [[nodiscard]] Entry& operator[](const Weight& weight) { return entries_[static_cast<std::size_t>(weight.id)]; }
  [[nodiscard]] const std::vector<Entry>& entries() const noexcept { return entries_; }

 private:
  std::vector<Entry> entries_;
  std::unordered_map<std::string, int> by_name_;
};

}  // namespace stepgraph
