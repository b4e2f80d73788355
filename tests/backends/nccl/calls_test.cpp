#include "backends/nccl/calls.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <memory>
#include <tuple>

#include "engine/run/memory.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::DType;
using sg::PartOp;
using sg::Rank;
using sg::Reduction;
using sg::nccl::Call;
using sg::nccl::CallOptions;
using sg::nccl::Phase;
using Kind = Call::Kind;

namespace {

// A part of a graph, with memory.
class Bound {
 public:
  explicit Bound(sg::Graph graph, sg::Node node = {0}) : graph_(std::move(graph)), node_(node), memory_(graph_) {
    const auto gather = [&](std::vector<sg::Piece>& pieces, bool in) {
      for (std::size_t i = 0; i < graph_.num_accesses(node_); ++i) {
        const auto access = graph_.access(node_, i);
        if (!(in ? sg::reads(access.mode) : sg::writes(access.mode))) continue;
        sg::Region region     = access.region;
        std::byte* const data = memory_.data(access.buffer) + std::exchange(region.offset, 0);
        pieces.push_back({data, region});
      }
    };
    gather(in_, true);
    gather(out_, false);
    const sg::Graph::PartView what = graph_.part(node_);
    const sg::GroupSpec& group     = graph_.spec(what.group);
    const Rank rank                = graph_.rank(node_);
    part_                          = {node_, rank, member_of(group, rank), what.peer, what.source, in_, out_};
    exchange_                      = std::make_unique<sg::Exchange>(sg::Exchange{what, group, 0, 0, {&part_, 1}});
  }

  // The calls with exactly the workspace that was planned.
  std::vector<Phase> calls(const CallOptions& options) {
    const auto size = static_cast<std::size_t>(sg::nccl::workspace_bytes(graph_, node_, options));
    room_.resize(size + 64);
    const auto address = reinterpret_cast<std::uintptr_t>(room_.data());
    workspace_         = std::span(room_).subspan(address % 64 == 0 ? 0 : 64 - address % 64, size);
    return sg::nccl::calls_of(*exchange_, options, workspace_);
  }
  [[nodiscard]] const sg::Exchange& exchange() const { return *exchange_; }
  [[nodiscard]] std::span<std::byte> workspace() const { return workspace_; }

  // How much of the workspace the calls use.
  [[nodiscard]] std::int64_t used(const std::vector<Phase>& phases) const {
    std::int64_t most = 0;
    const auto use    = [&](const std::byte* at, std::int64_t bytes) {
      if (at >= workspace_.data() && at < workspace_.data() + workspace_.size())
        most = std::max(most, at + bytes - workspace_.data());
    };
    for (const Phase& phase : phases) {
      for (const auto* list : {&phase.local, &phase.group}) {
        for (const Call& call : *list) {
          const int n = static_cast<int>(exchange_->group.ranks.size());
          use(call.to, call.kind == Kind::all_gather ? n * call.bytes : (call.rows - 1) * call.to_stride + call.bytes);
          for (int k = 0; call.kind == Kind::fold && k < n; ++k) use(call.fold_input(k), call.bytes);
          if (call.kind != Kind::fold) use(call.from, call.kind == Kind::reduce_scatter ? n * call.bytes : call.bytes);
        }
      }
    }
    return most;
  }

 private:
  sg::Graph graph_;
  sg::Node node_;
  sg::Memory memory_;
  std::vector<sg::Piece> in_, out_;
  sg::LocalPart part_{};
  std::unique_ptr<sg::Exchange> exchange_;
  std::vector<std::byte> room_;
  std::span<std::byte> workspace_;
};

struct Case {
  PartOp op           = PartOp::all_reduce;
  int ranks           = 4;
  int rank            = 0;
  std::int64_t bytes  = 4096;  // of the side that holds everything
  bool strided        = false;
  int shift           = 0;  // of the first byte
  bool uneven         = false;
  DType type          = DType::f32;
  Reduction reduction = Reduction::sum;
  bool in_place       = false;
};

// The slice of one rank, with one collective.
sg::Graph graph_of(const Case& what) {
  const Rank rank{what.rank};
  sg::Graph graph(what.ranks, rank);
  std::vector<Rank> all;
  for (int i = 0; i < what.ranks; ++i) all.push_back(Rank{i});
  const sg::Group group = graph.group({.name = "all", .ranks = all});
  const auto buffer     = [&](const char* name) {
    return graph.buffer({.name = name, .rank = rank, .size_bytes = 4 * what.bytes + 64, .type = what.type});
  };
  const sg::Buffer from = buffer("in"), to = what.in_place ? from : buffer("out");
  const auto side = [&](sg::Buffer of, bool shards, bool whole) {
    sg::AccessList list;
    const auto add = [&](std::int64_t at, std::int64_t bytes) {
      if (bytes == 0) return;
      list.push_back(what.strided ? of.strided(what.shift + 2 * at, bytes / 8, bytes / 4, 8)
                                  : of.range(what.shift + at, bytes));
    };
    if (whole && shards && what.uneven) {
      for (int i = 0; i < what.ranks; ++i) add(2 * i * what.bytes / 8, (i + 1) * 64);
    } else {
      add(0, whole ? what.bytes : what.uneven ? (what.rank + 1) * 64 : what.bytes / what.ranks);
    }
    return list;
  };
  const bool gathers = what.op == PartOp::all_gather, scatters = what.op == PartOp::reduce_scatter;
  sg::NodeSpec spec{.name = "part", .lane = graph.lane(rank, sg::LaneKind::reduce)};
  spec.part         = sg::PartSpec{.group     = group,
                                   .op        = what.op,
                                   .reduction = what.reduction,
                                   .type      = what.type,
                                   .root      = has_root(what.op) ? Rank{1} : Rank{-1},
                                   .message   = "m"};
  const bool reads  = what.op != PartOp::broadcast || what.rank == 1;
  const bool writes = what.op != PartOp::reduce || what.rank == 1;
  if (what.in_place) {
    spec.accumulates = side(from, false, true);
  } else {
    if (reads) spec.reads = side(from, scatters, !gathers);
    if (writes) spec.writes = side(to, gathers, !scatters);
  }
  graph.add(std::move(spec));
  return graph;
}

// What members must have in common.
std::vector<std::vector<std::tuple<Kind, std::int64_t, int>>> groups_of(const std::vector<Phase>& phases) {
  std::vector<std::vector<std::tuple<Kind, std::int64_t, int>>> all;
  for (const Phase& phase : phases) {
    if (phase.group.empty()) continue;
    auto& group = all.emplace_back();
    for (const Call& call : phase.group) group.emplace_back(call.kind, call.bytes, call.peer);
  }
  return all;
}

}  // namespace

TEST_CASE("a collective that NCCL has is one call", "[backends][nccl]") {
  const auto [op, kind, bytes] = GENERATE(
      std::tuple(PartOp::all_reduce, Kind::all_reduce, 4096), std::tuple(PartOp::reduce, Kind::reduce, 4096),
      std::tuple(PartOp::reduce_scatter, Kind::reduce_scatter, 1024),
      std::tuple(PartOp::all_gather, Kind::all_gather, 1024), std::tuple(PartOp::broadcast, Kind::broadcast, 4096));
  Bound part(graph_of({.op = op}));
  const std::vector<Phase> phases = part.calls({});
  REQUIRE(phases.size() == 1);
  CHECK(phases[0].local.empty());
  REQUIRE(phases[0].group.size() == 1);
  CHECK(phases[0].group[0].kind == kind);
  CHECK(phases[0].group[0].bytes == bytes);
  CHECK(part.workspace().empty());
}

TEST_CASE("reductions that NCCL does in another way are exchanged and added in rank order", "[backends][nccl]") {
  const auto [exact, reduction, type, is_exchanged] = GENERATE(
      std::tuple(false, Reduction::sum, DType::f32, false), std::tuple(false, Reduction::average, DType::bf16, false),
      std::tuple(true, Reduction::sum, DType::f32, true), std::tuple(false, Reduction::min, DType::f32, true),
      std::tuple(false, Reduction::product, DType::f64, true), std::tuple(false, Reduction::sum, DType::i32, true));
  Bound part(graph_of({.rank = 2, .bytes = 1 << 20, .type = type, .reduction = reduction}));
  const std::vector<Phase> phases = part.calls({.exact = exact});
  if (!is_exchanged) {
    CHECK(groups_of(phases).size() == 1);
    return;
  }
  REQUIRE(phases.size() == 2);
  CHECK(phases[0].group.size() == 6);  // to and from three others
  REQUIRE(phases[1].local.size() == 1);
  const Call& fold = phases[1].local[0];
  CHECK(fold.kind == Kind::fold);
  CHECK(fold.num_members == 4);
  CHECK(fold.fold_input(2) == part.exchange().parts[0].in[0].data + 2 * (1 << 18));  // its own, where it is
  CHECK(phases[1].group.size() == 6);
}

TEST_CASE("the plan counts exactly the workspace that calls use", "[backends][nccl]") {
  const PartOp op  = GENERATE(PartOp::all_reduce, PartOp::reduce, PartOp::reduce_scatter, PartOp::all_gather,
                              PartOp::broadcast, PartOp::barrier);
  const bool exact = GENERATE(false, true), strided = GENERATE(false, true), uneven = GENERATE(false, true);
  const int shift = GENERATE(0, 2), rank = GENERATE(0, 1, 3);
  CAPTURE(op, exact, strided, uneven, shift, rank);
  Bound part(
      graph_of({.op = op, .rank = rank, .bytes = 64 * 1024, .strided = strided, .shift = shift, .uneven = uneven}));
  const CallOptions options{.exact = exact, .chunk_bytes = 16 * 1024};
  const std::vector<Phase> phases = part.calls(options);
  const std::int64_t used         = (part.used(phases) + 63) / 64 * 64;  // blocks
  // A member that folds less than others takes as much as they.
  const bool folds_less = op == PartOp::reduce_scatter && exact && uneven && !strided && rank < 3;
  CHECK((folds_less ? used < std::ssize(part.workspace()) : used == std::ssize(part.workspace())));
  if (part.workspace().empty()) return;
  CHECK_THROWS_WITH(sg::nccl::calls_of(part.exchange(), options, part.workspace().first(part.workspace().size() - 1)),
                    ContainsSubstring("bytes of workspace"));
}

TEST_CASE("members need the same workspace at every place of a group", "[backends][nccl]") {
  const PartOp op  = GENERATE(PartOp::all_reduce, PartOp::reduce_scatter, PartOp::all_gather, PartOp::barrier);
  const bool exact = GENERATE(false, true), strided = GENERATE(false, true);
  const auto [ranks, bytes] =
      GENERATE(std::pair(2, 64), std::pair(4, 4000), std::pair(4, 36'992), std::pair(8, 33'024));
  const DType type = GENERATE(DType::f32, DType::i64);
  CAPTURE(op, exact, strided, ranks, bytes, type);
  Case what{.op = op, .ranks = ranks, .bytes = bytes, .strided = strided, .type = type};
  const CallOptions options{.exact = exact, .chunk_bytes = 16 * 1024};
  const auto need = [&](int rank) {
    what.rank = rank;
    return sg::nccl::workspace_bytes(graph_of(what), {0}, options);
  };
  const std::int64_t first = need(0);
  for (int rank = 1; rank < ranks; ++rank) CHECK(need(rank) == first);
  if (op != PartOp::reduce_scatter || strided) return;
  // Members fold shards of different sizes.
  what.uneven               = true;
  const std::int64_t uneven = need(0);
  for (int rank = 1; rank < ranks; ++rank) CHECK(need(rank) == uneven);
}

TEST_CASE("the groups of a member do not depend on how its memory lies", "[backends][nccl]") {
  const PartOp op  = GENERATE(PartOp::all_reduce, PartOp::reduce, PartOp::reduce_scatter, PartOp::all_gather);
  const bool exact = GENERATE(false, true), uneven = GENERATE(false, true);
  const CallOptions options{.exact = exact, .chunk_bytes = 4096};
  Case what{.op = op, .rank = 2, .bytes = 64 * 1024, .uneven = uneven};
  const auto plain = groups_of(Bound(graph_of(what)).calls(options));
  what.strided     = true;
  CHECK(groups_of(Bound(graph_of(what)).calls(options)) == plain);
  what.shift = 1;
  CHECK(groups_of(Bound(graph_of(what)).calls(options)) == plain);
}

TEST_CASE("an exact reduction goes in chunks, whose inputs fit into the workspace", "[backends][nccl]") {
  const CallOptions options{.exact = true, .chunk_bytes = 64 * 1024};
  Bound part(graph_of({.bytes = 1 << 20}));
  const std::vector<Phase> phases = part.calls(options);
  CHECK(groups_of(phases).size() == 2 * 16);
  CHECK(std::ssize(part.workspace()) <= 64 * 1024);
  // The default needs no more than 64 MiB for any size.
  const sg::Graph large = graph_of({.ranks = 8, .bytes = std::int64_t{1} << 31});
  CHECK(sg::nccl::workspace_bytes(large, {0}, {.exact = true}) <= std::int64_t{64} << 20);
}

TEST_CASE("rows of equal length are packed by one copy", "[backends][nccl]") {
  Bound part(graph_of({.strided = true}));
  const std::vector<Phase> phases = part.calls({});
  REQUIRE(phases.size() == 2);
  REQUIRE(phases[0].local.size() == 1);
  CHECK(phases[0].local[0].rows == 8);
  CHECK(phases[0].local[0].bytes == 512);
  CHECK(phases[0].local[0].from_stride == 1024);
  CHECK(phases[0].local[0].to_stride == 512);
  REQUIRE(phases[1].local.size() == 1);
  CHECK(phases[1].local[0].rows == 8);
}

TEST_CASE("a reduction in place needs no workspace with NCCL", "[backends][nccl]") {
  Bound part(graph_of({.in_place = true}));
  const std::vector<Phase> phases = part.calls({});
  REQUIRE(phases.size() == 1);
  CHECK(phases[0].group[0].from == phases[0].group[0].to);
  CHECK(part.workspace().empty());
}

TEST_CASE("folds of more than 64 members are refused with the reason", "[backends][nccl]") {
  const sg::Graph graph   = graph_of({.ranks = 65});
  sg::Graph::PartView sum = graph.part({0});
  CHECK(!sg::nccl::refusal(sum, 65, {}));
  CHECK_THAT(sg::nccl::refusal(sum, 65, {.exact = true}).value(),
             ContainsSubstring("all_reduce 'm', sum of f32 over 65 ranks") && ContainsSubstring("at most 64"));
  CHECK(!sg::nccl::refusal(sum, 64, {.exact = true}));
  sum.reduction = Reduction::max;
  CHECK(sg::nccl::refusal(sum, 65, {}).has_value());
}
