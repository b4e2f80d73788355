#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graphs/step/offload/homes.hpp"
#include "graphs/step/step_graph.hpp"

// The units of a rank that can be offloaded. Internal to graphs/step/offload.
namespace stepgraph::offload {

// Buffers that move together.
struct Candidate {
  std::string unit            = {};
  std::vector<Buffer> buffers = {};
  std::int64_t bytes          = 0;
  int layer                   = -1;  // of activations; -1: outside of layers
};

// The units of one rank, in the order of the model or of the first use. choose_homes says what a unit is.
class RankUnits {
 public:
  RankUnits(const StepGraph& step, Rank rank);  // the step must outlive it
  [[nodiscard]] const std::vector<Candidate>& of(OffloadClass of) const {
    return classes_[static_cast<std::size_t>(of)];
  }

 private:
  void add(OffloadClass of, const std::string& unit, Buffer buffer, int layer = -1);
  void add_weights();
  void add_other_gradients();
  void add_activations();
  void leave_small(Candidate& unit) const;

  const StepGraph& step_;
  Rank rank_;
  std::array<std::vector<Candidate>, 4> classes_;
  std::map<std::pair<OffloadClass, std::string>, std::size_t> numbers_;
  std::set<std::uint32_t> seen_;
};

// The buffers of weights that are tied to a weight of another rank. The copies of both ranks must stay equal, but the
// ranks use them at different times, and a lossy kind of compression would round them at other points.
[[nodiscard]] std::set<std::uint32_t> buffers_with_copies(const StepGraph& step, Rank rank);

}  // namespace stepgraph::offload
