#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "graphs/collective_rounds.hpp"

// What the algorithms are built from: internal to graphs/.
namespace stepgraph::collective {

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

  // The reduction of everybody's `in` at the root, which keeps it in `total`; whoever else receives on the way keeps
  // what it has so far in `partial`.
  void reduce_up(const std::vector<std::vector<Edge>>& rounds, int root, Store total, Store partial) {
    std::vector<char> holds(static_cast<std::size_t>(n_), 0);  // a sum of its own
    const auto sum = [&](int member) { return all(member == root ? total : partial); };
    for (const auto& round : rounds) {
      for (const auto& [from, to] : round) hold(to, sum(to), holds);
    }
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

inline Members from_root(int n, int root) {
  Members members(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) members[static_cast<std::size_t>(i)] = (root + i) % n;
  return members;
}

// `in` to where the member's own bytes lie in `out`.
inline void copy_own(Builder& b) {
  for (int m = 0; m < b.n(); ++m) {
    if (!b.in_place(m)) b.copy(m, {b.shard(Store::out, m)}, {b.own(Store::in, m)});
  }
}
inline void copy_all(Builder& b, Store to) {
  for (int m = 0; m < b.n(); ++m) {
    if (to == Store::work) b.need_work(m, b.shape().bytes);
    if (to == Store::work || !b.in_place(m)) b.copy(m, {b.all(to)}, {b.all(Store::in)});
  }
}

// The collectives that go up a tree to a root, down from it, or both; a barrier is up and down without bytes.
void along_trees(Builder& b, const std::vector<std::vector<Edge>>& up, int root);

}  // namespace stepgraph::collective
