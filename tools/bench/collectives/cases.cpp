#include "tools/bench/collectives/cases.hpp"

#include <bit>
#include <cmath>

#include "ops/transfers/collectives.hpp"

namespace stepgraph::bench {
namespace {

using Buffers = std::vector<Buffer>;

constexpr Rank root{0};

auto each(const Buffers& list) {
  return [&list](Rank rank) -> AccessList { return list[static_cast<std::size_t>(index(rank))]; };
}

// A rank's own shard of its buffer.
auto own(const Graph& graph, const Buffers& list) {
  return [&](Rank rank) -> AccessList {
    const Buffer buffer      = list[static_cast<std::size_t>(index(rank))];
    const std::int64_t bytes = graph.spec(buffer).size_bytes / graph.num_ranks();
    return buffer.range(index(rank) * bytes, bytes);
  };
}

bool power_of_two(int n) { return std::has_single_bit(static_cast<unsigned>(n)); }
int any_length(int) { return 1'000'000; }
int linear_length(int n) { return (1 << 24) / (64 * n); }
int doubling_length(int n) {
  // Powers of two use the whole exponent range of float; other factors must fit into its 24 bits.
  return power_of_two(n) ? 230 / std::bit_width(static_cast<unsigned>(n - 1)) : static_cast<int>(17 / std::log2(n));
}

double sum_of_all(const Chain& chain, std::int64_t i) {
  int sum = 0;
  for (int rank = 0; rank < chain.num_ranks; ++rank) sum += start_value(rank, i);
  return sum;
}
double added(const Chain& chain, int rank, std::int64_t i) {
  return start_value(rank, i) + chain.length * (sum_of_all(chain, i) - start_value(rank, i));
}
int owner(const Chain& chain, std::int64_t i) { return static_cast<int>(i / chain.shard()); }

}  // namespace

Buffer chain_buffer(Graph& graph, Rank rank, const Chain& chain) {
  return graph.buffer({.name       = "x",
                       .rank       = rank,
                       .size_bytes = 4 * chain.elements,
                       .type       = DType::f32,
                       .lifetime   = Lifetime::persistent});
}

double start_scale(const CollectiveCase& what, int num_ranks) {
  return what.doubles && power_of_two(num_ranks) ? std::ldexp(1.0, -110) : 1.0;
}

const std::vector<CollectiveCase>& collective_cases() {
  static const auto shared = [](double n) { return (n - 1) / n; };
  static const auto once   = [](double) { return 1.0; };
  static const std::vector<CollectiveCase> cases{
      {.name       = "all_reduce",
       .bus_factor = [](double n) { return 2 * (n - 1) / n; },
       .max_length = doubling_length,
       .add        = [](Graph& graph, Group group, const Buffers& x,
                 const Buffers&) { all_reduce(graph, {.name = "all_reduce", .group = group, .in = each(x)}); },
       .expected   = [](const Chain& chain, int, std::int64_t i) { return sum_of_all(chain, i) * chain.growth; },
       .doubles    = true},
      {.name       = "reduce",
       .bus_factor = once,
       .max_length = linear_length,
       .add        = [](Graph& graph, Group group, const Buffers& x,
                 const Buffers&) { reduce(graph, {.name = "reduce", .group = group, .in = each(x), .root = root}); },
       .expected   = [](const Chain& chain, int rank,
                      std::int64_t i) { return rank == 0 ? added(chain, rank, i) : start_value(rank, i); }},
      {.name       = "all_gather",
       .bus_factor = shared,
       .max_length = any_length,
       .add        = [](Graph& graph, Group group, const Buffers& x,
                 const Buffers&) { all_gather(graph, {.name = "all_gather", .group = group, .out = each(x)}); },
       .expected   = [](const Chain& chain, int, std::int64_t i) -> double { return start_value(owner(chain, i), i); }},
      {.name       = "reduce_scatter",
       .bus_factor = shared,
       .max_length = linear_length,
       .add        = [](Graph& graph, Group group, const Buffers& x,
                 const Buffers&) { reduce_scatter(graph, {.name = "reduce_scatter", .group = group, .in = each(x)}); },
       .expected =
           [](const Chain& chain, int rank, std::int64_t i) {
             return owner(chain, i) == rank ? added(chain, rank, i) : start_value(rank, i);
           }},
      {.name       = "broadcast",
       .bus_factor = once,
       .max_length = any_length,
       .add =
           [](Graph& graph, Group group, const Buffers& x, const Buffers&) {
             broadcast(graph, {.name = "broadcast", .group = group, .out = each(x), .root = root});
           },
       .expected = [](const Chain&, int, std::int64_t i) -> double { return start_value(0, i); }},
      {.name       = "scatter",
       .bus_factor = shared,
       .max_length = any_length,
       .add =
           [](Graph& graph, Group group, const Buffers& x, const Buffers&) {
             scatter(graph, {.name = "scatter", .group = group, .in = each(x), .out = own(graph, x), .root = root});
           },
       .expected = [](const Chain& chain, int rank, std::int64_t i) -> double {
         return start_value(owner(chain, i) == rank ? 0 : rank, i);
       }},
      {.name       = "gather",
       .bus_factor = shared,
       .max_length = any_length,
       .add =
           [](Graph& graph, Group group, const Buffers& x, const Buffers&) {
             gather(graph, {.name = "gather", .group = group, .in = own(graph, x), .out = each(x), .root = root});
           },
       .expected = [](const Chain& chain, int rank, std::int64_t i) -> double {
         return start_value(rank == 0 ? owner(chain, i) : rank, i);
       }},
      {.name       = "all_to_all",
       .bus_factor = shared,
       .max_length = any_length,
       .add        = [](Graph& graph, Group group, const Buffers& x,
                 const Buffers&) { all_to_all(graph, {.name = "all_to_all", .group = group, .in = each(x)}); },
       .expected   = [](const Chain& chain, int rank, std::int64_t i) -> double {
         if (chain.length % 2 == 0) return start_value(rank, i);
         return start_value(owner(chain, i), rank * chain.shard() + i % chain.shard());
       }},
      {.name       = "permute",
       .bus_factor = once,
       .max_length = any_length,
       .add =
           [](Graph& graph, Group group, const Buffers& x, const Buffers& y) {
             permute(graph, {.name  = "permute",
                             .group = group,
                             .in    = each(x),
                             .out   = each(y),
                             .peer  = [n = graph.num_ranks()](Rank rank) { return Rank{(index(rank) + 1) % n}; }});
           },
       .expected = [](const Chain& chain, int rank, std::int64_t i) -> double {
         const int n = chain.num_ranks;
         return start_value(((rank - chain.length) % n + n) % n, i);
       },
       .alternates = true},
  };
  return cases;
}

}  // namespace stepgraph::bench
