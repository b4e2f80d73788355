#include "graphs/collectives/builder.hpp"

namespace stepgraph {
namespace {

using namespace collective;

// Members as nodes of equal size.
struct Nodes {
  int count, size;
  [[nodiscard]] int at(int node, int place) const { return node * size + place; }
  [[nodiscard]] Members inside(int node, int first) const {  // from place `first` on, around
    Members out;
    for (int i = 0; i < size; ++i) out.push_back(at(node, (first + i) % size));
    return out;
  }
  [[nodiscard]] Members across(int place, int first) const {
    Members out;
    for (int i = 0; i < count; ++i) out.push_back(at((first + i) % count, place));
    return out;
  }
  // Up to the root's place on every node, then over nodes to the root.
  [[nodiscard]] std::vector<std::vector<Edge>> up(int root) const {
    std::vector<Members> lists;
    for (int node = 0; node < count; ++node) lists.push_back(inside(node, root % size));
    auto rounds       = Builder::up(lists);
    const auto beyond = Builder::up({across(root % size, root / size)});
    rounds.insert(rounds.end(), beyond.begin(), beyond.end());
    return rounds;
  }
};

void two_level_all_reduce(Builder& b, const Nodes& nodes) {
  copy_all(b, Store::out);
  std::vector<Circle> inside, across;
  for (int node = 0; node < nodes.count; ++node) {
    inside.push_back({nodes.inside(node, 0), {}});
    for (int place = 0; place < nodes.size; ++place)
      inside.back().segments.push_back({b.segment(b.all(Store::out), place, nodes.size)});
  }
  for (int place = 0; place < nodes.size; ++place) {
    across.push_back({nodes.across(place, 0), {}});
    for (int node = 0; node < nodes.count; ++node)
      across.back().segments.push_back({b.segment(b.segment(b.all(Store::out), place, nodes.size), node, nodes.count)});
  }
  b.circle_reduce_scatter(inside);
  b.circle_reduce_scatter(across);
  for (const Circle& circle : across) {
    for (std::size_t i = 0; i < circle.members.size(); ++i) b.end_average(circle.members[i], circle.segments[i]);
  }
  b.circle_all_gather(across);
  b.circle_all_gather(inside);
}

// Inside a node, the segment of a place is all shards of that place; across nodes, the shard of each node.
std::pair<std::vector<Circle>, std::vector<Circle>> shard_circles(const Builder& b, const Nodes& nodes, Store store) {
  std::vector<Circle> inside, across;
  for (int node = 0; node < nodes.count; ++node) {
    inside.push_back({nodes.inside(node, 0), std::vector<Bytes>(static_cast<std::size_t>(nodes.size))});
    for (int place = 0; place < nodes.size; ++place) {
      for (int other = 0; other < nodes.count; ++other)
        inside.back().segments[static_cast<std::size_t>(place)].push_back(b.shard(store, nodes.at(other, place)));
    }
  }
  for (int place = 0; place < nodes.size; ++place) {
    across.push_back({nodes.across(place, 0), {}});
    for (int node = 0; node < nodes.count; ++node)
      across.back().segments.push_back({b.shard(store, nodes.at(node, place))});
  }
  return {inside, across};
}

// First inside nodes, to the member at the receiver's place; then across nodes, all slices for one node in one message.
void two_level_exchange(Builder& b, const Nodes& nodes) {
  const auto waits     = [&](int node, int place) { return b.shard(Store::work, nodes.at(node, place)); };  // for, from
  const auto hand_over = [&](int place, int to) {  // everything for place `to` of any node
    Bytes source, target;
    for (int other = 0; other < nodes.count; ++other) {
      source.push_back(b.shard(Store::in, nodes.at(other, to)));
      target.push_back(waits(other, place));
    }
    return std::pair(source, target);
  };
  for (int m = 0; m < b.n(); ++m) {
    b.need_work(m, b.shape().bytes);
    const auto [source, target] = hand_over(m % nodes.size, m % nodes.size);
    b.copy(m, target, source);
  }
  for (int k = 1; k < nodes.size; ++k) {
    b.next_round();
    for (int m = 0; m < b.n(); ++m) {
      const int node = m / nodes.size, place = m % nodes.size, to = (place + k) % nodes.size;
      const auto [source, target] = hand_over(place, to);
      b.send(m, source, nodes.at(node, to), target);
    }
  }
  const auto pass_on = [&](int node, int to) {
    Bytes source, target;
    for (int place = 0; place < nodes.size; ++place) {
      source.push_back(waits(to, place));
      target.push_back(b.shard(Store::out, nodes.at(node, place)));
    }
    return std::pair(source, target);
  };
  for (int k = 1; k < nodes.count; ++k) {
    b.next_round();
    for (int m = 0; m < b.n(); ++m) {
      const int node = m / nodes.size, place = m % nodes.size, to = (node + k) % nodes.count;
      const auto [source, target] = pass_on(node, to);
      b.send(m, source, nodes.at(to, place), target);
    }
  }
  for (int m = 0; m < b.n(); ++m) {
    const auto [source, target] = pass_on(m / nodes.size, m / nodes.size);
    b.copy(m, target, source);
  }
}

}  // namespace

Rounds hierarchical_rounds(const CollectiveShape& shape, int per_node) {
  Builder b(shape);
  const Nodes nodes{shape.members / per_node, per_node};
  const int root = has_root(shape.op) ? shape.root : 0;
  switch (shape.op) {
    case PartOp::all_reduce:
      two_level_all_reduce(b, nodes);
      break;
    case PartOp::all_gather: {
      copy_own(b);
      const auto [inside, across] = shard_circles(b, nodes, Store::out);
      b.circle_all_gather(across);
      b.circle_all_gather(inside);
      break;
    }
    case PartOp::reduce_scatter: {
      copy_all(b, Store::work);
      const auto [inside, across] = shard_circles(b, nodes, Store::work);
      b.circle_reduce_scatter(inside);
      b.circle_reduce_scatter(across);
      for (int m = 0; m < b.n(); ++m) {
        b.end_average(m, {b.shard(Store::work, m)});
        b.copy(m, {b.own(Store::out, m)}, {b.shard(Store::work, m)});
      }
      break;
    }
    case PartOp::all_to_all:
      two_level_exchange(b, nodes);
      break;
    default:
      along_trees(b, nodes.up(root), root);
  }
  return b.take();
}

}  // namespace stepgraph
