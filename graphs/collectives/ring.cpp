#include "graphs/collectives/builder.hpp"

namespace stepgraph {
namespace {

using namespace collective;

// A message that passes along a chain is cut into segments, so that all members of the chain are busy.
int num_segments(const CollectiveShape& shape) {
  constexpr std::int64_t least = 64 * 1024;
  return static_cast<int>(std::clamp<std::int64_t>(shape.bytes / least, 1, 2 * shape.members));
}

// Shards pass through two places in `work` on their way; each member adds its own.
void ring_reduce_scatter(Builder& b) {
  const int n                = b.n();
  const std::int64_t largest = *std::max_element(b.shape().shards.begin(), b.shape().shards.end());
  const auto place           = [&](int round, int shard) {
    return ByteRange{Store::work, round % 2 * largest, b.shape().shards[static_cast<std::size_t>(shard)]};
  };
  for (int m = 0; m < n; ++m) b.need_work(m, 2 * largest);
  for (int round = 0; round + 1 < n; ++round) {
    b.next_round();
    for (int m = 0; m < n; ++m) {
      const int given = (m - round - 1 + 2 * n) % n, to = (m + 1) % n;
      b.send(m, {round == 0 ? b.shard(Store::in, given) : place(round - 1, given)}, to, {place(round, given)});
      b.reduce(to, {place(round, given)}, {b.shard(Store::in, given)});
    }
  }
  for (int m = 0; m < n; ++m) {
    b.end_average(m, {place(n, m)});
    b.copy(m, {b.own(Store::out, m)}, {place(n, m)});
  }
}

// From the root along a chain, segment by segment.
void chain_broadcast(Builder& b) {
  const Members chain = from_root(b.n(), b.shape().root);
  const int segments  = num_segments(b.shape());
  for (int t = 0; t < segments + b.n() - 2; ++t) {
    b.next_round();
    for (int p = 0; p + 1 < b.n(); ++p) {
      if (t - p < 0 || t - p >= segments) continue;
      b.send(chain[static_cast<std::size_t>(p)], {b.segment(b.all(p == 0 ? Store::in : Store::out), t - p, segments)},
             chain[static_cast<std::size_t>(p + 1)], {b.segment(b.all(Store::out), t - p, segments)});
    }
  }
}

// Along a chain to the root, segment by segment; each member adds its own.
void chain_reduce(Builder& b) {
  const Members chain = from_root(b.n(), b.shape().root);
  const int segments = num_segments(b.shape()), n = b.n();
  for (int p = 1; p + 1 < n; ++p) {
    b.need_work(chain[static_cast<std::size_t>(p)], b.shape().bytes);
    b.copy(chain[static_cast<std::size_t>(p)], {b.all(Store::work)}, {b.all(Store::in)});
  }
  const int root = chain.front();
  if (!b.in_place(root)) b.copy(root, {b.all(Store::out)}, {b.all(Store::in)});
  for (int t = 0; t < segments + n - 2; ++t) {
    b.next_round();
    for (int p = n - 1; p >= 1; --p) {
      const int k = t - (n - 1 - p);
      if (k < 0 || k >= segments) continue;
      b.send(chain[static_cast<std::size_t>(p)], {b.segment(b.all(p == n - 1 ? Store::in : Store::work), k, segments)},
             chain[static_cast<std::size_t>(p - 1)], {b.segment(b.all(p == 1 ? Store::out : Store::work), k, segments)},
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

// In round k every member sends the slice for its k-th neighbour.
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

}  // namespace

Rounds ring_rounds(const CollectiveShape& shape) {
  Builder b(shape);
  const int n = shape.members;
  Circle circle{from_root(n, 0), {}};
  switch (shape.op) {
    case PartOp::all_reduce:
      copy_all(b, Store::out);
      for (int k = 0; k < n; ++k) circle.segments.push_back({b.segment(b.all(Store::out), k, n)});
      b.circle_reduce_scatter({circle});
      for (int m = 0; m < n; ++m) b.end_average(m, circle.segments[static_cast<std::size_t>(m)]);
      b.circle_all_gather({circle});
      break;
    case PartOp::all_gather:
      copy_own(b);
      for (int k = 0; k < n; ++k) circle.segments.push_back({b.shard(Store::out, k)});
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

}  // namespace stepgraph
