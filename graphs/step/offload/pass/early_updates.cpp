#include "graphs/step/offload/pass/early_updates.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "graphs/step/step_graph.hpp"

namespace stepgraph::offload {
namespace {

// The nodes so far that use a buffer, as places in the order.
struct LastUses {
  std::int64_t written = -1, read = -1;
};

// Gradients whose squares can be summed beside the backward pass.
std::vector<bool> gradients_with_early_norms(const Graph& graph, std::vector<bool> early) {
  std::vector<bool> is_reduced(graph.num_buffers(), false);  // by a collective that was the last to write
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    const bool is_norm = graph.op(Node{node}) == "square_sum";
    for (std::size_t i = 0; i < graph.num_accesses(Node{node}); ++i) {
      const auto access = graph.access(Node{node}, i);
      if (writes(access.mode)) is_reduced[access.buffer.id] = graph.has_part(Node{node});
      if (is_norm && access.mode == AccessMode::read && !is_reduced[access.buffer.id]) early[access.buffer.id] = true;
    }
  }
  return early;
}

class UpdateMover {
 public:
  UpdateMover(const Graph& graph, const std::vector<bool>& on_host, NodeOrder order)
      : graph_(graph), on_host_(on_host), order_(std::move(order)) {}

  NodeOrder moved() {
    find_places();
    std::vector<std::uint32_t> by_place(order_.nodes.size());
    for (std::uint32_t i = 0; i < by_place.size(); ++i) by_place[i] = i;
    std::stable_sort(by_place.begin(), by_place.end(), [&](std::uint32_t a, std::uint32_t b) {
      return std::tuple(after_[a], moves_[a]) < std::tuple(after_[b], moves_[b]);
    });
    std::vector<std::uint32_t> nodes;
    nodes.reserve(by_place.size());
    for (const std::uint32_t place : by_place) nodes.push_back(order_.nodes[place]);
    order_.nodes = std::move(nodes);
    return std::move(order_);
  }

 private:
  using LayerKey = std::tuple<Rank, int, int, bool>;  // stage and layer; on the host

  [[nodiscard]] bool is_update(std::uint32_t node) const {
    return graph_.labels(Node{node}).phase == update_phase && !graph_.has_part(Node{node});
  }

  // The last place before that the node has to follow.
  [[nodiscard]] std::int64_t place_after(std::uint32_t node) const {
    std::int64_t after = -1;
    for (std::size_t i = 0; i < graph_.num_accesses(Node{node}); ++i) {
      const auto access   = graph_.access(Node{node}, i);
      const LastUses& use = uses_[access.buffer.id];
      after               = std::max(after, writes(access.mode) ? std::max(use.written, use.read) : use.written);
    }
    return after;
  }

  // An update follows the sum of its gradient's squares: after an update on the host, the gradient may not be on the
  // device any more.
  void note(std::uint32_t node, std::int64_t place) {
    const bool is_norm = graph_.op(Node{node}) == "square_sum";
    for (std::size_t i = 0; i < graph_.num_accesses(Node{node}); ++i) {
      const auto access = graph_.access(Node{node}, i);
      LastUses& use     = uses_[access.buffer.id];
      std::int64_t& at  = writes(access.mode) || is_norm ? use.written : use.read;
      at                = std::max(at, place);
    }
  }

  [[nodiscard]] std::optional<LayerKey> group_of(std::uint32_t node) const {
    const Labels labels = graph_.labels(Node{node});
    if (labels.layer < 0) return std::nullopt;
    return LayerKey{graph_.rank(Node{node}), labels.stage, labels.layer, on_host_[node]};
  }

  void find_places() {
    std::map<LayerKey, std::int64_t> last_of;
    find_places({}, &last_of);
    find_places(last_of, nullptr);
    for (std::size_t i = 0; i < after_.size(); ++i) {
      if (moves_[i]) order_.like[order_.nodes[i]] = order_.like[order_.nodes[static_cast<std::size_t>(after_[i])]];
    }
  }

  // not_before: by group. last_of: gets the last place of each group.
  void find_places(const std::map<LayerKey, std::int64_t>& not_before, std::map<LayerKey, std::int64_t>* last_of) {
    const std::size_t count = order_.nodes.size();
    uses_.assign(graph_.num_buffers(), {});
    after_.resize(count);
    moves_.assign(count, false);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t node = order_.nodes[i];
      after_[i]                = static_cast<std::int64_t>(i);
      if (is_update(node)) place_update(i, not_before, last_of);
      note(node, after_[i]);
    }
  }

  void place_update(std::size_t i, const std::map<LayerKey, std::int64_t>& not_before,
                    std::map<LayerKey, std::int64_t>* last_of) {
    const std::uint32_t node = order_.nodes[i];
    std::int64_t after       = place_after(node);
    if (after < 0 || (!on_host_[node] && graph_.has_part(Node{order_.nodes[static_cast<std::size_t>(after)]}))) return;
    if (const auto group = group_of(node)) {
      if (const auto found = not_before.find(*group); found != not_before.end()) after = std::max(after, found->second);
      if (last_of != nullptr) {
        std::int64_t& last = last_of->try_emplace(*group, after).first->second;
        last               = std::max(last, after);
      }
    }
    after_[i] = after;
    moves_[i] = true;
  }

  const Graph& graph_;
  const std::vector<bool>& on_host_;
  NodeOrder order_;
  std::vector<LastUses> uses_;
  std::vector<std::int64_t> after_;  // by place: the place that the node follows; its own, if it stays
  std::vector<bool> moves_;
};

}  // namespace

NodeOrder with_early_updates(const Graph& graph, const std::vector<bool>& is_offloaded_gradient,
                             const std::vector<bool>& on_host) {
  return UpdateMover(graph, on_host, with_early_norms(graph, gradients_with_early_norms(graph, is_offloaded_gradient)))
      .moved();
}

}  // namespace stepgraph::offload
