#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "graphs/collectives/rounds.hpp"

// Building blocks of the algorithms: internal to graphs/.
namespace stepgraph::collective {

using Members = std::vector<int>;
using Edge    = std::pair<int, int>;  // (from, to)

// Members in a circle and what is passed around: segment j belongs to the j-th of them.
struct Circle {
  Members members;
  std::vector<Bytes> segments;
};

// Writes the rounds of one collective. Its members are building blocks that several algorithms share.
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
  // The k-th of `count` segments of a range, about equal, whole elements.
  [[nodiscard]] ByteRange segment(const ByteRange& of, int k, int count) const {
    const std::int64_t elements = of.length / shape_.element;
    const std::int64_t first = elements * k / count, last = elements * (k + 1) / count;
    return {of.store, of.begin + first * shape_.element, (last - first) * shape_.element};
  }
  [[nodiscard]] bool in_place(int member) const { return shape_.in_place[static_cast<std::size_t>(member)] != 0; }
  void need_work(int member, std::int64_t bytes) {
    std::int64_t& work = out_.work_bytes[static_cast<std::size_t>(member)];
    work               = std::max(work, bytes);
  }

  // --- rounds ----------------------------------------------------------------------------------------------------
  void next_round() { out_.rounds.emplace_back(); }
  void send(int from, Bytes source, int to, Bytes target, bool reduce = false) {
    out_.rounds.back().transfers.push_back({from, to, std::move(source), std::move(target), reduce});
  }
  void copy(int member, Bytes into, Bytes from) {
    local(LocalWork::Kind::copy, member, std::move(into), std::move(from));
  }
  void reduce(int member, Bytes into, Bytes from) {
    local(LocalWork::Kind::reduce, member, std::move(into), std::move(from));
  }
  void end_average(int member, const Bytes& values) {
    if (shape_.reduction == Reduction::average) local(LocalWork::Kind::divide, member, values, {});
  }

  // --- circles ---------------------------------------------------------------------------------------------------
  // Every member ends up with the reduction of its own segment; all circles have the same length.
  void circle_reduce_scatter(const std::vector<Circle>& circles);
  // Every member ends up with all segments.
  void circle_all_gather(const std::vector<Circle>& circles);

  // --- trees -----------------------------------------------------------------------------------------------------
  // Rounds of messages up the binomial trees of lists of equal length, to the first of each list.
  [[nodiscard]] static std::vector<std::vector<Edge>> up(const std::vector<Members>& lists);
  [[nodiscard]] static std::vector<std::vector<Edge>> down(std::vector<std::vector<Edge>> rounds);

  // Reduces all members' `in` to the root, which keeps the sum in `total`. Members on the way keep their partial sums
  // in `partial`.
  void reduce_up(const std::vector<std::vector<Edge>>& rounds, int root, Store total, Store partial);

  // Sends the root's bytes to every member's `out`.
  void broadcast_down(const std::vector<std::vector<Edge>>& rounds, int root, Store at_root);

  // Sends every member's shard to the root's `out`. Shards on their way are kept in `waiting`.
  void gather_up(const std::vector<std::vector<Edge>>& rounds, int root, Store waiting);

  // Sends the root's shards to every member's `out`: the reverse of gather_up.
  void scatter_down(const std::vector<std::vector<Edge>>& upwards, int root, Store at_root);

  // Messages without bytes, for a barrier.
  void no_bytes(const std::vector<std::vector<Edge>>& rounds);

  [[nodiscard]] const CollectiveShape& shape() const { return shape_; }
  [[nodiscard]] int n() const { return n_; }

 private:
  void local(LocalWork::Kind kind, int member, Bytes into, Bytes from) {
    out_.rounds.back().locals.push_back({kind, member, std::move(into), std::move(from)});
  }
  // Begins a sum with the member's own `in`, unless it is there already.
  void hold(int member, const ByteRange& sum, std::vector<char>& holds);
  [[nodiscard]] std::vector<Members> shards_of_their_own() const;

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
