#include "graphs/collective_rounds.hpp"

#include <algorithm>
#include <utility>

namespace stepgraph {
namespace {

using Members = std::vector<int>;
using Edge    = std::pair<int, int>;  // (from, to)

// Members in a circle and what is passed around: chunk j belongs to the j-th of them.
struct Circle {
  Members members;
  std::vector<Bytes> chunks;
};

class Builder {
 public:
  explicit Builder(const CollectiveShape& shape) : shape_(shape), n_(shape.members) {
    out_.work_bytes.assign(static_cast<std::size_t>(n_), 0);
    out_.rounds.emplace_back();  // for what has to be done first
    shard_begin_.push_back(0);
    for (const std::int64_t size : shape.shards) shard_begin_.push_back(shard_begin_.back() + size);
  }
  Rounds take() { return std::move(out_); }

  // --- bytes -----------------------------------------------------------------------------------------------------
  [[nodiscard]] ByteRange all(Store store) const { return {store, 0, shape_.bytes}; }
  [[nodiscard]] ByteRange shard(Store store, int member) const {
    const auto m = static_cast<std::size_t>(member);
    return {store, shard_begin_[m], shape_.shards[m]};
  }
  [[nodiscard]] ByteRange own(Store store, int member) const {  // its shard, where the store holds no other
    return {store, 0, shape_.shards[static_cast<std::size_t>(member)]};
  }
  // The k-th of `count` pieces of a range, about equal, whole elements.
  [[nodiscard]] ByteRange piece(const ByteRange& of, int k, int count) const {
    const std::int64_t elements = of.length / shape_.element;
    const std::int64_t first = elements * k / count, last = elements * (k + 1) / count;
    return {of.store, of.begin + first * shape_.element, (last - first) * shape_.element};
  }
  [[nodiscard]] bool in_place(int member) const { return shape_.in_place[static_cast<std::size_t>(member)] != 0; }
  void need_work(int member, std::int64_t bytes) {
    std::int64_t& work = out_.work_bytes[static_cast<std::size_t>(member)];
    work               = std::max(work, bytes);
  }

  // --- steps -----------------------------------------------------------------------------------------------------
  void next_round() { out_.rounds.emplace_back(); }
  void send(int from, Bytes source, int to, Bytes target, bool reduce = false) {
    out_.rounds.back().transfers.push_back({from, to, std::move(source), std::move(target), reduce});
  }
  void copy(int member, Bytes into, Bytes from) {
    local(LocalStep::Kind::copy, member, std::move(into), std::move(from));
  }
  void reduce(int member, Bytes into, Bytes from) {
    local(LocalStep::Kind::reduce, member, std::move(into), std::move(from));
  }
  void end_average(int member, const Bytes& values) {
    if (shape_.reduction == Reduction::average) local(LocalStep::Kind::divide, member, values, {});
  }

  // --- circles ---------------------------------------------------------------------------------------------------
  // Every member ends up with the reduction of its own chunk; all circles have the same length.
  void circle_reduce_scatter(const std::vector<Circle>& circles) {
    const int length = static_cast<int>(circles.front().members.size());
    for (int step = 0; step + 1 < length; ++step) {
      next_round();
      for (const Circle& circle : circles) {
        for (int i = 0; i < length; ++i) {
          const Bytes& chunk = circle.chunks[static_cast<std::size_t>((i - step - 1 + 2 * length) % length)];
          send(circle.members[static_cast<std::size_t>(i)], chunk,
               circle.members[static_cast<std::size_t>((i + 1) % length)], chunk, /*reduce=*/true);
        }
      }
    }
  }
  // Every member ends up with all chunks.
  void circle_all_gather(const std::vector<Circle>& circles) {
    const int length = static_cast<int>(circles.front().members.size());
    for (int step = 0; step + 1 < length; ++step) {
      next_round();
      for (const Circle& circle : circles) {
        for (int i = 0; i < length; ++i) {
          const Bytes& chunk = circle.chunks[static_cast<std::size_t>((i - step + length) % length)];
          send(circle.members[static_cast<std::size_t>(i)], chunk,
               circle.members[static_cast<std::size_t>((i + 1) % length)], chunk);
        }
      }
    }
  }

  // --- trees -----------------------------------------------------------------------------------------------------
  // Rounds of messages up the binomial trees of lists of equal length, to the first of each list.
  [[nodiscard]] static std::vector<std::vector<Edge>> up(const std::vector<Members>& lists) {
    std::vector<std::vector<Edge>> rounds;
    const std::size_t length = lists.front().size();
    for (std::size_t mask = 1; mask < length; mask *= 2) {
      rounds.emplace_back();
      for (const Members& list : lists) {
        for (std::size_t p = mask; p < length; p += 2 * mask) rounds.back().emplace_back(list[p], list[p - mask]);
      }
    }
    return rounds;
  }
  [[nodiscard]] static std::vector<std::vector<Edge>> down(std::vector<std::vector<Edge>> rounds) {
    std::reverse(rounds.begin(), rounds.end());
    for (auto& round : rounds) {
      for (Edge& edge : round) std::swap(edge.first, edge.second);
    }
    return rounds;
  }

  // The reduction of everybody's `in` at the root, which keeps it in `total`; whoever receives on the way, in `work`.
  void reduce_up(const std::vector<std::vector<Edge>>& rounds, int root, Store total) {
    std::vector<char> holds(static_cast<std::size_t>(n_), 0);  // a sum of its own
    const auto sum = [&](int member) { return all(member == root ? total : Store::work); };
    for (const auto& round : rounds) {
      for (const auto& [from, to] : round) hold(to, sum(to), holds);
    }
    hold(root, sum(root), holds);
    for (const auto& round : rounds) {
      next_round();
      for (const auto& [from, to] : round) {
        send(from, {holds[static_cast<std::size_t>(from)] ? sum(from) : all(Store::in)}, to, {sum(to)},
             /*reduce=*/true);
      }
    }
    end_average(root, {sum(root)});
  }

  // The root's bytes to everybody's `out`.
  void broadcast_down(const std::vector<std::vector<Edge>>& rounds, int root, Store at_root) {
    for (const auto& round : rounds) {
      next_round();
      for (const auto& [from, to] : round)
        send(from, {all(from == root ? at_root : Store::out)}, to, {all(Store::out)});
    }
  }

  // Everybody's shard to the root's `out`; shards on their way wait in `waiting`.
  void gather_up(const std::vector<std::vector<Edge>>& rounds, int root, Store waiting) {
    std::vector<Members> held = shards_of_their_own();
    for (const auto& round : rounds) {
      next_round();
      for (const auto& [from, to] : round) {
        Bytes source, target;
        for (const int s : held[static_cast<std::size_t>(from)]) {
          source.push_back(s == from ? own(Store::in, s) : shard(waiting, s));
          target.push_back(shard(to == root ? Store::out : waiting, s));
        }
        if (to != root && waiting == Store::work) need_work(to, shape_.bytes);
        send(from, std::move(source), to, std::move(target));
        auto& more = held[static_cast<std::size_t>(to)];
        more.insert(more.end(), held[static_cast<std::size_t>(from)].begin(),
                    held[static_cast<std::size_t>(from)].end());
      }
    }
  }

  // The root's shards to everybody's `out`: what gather_up does, backwards.
  void scatter_down(const std::vector<std::vector<Edge>>& upwards, int root, Store at_root) {
    struct Message {
      int from, to;
      Members shards;
    };
    std::vector<Members> held = shards_of_their_own();
    std::vector<std::vector<Message>> rounds;
    for (const auto& round : upwards) {
      rounds.emplace_back();
      for (const auto& [child, parent] : round) {
        rounds.back().push_back({parent, child, held[static_cast<std::size_t>(child)]});
        auto& more = held[static_cast<std::size_t>(parent)];
        more.insert(more.end(), held[static_cast<std::size_t>(child)].begin(),
                    held[static_cast<std::size_t>(child)].end());
      }
    }
    std::reverse(rounds.begin(), rounds.end());
    for (const auto& round : rounds) {
      next_round();
      for (const Message& message : round) {
        Bytes source, target;
        for (const int s : message.shards) {
          source.push_back(shard(message.from == root ? at_root : Store::work, s));
          target.push_back(s == message.to ? own(Store::out, s) : shard(Store::work, s));
          if (s != message.to) need_work(message.to, shape_.bytes);
        }
        send(message.from, std::move(source), message.to, std::move(target));
      }
    }
  }

  void no_bytes(const std::vector<std::vector<Edge>>& rounds) {
    out_.keep_empty = true;
    for (const auto& round : rounds) {
      next_round();
      for (const auto& [from, to] : round) send(from, {}, to, {});
    }
  }

  const CollectiveShape& shape() const { return shape_; }
  [[nodiscard]] int n() const { return n_; }
  Rounds& out() { return out_; }

 private:
  void local(LocalStep::Kind kind, int member, Bytes into, Bytes from) {
    out_.rounds.back().locals.push_back({kind, member, std::move(into), std::move(from)});
  }
  void hold(int member, const ByteRange& sum, std::vector<char>& holds) {
    if (std::exchange(holds[static_cast<std::size_t>(member)], 1)) return;
    if (sum.store == Store::work) need_work(member, shape_.bytes);
    if (sum.store == Store::work || !in_place(member)) copy(member, {sum}, {all(Store::in)});
  }
  [[nodiscard]] std::vector<Members> shards_of_their_own() const {
    std::vector<Members> held;
    for (int i = 0; i < n_; ++i) held.push_back({i});
    return held;
  }

  const CollectiveShape& shape_;
  int n_;
  std::vector<std::int64_t> shard_begin_;
  Rounds out_;
};

Members from_root(int n, int root) {
  Members members(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) members[static_cast<std::size_t>(i)] = (root + i) % n;
  return members;
}

// `in` to where the member's own bytes lie in `out`.
void copy_own(Builder& b, Store out = Store::out) {
  for (int m = 0; m < b.n(); ++m) {
    if (out == Store::work || !b.in_place(m)) b.copy(m, {b.shard(out, m)}, {b.own(Store::in, m)});
  }
}
void copy_all(Builder& b, Store to) {
  for (int m = 0; m < b.n(); ++m) {
    if (to == Store::work) b.need_work(m, b.shape().bytes);
    if (to == Store::work || !b.in_place(m)) b.copy(m, {b.all(to)}, {b.all(Store::in)});
  }
}

// How many pieces a message is cut into that is passed from one to the next: enough to keep all of them busy.
int num_pieces(const CollectiveShape& shape) {
  constexpr std::int64_t least = 64 * 1024;
  return static_cast<int>(std::clamp<std::int64_t>(shape.bytes / least, 1, 2 * shape.members));
}

// --- rings -----------------------------------------------------------------------------------------------------------

// Shards pass through two places in `work` on their way; each member adds its own.
void ring_reduce_scatter(Builder& b) {
  const int n                = b.n();
  const std::int64_t largest = *std::max_element(b.shape().shards.begin(), b.shape().shards.end());
  const auto place           = [&](int step, int shard) {
    return ByteRange{Store::work, step % 2 * largest, b.shape().shards[static_cast<std::size_t>(shard)]};
  };
  for (int m = 0; m < n; ++m) b.need_work(m, 2 * largest);
  for (int step = 0; step + 1 < n; ++step) {
    b.next_round();
    for (int m = 0; m < n; ++m) {
      const int given = (m - step - 1 + 2 * n) % n, to = (m + 1) % n;
      b.send(m, {step == 0 ? b.shard(Store::in, given) : place(step - 1, given)}, to, {place(step, given)});
      b.reduce(to, {place(step, given)}, {b.shard(Store::in, given)});
    }
  }
  for (int m = 0; m < n; ++m) {
    b.end_average(m, {place(n, m)});
    b.copy(m, {b.own(Store::out, m)}, {place(n, m)});
  }
}

// From the root along a chain, piece by piece.
void chain_broadcast(Builder& b) {
  const Members chain = from_root(b.n(), b.shape().root);
  const int pieces    = num_pieces(b.shape());
  for (int t = 0; t < pieces + b.n() - 2; ++t) {
    b.next_round();
    for (int p = 0; p + 1 < b.n(); ++p) {
      if (t - p < 0 || t - p >= pieces) continue;
      b.send(chain[static_cast<std::size_t>(p)], {b.piece(b.all(p == 0 ? Store::in : Store::out), t - p, pieces)},
             chain[static_cast<std::size_t>(p + 1)], {b.piece(b.all(Store::out), t - p, pieces)});
    }
  }
}

// Along a chain to the root, piece by piece; each member adds its own.
void chain_reduce(Builder& b) {
  const Members chain = from_root(b.n(), b.shape().root);
  const int pieces = num_pieces(b.shape()), n = b.n();
  for (int p = 1; p + 1 < n; ++p) {
    b.need_work(chain[static_cast<std::size_t>(p)], b.shape().bytes);
    b.copy(chain[static_cast<std::size_t>(p)], {b.all(Store::work)}, {b.all(Store::in)});
  }
  const int root = chain.front();
  if (!b.in_place(root)) b.copy(root, {b.all(Store::out)}, {b.all(Store::in)});
  for (int t = 0; t < pieces + n - 2; ++t) {
    b.next_round();
    for (int p = n - 1; p >= 1; --p) {
      const int k = t - (n - 1 - p);
      if (k < 0 || k >= pieces) continue;
      b.send(chain[static_cast<std::size_t>(p)], {b.piece(b.all(p == n - 1 ? Store::in : Store::work), k, pieces)},
             chain[static_cast<std::size_t>(p - 1)], {b.piece(b.all(p == 1 ? Store::out : Store::work), k, pieces)},
             /*reduce=*/true);
    }
  }
  b.end_average(root, {b.all(Store::out)});
}

// Shards travel along a chain to the root, one hop a round; a scatter is the same backwards.
void chain_gather_or_scatter(Builder& b, bool gather) {
  const Members chain = from_root(b.n(), b.shape().root);
  const int n         = b.n();
  for (int round = 0; round + 1 < n; ++round) {
    b.next_round();
    const int t = gather ? round : n - 2 - round;
    for (int p = 1; p + t < n; ++p) {
      const int far = chain[static_cast<std::size_t>(p)], near = chain[static_cast<std::size_t>(p - 1)];
      const int s        = chain[static_cast<std::size_t>(p + t)];
      const auto at_far  = [&](Store end) { return s == far ? b.own(end, s) : b.shard(Store::work, s); };
      const auto at_near = [&](Store end) { return b.shard(p == 1 ? end : Store::work, s); };
      if (s != far) b.need_work(far, b.shape().bytes);
      if (gather) {
        b.send(far, {at_far(Store::in)}, near, {at_near(Store::out)});
        if (p > 1) b.need_work(near, b.shape().bytes);
      } else {
        b.send(near, {at_near(Store::in)}, far, {at_far(Store::out)});
      }
    }
  }
}

// In round k everybody's slice for its k-th neighbour.
void pairwise_exchange(Builder& b) {
  const int n = b.n();
  for (int m = 0; m < n; ++m) {
    if (b.in_place(m)) b.need_work(m, b.shape().bytes);
    if (!b.in_place(m)) b.copy(m, {b.shard(Store::out, m)}, {b.shard(Store::in, m)});
  }
  for (int k = 1; k < n; ++k) {
    b.next_round();
    for (int m = 0; m < n; ++m) {
      const int to = (m + k) % n;
      b.send(m, {b.shard(Store::in, to)}, to, {b.shard(b.in_place(to) ? Store::work : Store::out, m)});
    }
  }
  for (int m = 0; m < n; ++m) {
    for (int k = 1; k < n && b.in_place(m); ++k) {
      const int from = (m + n - k) % n;
      b.copy(m, {b.shard(Store::out, from)}, {b.shard(Store::work, from)});
    }
  }
}

// Bruck: in round k everything whose way has bit k set goes 2^k members on.
void bruck_exchange(Builder& b) {
  const int n = b.n();
  for (int m = 0; m < n; ++m) {
    b.need_work(m, b.shape().bytes);
    Bytes into, from;
    for (int way = 0; way < n; ++way) {
      into.push_back(b.shard(Store::work, way));
      from.push_back(b.shard(Store::in, (m + way) % n));
    }
    b.copy(m, into, from);
  }
  for (int k = 1; k < n; k *= 2) {
    b.next_round();
    Bytes moved;
    for (int way = 0; way < n; ++way) {
      if (way & k) moved.push_back(b.shard(Store::work, way));
    }
    for (int m = 0; m < n; ++m) b.send(m, moved, (m + k) % n, moved);
  }
  for (int m = 0; m < n; ++m) {
    Bytes into, from;
    for (int way = 0; way < n; ++way) {
      into.push_back(b.shard(Store::out, (m + n - way) % n));
      from.push_back(b.shard(Store::work, way));
    }
    b.copy(m, into, from);
  }
}

// --- two levels ------------------------------------------------------------------------------------------------------

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
      inside.back().chunks.push_back({b.piece(b.all(Store::out), place, nodes.size)});
  }
  for (int place = 0; place < nodes.size; ++place) {
    across.push_back({nodes.across(place, 0), {}});
    for (int node = 0; node < nodes.count; ++node)
      across.back().chunks.push_back({b.piece(b.piece(b.all(Store::out), place, nodes.size), node, nodes.count)});
  }
  b.circle_reduce_scatter(inside);
  b.circle_reduce_scatter(across);
  for (const Circle& circle : across) {
    for (std::size_t i = 0; i < circle.members.size(); ++i) b.end_average(circle.members[i], circle.chunks[i]);
  }
  b.circle_all_gather(across);
  b.circle_all_gather(inside);
}

// Inside a node, the chunk of a place is all shards of that place; across nodes, the shard of each node.
std::pair<std::vector<Circle>, std::vector<Circle>> shard_circles(const Builder& b, const Nodes& nodes, Store store) {
  std::vector<Circle> inside, across;
  for (int node = 0; node < nodes.count; ++node) {
    inside.push_back({nodes.inside(node, 0), std::vector<Bytes>(static_cast<std::size_t>(nodes.size))});
    for (int place = 0; place < nodes.size; ++place) {
      for (int other = 0; other < nodes.count; ++other)
        inside.back().chunks[static_cast<std::size_t>(place)].push_back(b.shard(store, nodes.at(other, place)));
    }
  }
  for (int place = 0; place < nodes.size; ++place) {
    across.push_back({nodes.across(place, 0), {}});
    for (int node = 0; node < nodes.count; ++node)
      across.back().chunks.push_back({b.shard(store, nodes.at(node, place))});
  }
  return {inside, across};
}

// First inside nodes, to whoever has the receiver's place; then across, everything for one node in one message.
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

// What trees and hierarchies have in common: all but the way up to the root.
void along_trees(Builder& b, const std::vector<std::vector<Edge>>& up, int root) {
  switch (b.shape().op) {
    case PartOp::all_reduce:
      b.reduce_up(up, root, Store::out);
      return b.broadcast_down(Builder::down(up), root, Store::out);
    case PartOp::reduce:
      return b.reduce_up(up, root, Store::out);
    case PartOp::broadcast:
      if (!b.in_place(root)) b.copy(root, {b.all(Store::out)}, {b.all(Store::in)});
      return b.broadcast_down(Builder::down(up), root, Store::in);
    case PartOp::gather:
      if (!b.in_place(root)) b.copy(root, {b.shard(Store::out, root)}, {b.own(Store::in, root)});
      return b.gather_up(up, root, Store::work);
    case PartOp::scatter:
      if (!b.in_place(root)) b.copy(root, {b.own(Store::out, root)}, {b.shard(Store::in, root)});
      return b.scatter_down(up, root, Store::in);
    case PartOp::all_gather:
      copy_own(b);
      b.gather_up(up, root, Store::out);
      return b.broadcast_down(Builder::down(up), root, Store::out);
    case PartOp::reduce_scatter:
      b.reduce_up(up, root, Store::work);
      b.copy(root, {b.own(Store::out, root)}, {b.shard(Store::work, root)});
      return b.scatter_down(up, root, Store::work);
    default:
      b.no_bytes(up);
      return b.no_bytes(Builder::down(up));
  }
}

}  // namespace

Rounds ring_rounds(const CollectiveShape& shape) {
  Builder b(shape);
  const int n = shape.members;
  Circle circle{from_root(n, 0), {}};
  switch (shape.op) {
    case PartOp::all_reduce:
      copy_all(b, Store::out);
      for (int k = 0; k < n; ++k) circle.chunks.push_back({b.piece(b.all(Store::out), k, n)});
      b.circle_reduce_scatter({circle});
      for (int m = 0; m < n; ++m) b.end_average(m, circle.chunks[static_cast<std::size_t>(m)]);
      b.circle_all_gather({circle});
      break;
    case PartOp::all_gather:
      copy_own(b);
      for (int k = 0; k < n; ++k) circle.chunks.push_back({b.shard(Store::out, k)});
      b.circle_all_gather({circle});
      break;
    case PartOp::reduce_scatter:
      ring_reduce_scatter(b);
      break;
    case PartOp::broadcast:
      if (!b.in_place(shape.root)) b.copy(shape.root, {b.all(Store::out)}, {b.all(Store::in)});
      chain_broadcast(b);
      break;
    case PartOp::reduce:
      chain_reduce(b);
      break;
    case PartOp::gather:
      if (!b.in_place(shape.root))
        b.copy(shape.root, {b.shard(Store::out, shape.root)}, {b.own(Store::in, shape.root)});
      chain_gather_or_scatter(b, true);
      break;
    case PartOp::scatter:
      if (!b.in_place(shape.root))
        b.copy(shape.root, {b.own(Store::out, shape.root)}, {b.shard(Store::in, shape.root)});
      chain_gather_or_scatter(b, false);
      break;
    case PartOp::all_to_all:
      pairwise_exchange(b);
      break;
    default: {
      std::vector<Edge> around;
      for (int m = 0; m < n; ++m) around.emplace_back(m, (m + 1) % n);
      b.no_bytes(std::vector<std::vector<Edge>>(static_cast<std::size_t>(n - 1), around));
    }
  }
  return b.take();
}

Rounds tree_rounds(const CollectiveShape& shape) {
  Builder b(shape);
  const int root = has_root(shape.op) ? shape.root : 0;
  if (shape.op == PartOp::all_to_all) {
    bruck_exchange(b);
  } else {
    along_trees(b, Builder::up({from_root(shape.members, root)}), root);
  }
  return b.take();
}

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
