#include "graphs/layout/distributed_tensor.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <map>
#include <numeric>
#include <random>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/layout/flat_shards.hpp"
#include "ops/transfers/collectives.hpp"
#include "tests/support/enumerators.hpp"
#include "tests/support/ops/elements.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;
using sg::PartitionKind;

namespace {

using Bytes = std::vector<std::byte>;

struct Case {
  sg::TensorShape shape;
  int dim;
  PartitionKind kind;
  sg::DType type;
  int num_ranks;
  std::vector<sg::Rank> members;  // some of the ranks, in any order
  sg::Reduction reduction;
  std::uint64_t seed;
};

Case random_case(std::mt19937& random) {
  Case c{.shape     = sg::TensorShape(1 + random() % 4),
         .dim       = 0,
         .kind      = static_cast<PartitionKind>(random() % 5 == 0 ? 2 : random() % 2),
         .type      = sg::testing::all_types[random() % sg::testing::all_types.size()],
         .num_ranks = static_cast<int>(1 + random() % 8),
         .members   = {},
         .reduction = sg::testing::all_reductions[random() % sg::testing::all_reductions.size()],
         .seed      = random()};
  for (std::int64_t& size : c.shape) size = static_cast<std::int64_t>(random() % 20 == 0 ? 0 : 1 + random() % 6);
  if (c.kind != PartitionKind::replicated) c.dim = static_cast<int>(random() % c.shape.size());
  std::vector<int> ranks(static_cast<std::size_t>(c.num_ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::shuffle(ranks.begin(), ranks.end(), random);
  ranks.resize(1 + random() % ranks.size());
  for (const int rank : ranks) c.members.push_back(sg::Rank{rank});
  return c;
}

// A member's block of the whole tensor, element by element. A reference that does not use regions and strides.
Bytes block_of(const Case& c, const Bytes& whole, std::int64_t begin, std::int64_t end) {
  const std::size_t element = sg::size_bytes(c.type);
  Bytes block;
  for (std::size_t i = 0; i < whole.size() / element; ++i) {
    auto rest = static_cast<std::int64_t>(i);
    for (auto dim = static_cast<int>(c.shape.size()) - 1; dim > c.dim; --dim)
      rest /= c.shape[static_cast<std::size_t>(dim)];
    const std::int64_t place = rest % c.shape[static_cast<std::size_t>(c.dim)];
    if (place < begin || place >= end) continue;
    block.insert(block.end(), whole.begin() + static_cast<std::ptrdiff_t>(i * element),
                 whole.begin() + static_cast<std::ptrdiff_t>((i + 1) * element));
  }
  return block;
}

// Cuts, scatters, gathers and reduces one tensor, in one graph.
struct AllMoves {
  sg::Graph graph;
  std::map<sg::Rank, sg::Buffer> original, all_gathered, partial;  // whole tensors
  sg::Buffer gathered;
  std::vector<sg::DistributedTensor> tensors;  // split, scattered, reduced
};

AllMoves all_moves(const Case& c, sg::Graph graph) {
  AllMoves moves{
      .graph = std::move(graph), .original = {}, .all_gathered = {}, .partial = {}, .gathered = {}, .tensors = {}};
  sg::Graph& g          = moves.graph;
  const sg::Group group = g.group({.name = "members", .ranks = c.members});
  const sg::Rank first = c.members.front(), last = c.members.back();
  const std::int64_t bytes = sg::num_elements(c.shape) * static_cast<std::int64_t>(sg::size_bytes(c.type));
  for (const sg::Rank rank : c.members) {
    if (!g.holds(rank)) continue;
    const auto whole = [&](const char* name) {
      return g.buffer(
          {.name = name, .rank = rank, .size_bytes = bytes, .type = c.type, .lifetime = sg::Lifetime::persistent});
    };
    moves.original[rank]     = whole("original");
    moves.all_gathered[rank] = whole("all gathered");
    moves.partial[rank]      = whole("partial");
    if (rank == last) moves.gathered = whole("gathered");
  }
  for (const char* name : {"split", "scattered", "reduced"}) {
    moves.tensors.emplace_back(
        g, sg::DistributedTensorSpec{
               .name = name, .shape = c.shape, .type = c.type, .group = group, .dim = c.dim, .kind = c.kind});
  }
  const auto at = [](const std::map<sg::Rank, sg::Buffer>& buffers) {
    return [&buffers](sg::Rank rank) -> sg::Access { return buffers.at(rank); };
  };
  sg::split_tensor(g, moves.tensors[0], {.whole = at(moves.original)});
  sg::scatter_tensor(g, moves.tensors[1], {.whole = at(moves.original), .root = first});
  sg::all_gather_tensor(g, moves.tensors[1], {.whole = at(moves.all_gathered)});
  sg::gather_tensor(g, moves.tensors[0],
                    {.whole = [&](sg::Rank) -> sg::Access { return moves.gathered; }, .root = last});
  sg::reduce_scatter_tensor(g, moves.tensors[2], {.whole = at(moves.partial), .reduction = c.reduction});
  return moves;
}

Bytes copy_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

TEST_CASE("a tensor that is cut, moved and put together is unchanged", "[graphs][tensor]") {
  std::mt19937 random(13);
  sg::Executor executor({.threads = 2});
  int uneven = 0, empty = 0, strided = 0;
  for (int i = 0; i < sg::testing::cases(3000); ++i) {
    const Case c         = random_case(random);
    const AllMoves moves = all_moves(c, sg::Graph(c.num_ranks));
    INFO("case " << i << ": " << moves.tensors[0] << ", " << sg::to_string(c.reduction));
    sg::verify(moves.graph);
    sg::LoopbackWorld world(c.num_ranks);
    const sg::Program program(moves.graph, world);
    const auto n = static_cast<int>(c.members.size());
    std::vector<Bytes> partials;
    for (const sg::Rank rank : c.members) {
      // All ranks have the same original, like replicas. Only the first rank's is scattered.
      sg::testing::fill(program.memory().bytes(moves.original.at(rank)), c.type, sg::testing::Fill::bits, sg::Rank{0},
                        n, c.seed);
      const auto partial = program.memory().bytes(moves.partial.at(rank));
      sg::testing::fill(partial, c.type, sg::testing::fill_for(c.reduction), rank, n, c.seed);
      partials.push_back(copy_of(partial));
    }
    const Bytes original = copy_of(program.memory().bytes(moves.original.at(c.members.front())));
    const Bytes reduced  = sg::testing::reduce_in_order(c.type, c.reduction, partials);
    executor.run(program);

    const sg::Partition& partition = moves.tensors[0].partition();
    CHECK(copy_of(program.memory().bytes(moves.gathered)) == original);
    for (std::size_t m = 0; m < c.members.size(); ++m) {
      const sg::Rank rank = c.members[m];
      CHECK(copy_of(program.memory().bytes(moves.all_gathered.at(rank))) == original);
      const auto shard = [&](std::size_t tensor) {
        return copy_of(program.memory().bytes(moves.tensors[tensor].shard(rank).buffer));
      };
      const std::int64_t begin = partition.begin(static_cast<int>(m)), end = partition.end(static_cast<int>(m));
      CHECK(shard(0) == block_of(c, original, begin, end));
      CHECK(shard(1) == block_of(c, original, begin, end));
      CHECK(shard(2) == block_of(c, reduced, begin, end));
      empty += partition.empty(static_cast<int>(m));
      strided += !partition.region(static_cast<int>(m), c.type).contiguous();
    }
    uneven += partition.local_elements(0) != partition.local_elements(n - 1);
  }
  CHECK(uneven > sg::testing::at_least(500));
  CHECK(empty > sg::testing::at_least(500));
  CHECK(strided > sg::testing::at_least(500));
}

TEST_CASE("the graph of moves built for one rank is the slice of the whole graph", "[graphs][tensor]") {
  std::mt19937 random(17);
  for (int i = 0; i < sg::testing::cases(60); ++i) {
    const Case c         = random_case(random);
    const AllMoves moves = all_moves(c, sg::Graph(c.num_ranks));
    INFO("case " << i << ": " << moves.tensors[0]);
    for (const sg::Rank rank : c.members)
      CHECK(all_moves(c, sg::Graph(c.num_ranks, rank)).graph == sg::slice(moves.graph, rank));
  }
}

TEST_CASE("moves have the given names and lanes, or the defaults", "[graphs][tensor]") {
  sg::Graph graph(2);
  const sg::Group group = graph.group({.name = "both", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  const sg::DistributedTensor tensor(graph, {.name = "w", .shape = {3, 5}, .group = group, .dim = 1});
  CHECK(sg::to_string(tensor) == "w: f32 3x5 dim 1 over 2 ceiling");
  CHECK(tensor.local_shape(sg::Rank{1}) == sg::TensorShape{3, 2});
  CHECK(tensor == sg::DistributedTensor(tensor));
  // A second tensor has other buffers.
  CHECK(tensor != sg::DistributedTensor(graph, {.name = "w", .shape = {3, 5}, .group = group, .dim = 1}));
  std::vector<sg::Buffer> whole;
  for (const sg::Rank rank : tensor.ranks())
    whole.push_back(graph.buffer(
        {.name = "whole", .rank = rank, .size_bytes = tensor.num_bytes(), .lifetime = sg::Lifetime::persistent}));
  const auto at        = [&](sg::Rank rank) -> sg::Access { return whole[static_cast<std::size_t>(sg::index(rank))]; };
  const sg::Node usual = sg::reduce_scatter_tensor(graph, tensor, {.whole = at})[1];
  CHECK(graph.name(usual) == "reduce_scatter w");
  CHECK(graph.lane(usual) == graph.lane(sg::Rank{1}, sg::LaneKind::reduce));
  CHECK(graph.part(usual).type == sg::DType::f32);
  const sg::Node given = sg::all_gather_tensor(
      graph, tensor, {.name = "weights", .whole = at, .lane = sg::LaneKind::tp, .labels = {.layer = 3}})[0];
  CHECK(graph.name(given) == "weights");
  CHECK(graph.lane(given) == graph.lane(sg::Rank{0}, sg::LaneKind::tp));
  CHECK(graph.labels(given).layer == 3);
}

TEST_CASE("shards may lie inside the whole tensor, which is then gathered in place", "[graphs][tensor]") {
  sg::Graph graph(3);
  const sg::Group group = graph.group({.name = "all", .ranks = {sg::Rank{0}, sg::Rank{1}, sg::Rank{2}}});
  // Each rank's whole tensor is 4 bytes into a larger buffer.
  std::vector<sg::Buffer> slot;
  for (int rank = 0; rank < 3; ++rank)
    slot.push_back(graph.buffer({.name       = "slot",
                                 .rank       = sg::Rank{rank},
                                 .size_bytes = 4 + 4 * 28,
                                 .type       = sg::DType::i32,
                                 .lifetime   = sg::Lifetime::persistent}));
  const auto whole = [&](sg::Rank rank) { return slot[static_cast<std::size_t>(sg::index(rank))].range(4, 4 * 28); };
  const sg::Partition partition({.shape = {4, 7}, .dim = 1, .num_members = 3, .kind = PartitionKind::balanced});
  const auto block = [&](sg::Rank rank) {
    sg::Access access = partition.access(whole(rank).buffer, sg::index(rank), sg::DType::i32);
    access.region.offset += 4;
    return access;
  };
  const sg::DistributedTensor tensor(graph, {.name  = "w",
                                             .shape = {4, 7},
                                             .type  = sg::DType::i32,
                                             .group = group,
                                             .dim   = 1,
                                             .kind  = PartitionKind::balanced,
                                             .shard = block});
  sg::all_gather_tensor(graph, tensor, {.whole = whole});
  sg::verify(graph);
  sg::LoopbackWorld world(3);
  const sg::Program program(graph, world);
  for (int rank = 0; rank < 3; ++rank) {
    const auto values = program.memory().span<std::int32_t>(slot[static_cast<std::size_t>(rank)]);
    std::fill(values.begin(), values.end(), -1);
    for (std::int64_t i = 0; i < 28; ++i) {
      if (partition.owner(i % 7) == rank) values[static_cast<std::size_t>(1 + i)] = static_cast<std::int32_t>(i);
    }
  }
  sg::Executor({.threads = 1}).run(program);
  std::vector<std::int32_t> expected(29);
  std::iota(expected.begin(), expected.end(), -1);
  for (const sg::Buffer buffer : slot) {
    const auto values = program.memory().span<std::int32_t>(buffer);
    CHECK(std::vector(values.begin(), values.end()) == expected);
  }
}

TEST_CASE("gathering padded flat shards gives the original elements", "[graphs][tensor][flat]") {
  for (const int n : {1, 2, 3, 5}) {
    for (const std::int64_t elements : {1, 4, 10}) {
      CAPTURE(n, elements);
      const sg::FlatShards flat(elements, n);
      sg::Graph graph(n);
      std::vector<sg::Rank> ranks;
      std::vector<sg::Buffer> shard, whole;
      for (int rank = 0; rank < n; ++rank) {
        ranks.push_back(sg::Rank{rank});
        const auto buffer = [&](std::int64_t count) {
          return graph.buffer({.name       = "flat",
                               .rank       = sg::Rank{rank},
                               .size_bytes = 4 * count,
                               .type       = sg::DType::i32,
                               .lifetime   = sg::Lifetime::persistent});
        };
        shard.push_back(buffer(flat.shard_elements()));
        whole.push_back(buffer(flat.padded_elements()));
      }
      const auto of = [](const std::vector<sg::Buffer>& list) {
        return [&list](sg::Rank rank) { return list[static_cast<std::size_t>(sg::index(rank))]; };
      };
      sg::all_gather(
          graph,
          {.name = "flat", .group = graph.group({.name = "all", .ranks = ranks}), .in = of(shard), .out = of(whole)});
      sg::verify(graph);
      sg::LoopbackWorld world(n);
      const sg::Program program(graph, world);
      for (std::int64_t i = 0; i < elements; ++i) {
        program.memory().span<std::int32_t>(
            shard[static_cast<std::size_t>(flat.owner(i))])[static_cast<std::size_t>(flat.local_index(i))] =
            static_cast<std::int32_t>(i + 1);
      }
      sg::Executor({.threads = 1}).run(program);
      for (const sg::Buffer buffer : whole) {
        const auto values = program.memory().span<std::int32_t>(buffer);
        for (std::size_t i = 0; i < values.size(); ++i)
          CHECK(values[i] == (static_cast<std::int64_t>(i) < elements ? static_cast<std::int32_t>(i + 1) : 0));
      }
    }
  }
}

TEST_CASE("moves that do not fit the tensor are refused with the numbers", "[graphs][tensor][refuses]") {
  const auto says = [](const char* what) { return Message(what); };
  sg::Graph graph(3);
  const sg::Group group = graph.group({.name = "two", .ranks = {sg::Rank{2}, sg::Rank{0}}});
  const sg::DistributedTensor tensor(graph, {.name = "w", .shape = {3, 2}, .group = group});
  const sg::Buffer small = graph.buffer({.name = "small", .rank = sg::Rank{2}, .size_bytes = 16});
  const auto at          = [&](sg::Rank) -> sg::Access { return small; };
  CHECK_THROWS_MATCHES(sg::all_gather_tensor(graph, tensor, {}), sg::Error,
                       says("tensor: 'all_gather w' needs `whole`"));
  CHECK_THROWS_MATCHES(sg::all_gather_tensor(graph, tensor, {.whole = at}), sg::Error,
                       says("tensor: 'all_gather w' has 16 bytes for the whole tensor on rank 2, but w: f32 3x2 dim 0 "
                            "over 2 ceiling has 24"));
  CHECK_THROWS_MATCHES(sg::split_tensor(graph, tensor, {.whole = [&](sg::Rank) { return small.strided(0, 6, 8, 4); }}),
                       sg::Error, says("tensor: 'split w' has 4 ranges for the whole tensor on rank 2 (one range)"));
  CHECK_THROWS_MATCHES(sg::scatter_tensor(graph, tensor, {.whole = at, .root = sg::Rank{1}}), sg::Error,
                       says("tensor: 'scatter w' has root 1 (a rank that has a shard)"));
  CHECK_THROWS_MATCHES(tensor.shard(sg::Rank{1}), sg::Error,
                       says("tensor: rank 1 has no shard of w: f32 3x2 dim 0 over 2 ceiling (not in its group)"));
  CHECK_THROWS_MATCHES(sg::DistributedTensor(graph, {.name = "w", .shape = {3, 2}, .group = group, .shard = at}),
                       sg::Error, says("tensor: 'w' has 16 bytes for the shard of rank 0 (8: f32 1x2)"));
  sg::Graph alone(3, sg::Rank{0});
  const sg::DistributedTensor mine(
      alone,
      {.name = "w", .shape = {3, 2}, .group = alone.group({.name = "two", .ranks = {sg::Rank{2}, sg::Rank{0}}})});
  CHECK(mine.local_shape(sg::Rank{2}) == sg::TensorShape{2, 2});
  CHECK_THROWS_MATCHES(
      mine.shard(sg::Rank{2}), sg::Error,
      says("tensor: the shard of w: f32 3x2 dim 0 over 2 ceiling on rank 2 is in another rank's graph"));
}
