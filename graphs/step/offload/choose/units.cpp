#include "graphs/step/offload/choose/units.hpp"

#include <algorithm>
#include <span>

#include "engine/base/error.hpp"
#include "engine/graph/recompute.hpp"

namespace stepgraph::offload {

namespace {

class UnitFinder {
 public:
  UnitFinder(const StepGraph& step, Rank rank) : step_(step), rank_(rank) {}

  // The buffers and nodes are those of the rank.
  RankUnits find(std::span<const Buffer> buffers, std::span<const Node> nodes) {
    add_weights();
    add_other_gradients(buffers);
    add_activations(nodes);
    for (auto& list : found_.classes) {
      for (Candidate& unit : list) leave_small(unit);
    }
    return std::move(found_);
  }

 private:
  void add(OffloadClass of, const std::string& unit, Buffer buffer, int layer = -1);
  void add_weights();
  void add_other_gradients(std::span<const Buffer> buffers);
  void add_activations(std::span<const Node> nodes);
  void leave_small(Candidate& unit) const;

  const StepGraph& step_;
  Rank rank_;
  RankUnits found_;
  std::map<std::pair<OffloadClass, std::string>, std::size_t> numbers_;
  std::set<std::uint32_t> seen_;
};

void UnitFinder::add(OffloadClass of, const std::string& unit, Buffer buffer, int layer) {
  if (!seen_.insert(buffer.id).second) return;
  auto& list       = found_.classes[static_cast<std::size_t>(of)];
  const auto found = numbers_.try_emplace({of, unit}, list.size());
  if (found.second) list.push_back({.unit = unit, .layer = layer});
  list[found.first->second].buffers.push_back(buffer);
}

void UnitFinder::add_weights() {
  const auto& weights = step_.ranks.at(rank_).weights;
  std::map<std::uint32_t, std::set<std::size_t>> blocks_of;  // by buffer
  const auto for_each = [&](const auto& visit) {
    for (const StepWeight& weight : weights) {
      const std::pair<OffloadClass, const StoredRange*> all[] = {{OffloadClass::params, &weight.value},
                                                                 {OffloadClass::grads, &weight.gradient},
                                                                 {OffloadClass::optimizer, &weight.master},
                                                                 {OffloadClass::optimizer, &weight.first},
                                                                 {OffloadClass::optimizer, &weight.second}};
      for (const auto& [of, range] : all) {
        if (!range->empty()) visit(weight, of, range->buffer);
      }
    }
  };
  for_each([&](const StepWeight& weight, OffloadClass, Buffer buffer) {
    if (!weight.tied || weight.gradient.buffer == buffer) blocks_of[buffer.id].insert(weight.block);
  });
  for_each([&](const StepWeight& weight, OffloadClass of, Buffer buffer) {
    const auto& blocks = blocks_of[buffer.id];
    const bool shared  = of == OffloadClass::grads && blocks.size() > 1;
    const auto block   = blocks.empty() ? weight.block : *blocks.begin();
    add(of, shared ? step_.graph.spec(buffer).name : step_.model.blocks[block].name, buffer);
  });
}

// Whole gradients of shard units, and buckets that gradients are copied to.
void UnitFinder::add_other_gradients(std::span<const Buffer> buffers) {
  for (const Buffer buffer : buffers) {
    const BufferSpec& spec = step_.graph.spec(buffer);
    if (spec.token || spec.size_bytes == 0 || step_.role(buffer) != MemoryRole::gradients) continue;
    add(OffloadClass::grads, spec.name, buffer);
  }
}

// Tensors of the forward pass that the backward pass reads.
void UnitFinder::add_activations(std::span<const Node> nodes) {
  const Graph& graph = step_.graph;
  std::map<std::uint32_t, Labels> made_by;  // by buffer
  for (const Node node : nodes) {
    const Labels labels = graph.labels(node);
    const bool backward = labels.phase == "backward" || labels.phase == "weight" || labels.phase == recompute_phase;
    if (labels.phase != "forward" && !backward) continue;
    for (std::size_t i = 0; i < graph.num_accesses(node); ++i) {
      const Graph::AccessView access = graph.access(node, i);
      const BufferSpec& spec         = graph.spec(access.buffer);
      if (spec.token || spec.size_bytes == 0 || spec.lifetime != Lifetime::step || spec.space != Space::device ||
          step_.role(access.buffer) != MemoryRole::activations)
        continue;
      if (!backward) {
        if (writes(access.mode)) made_by.try_emplace(access.buffer.id, labels);
        continue;
      }
      const auto found = made_by.find(access.buffer.id);
      if (found == made_by.end()) continue;
      const Labels& at = found->second;
      add(OffloadClass::activations,
          str(at.layer >= 0 ? str("layer", at.layer) : str("stage", at.stage), " mb", at.microbatch), access.buffer,
          at.layer);
    }
  }
}

void UnitFinder::leave_small(Candidate& unit) const {
  const auto bytes_of = [&](Buffer buffer) { return step_.graph.spec(buffer).size_bytes; };
  std::int64_t most   = 0;
  for (const Buffer buffer : unit.buffers) most = std::max(most, bytes_of(buffer));
  std::erase_if(unit.buffers, [&](Buffer buffer) { return bytes_of(buffer) * 1024 < most; });
  for (const Buffer buffer : unit.buffers) unit.bytes += bytes_of(buffer);
}

std::set<std::uint32_t> buffers_with_copies(const StepGraph& step, Rank rank) {
  std::map<std::string, const StepWeight*> here;
  for (const StepWeight& weight : step.ranks.at(rank).weights) here.emplace(step.spec(weight).name, &weight);
  std::set<std::uint32_t> found;
  for (const Block& block : step.model.blocks) {
    for (const WeightSpec& spec : block.weights) {
      if (spec.tied_to.empty() || here.contains(spec.name) == here.contains(spec.tied_to)) continue;
      const StepWeight& weight = *here.at(here.contains(spec.name) ? spec.name : spec.tied_to);
      for (const StoredRange* range :
           {&weight.value, &weight.gradient, &weight.master, &weight.first, &weight.second}) {
        if (!range->empty()) found.insert(range->buffer.id);
      }
    }
  }
  return found;
}

}  // namespace

void StepUnits::find_parts(const Graph& graph) {
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i)
    parts_[graph.spec(Buffer{i}).rank].buffers.push_back(Buffer{i});
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) parts_[graph.rank(Node{i})].nodes.push_back(Node{i});
}

const RankUnits& StepUnits::of(const StepGraph& step, Rank rank) {
  const auto found = known_.find(rank);
  if (found != known_.end()) return found->second;
  if (parts_.empty()) find_parts(step.graph);
  const Parts& parts = parts_[rank];
  RankUnits units    = UnitFinder(step, rank).find(parts.buffers, parts.nodes);
  units.with_copies  = buffers_with_copies(step, rank);
  for (const StepWeight& weight : step.ranks.at(rank).weights) {
    if (!weight.master.empty()) units.masters.insert(weight.master.buffer.id);
  }
  return known_.emplace(rank, std::move(units)).first->second;
}

}  // namespace stepgraph::offload
