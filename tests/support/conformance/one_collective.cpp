#include "tests/support/conformance/one_collective.hpp"

#include <algorithm>
#include <cstring>

#include "engine/base/error.hpp"
#include "engine/base/half.hpp"

namespace stepgraph::testing {
namespace {

void put(std::byte* at, DType type, int value) {
  const auto store = [&](auto typed) { std::memcpy(at, &typed, sizeof typed); };
  switch (type) {
    case DType::u8:
      return store(static_cast<std::uint8_t>(value));
    case DType::i32:
      return store(static_cast<std::int32_t>(value));
    case DType::i64:
      return store(static_cast<std::int64_t>(value));
    case DType::f16:
      return store(f16(static_cast<float>(value)));
    case DType::bf16:
      return store(bf16(static_cast<float>(value)));
    case DType::f32:
      return store(static_cast<float>(value));
    case DType::f64:
      return store(static_cast<double>(value));
  }
}

}  // namespace

void OneCollective::fill(Memory& memory) const {
  for (std::size_t m = 0; m < in.size(); ++m) {
    for (const Buffer buffer : {out[m], in[m]}) {
      const std::span<std::byte> bytes = memory.bytes(buffer);
      const DType type                 = graph.spec(buffer).type;
      for (std::size_t i = 0; i < bytes.size(); i += size_bytes(type))
        put(bytes.data() + i, type, buffer == in[m] ? static_cast<int>((i / size_bytes(type) * 7 + m * 3) % 4) : 9);
    }
  }
}

std::vector<std::byte> OneCollective::contents(const Memory& memory) const {
  std::vector<std::byte> all;
  for (const Buffer buffer : out) {
    const std::span<std::byte> bytes = memory.bytes(buffer);
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

OneCollective one_collective(const OneCollectiveOptions& options) {
  OneCollective made{Graph(options.ranks), {}, {}};
  std::vector<Rank> ranks;
  if (options.members.empty()) {
    for (int rank = 0; rank < options.ranks; ++rank) ranks.push_back(Rank{rank});
  } else {
    for (const int rank : options.members) ranks.push_back(Rank{rank});
  }
  const auto n       = static_cast<std::int64_t>(ranks.size());
  const auto element = static_cast<std::int64_t>(size_bytes(options.type));
  std::vector<std::int64_t> begin{0};  // of shards, in bytes
  for (std::int64_t m = 0; m < n; ++m) {
    const std::int64_t even = (options.elements + n - 1) / n;
    begin.push_back(begin.back() + element * (options.uneven ? even * 2 * m / n : even));
  }
  const bool cut_in        = options.op == PartOp::all_gather || options.op == PartOp::gather;
  const bool cut_out       = options.op == PartOp::reduce_scatter || options.op == PartOp::scatter;
  const bool shards        = cut_in || cut_out || options.op == PartOp::all_to_all;
  const std::int64_t whole = shards ? begin.back() : element * options.elements;
  const auto member        = [&](Rank rank) {
    return static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  };
  const auto shard = [&](std::size_t m) { return begin[m + 1] - begin[m]; };
  for (std::size_t m = 0; m < ranks.size(); ++m) {
    const auto buffer = [&](const char* name, std::int64_t size) {
      return made.graph.buffer({.name       = str(name, m),
                                .rank       = ranks[m],
                                .size_bytes = size,
                                .type       = options.type,
                                .lifetime   = Lifetime::persistent});
    };
    made.in.push_back(buffer("in", cut_in && !options.in_place ? shard(m) : whole));
    made.out.push_back(options.in_place ? made.in.back() : buffer("out", cut_out ? shard(m) : whole));
  }
  // The side with all shards: one access per member if they differ.
  const auto all = [&](Buffer buffer) {
    AccessList list;
    if (!options.uneven || !shards) return AccessList(buffer);
    for (std::size_t m = 0; m < ranks.size(); ++m) list.push_back(buffer.range(begin[m], shard(m)));
    return list;
  };
  const auto in = [&](Rank rank) {
    const std::size_t m = member(rank);
    if (!cut_in) return all(made.in[m]);
    return AccessList(options.in_place ? made.in[m].range(begin[m], shard(m)) : Access(made.in[m]));
  };
  const auto out = [&](Rank rank) {
    const std::size_t m = member(rank);
    if (!cut_out) return all(made.out[m]);
    return AccessList(options.in_place ? made.out[m].range(begin[m], shard(m)) : Access(made.out[m]));
  };
  Collective spec{.name      = std::string(to_string(options.op)),
                  .group     = made.graph.group({.name = "members", .ranks = ranks}),
                  .lane      = options.lane,
                  .in        = in,
                  .out       = out,
                  .reduction = options.reduction,
                  .root      = Rank{options.root}};
  for (int i = 0; i < options.repeats; ++i) {
    switch (options.op) {
      case PartOp::all_reduce:
        all_reduce(made.graph, spec);
        break;
      case PartOp::reduce:
        reduce(made.graph, spec);
        break;
      case PartOp::all_gather:
        all_gather(made.graph, spec);
        break;
      case PartOp::reduce_scatter:
        reduce_scatter(made.graph, spec);
        break;
      case PartOp::broadcast:
        broadcast(made.graph, spec);
        break;
      case PartOp::scatter:
        scatter(made.graph, spec);
        break;
      case PartOp::gather:
        gather(made.graph, spec);
        break;
      case PartOp::all_to_all:
        all_to_all(made.graph, spec);
        break;
      default:
        barrier(made.graph, {.name = spec.name, .group = spec.group, .lane = spec.lane});
    }
  }
  return made;
}

}  // namespace stepgraph::testing
