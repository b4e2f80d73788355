#include "graphs/collectives/builder.hpp"

namespace stepgraph {
namespace collective {

void along_trees(Builder& b, const std::vector<std::vector<Edge>>& up, int root) {
  switch (b.shape().op) {
    case PartOp::all_reduce:
      b.reduce_up(up, root, Store::out, Store::out);
      return b.broadcast_down(Builder::down(up), root, Store::out);
    case PartOp::reduce:
      return b.reduce_up(up, root, Store::out, Store::work);
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
      b.reduce_up(up, root, Store::work, Store::work);
      b.copy(root, {b.own(Store::out, root)}, {b.shard(Store::work, root)});
      return b.scatter_down(up, root, Store::work);
    default:
      b.no_bytes(up);
      return b.no_bytes(Builder::down(up));
  }
}

}  // namespace collective

namespace {

using namespace collective;

// Bruck's algorithm: in round k, every slice with bit k set in its distance moves 2^k members on. It arrives in the
// second half of `work`.
void bruck_exchange(Builder& b) {
  const int n = b.n();
  for (int m = 0; m < n; ++m) {
    b.need_work(m, 2 * b.shape().bytes);
    Bytes into, from;
    for (int way = 0; way < n; ++way) {
      into.push_back(b.shard(Store::work, way));
      from.push_back(b.shard(Store::in, (m + way) % n));
    }
    b.copy(m, into, from);
  }
  for (int k = 1; k < n; k *= 2) {
    b.next_round();
    Bytes moved, arrived;
    for (int way = 0; way < n; ++way) {
      if ((way & k) == 0) continue;
      moved.push_back(b.shard(Store::work, way));
      arrived.push_back(moved.back());
      arrived.back().begin += b.shape().bytes;
    }
    for (int m = 0; m < n; ++m) {
      b.send(m, moved, (m + k) % n, arrived);
      b.copy(m, moved, arrived);
    }
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

}  // namespace

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

}  // namespace stepgraph
