#include "graphs/step/memory_requirement.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <numeric>
#include <set>

#include "backends/nccl/calls.hpp"
#include "engine/base/error.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/step/training_step.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::MemoryRole;

namespace {

constexpr sg::BatchSpec batch_of_4{.global = 4, .micro = 1, .seq = 8};

// Both vocabularies are odd.
sg::Model small(bool llama, int layers) {
  if (llama) {
    return sg::llama({.layers   = layers,
                      .width    = 16,
                      .heads    = 4,
                      .kv_heads = 2,
                      .context  = 8,
                      .vocab    = 33,
                      .inner    = 40,
                      .tied     = true});
  }
  return sg::gpt2({.layers = layers, .width = 16, .heads = 4, .context = 8, .vocab = 31});
}

std::vector<sg::Plan> plans() {
  std::vector<sg::Plan> out{{}};
  out.push_back({.layout = {.dp = 2, .tp = 2, .pp = 2}});
  out.push_back({.layout = {.tp = 4}, .recompute = sg::Recompute::selective});
  out.push_back({.layout = {.dp = 2, .pp = 2}, .precision = {.param = sg::DType::bf16}});
  out.push_back({.layout = {.pp = 2}, .pipeline = {.schedule = "zb-h1"}, .recompute = sg::Recompute::full});
  out.push_back(
      {.layout = {.dp = 2, .tp = 2, .order = "tp-dp-pp", .sequence_parallel = true}, .algorithm = sg::Algorithm::ring});
  out.push_back({.layout    = {.pp = 2},
                 .pipeline  = {.schedule = "interleaved", .chunks = 2},
                 .optimizer = {.kind = sg::OptimizerKind::sgd},
                 .reuse     = sg::Reuse::free});
  out.push_back({.layout = {.dp = 2}, .precision = {.param = sg::DType::bf16, .reduce = sg::DType::bf16}});
  out.push_back({.layout = {.dp = 4}, .shard = {.strategy = sg::Shard::full, .reduce = sg::ReduceWhen::each}});
  out.push_back({.layout = {.dp = 4}, .shard = {.strategy = sg::Shard::grad_op, .flat = false}});
  out.push_back({.layout = {.dp = 2, .tp = 2}, .shard = {.strategy = sg::Shard::zero1}});
  out.push_back({.layout    = {.dp = 2, .tp = 2, .pp = 2},
                 .shard     = {.strategy = sg::Shard::full, .min_params = 100},
                 .precision = {.param = sg::DType::bf16, .reduce = sg::DType::bf16}});
  out.push_back({.layout = {.dp = 4}, .shard = {.strategy = sg::Shard::full, .min_params = 100, .flat = false}});
  out.push_back({.layout = {.dp = 4}, .shard = {.strategy = sg::Shard::hybrid, .min_params = 100, .group = 2}});
  return out;
}

std::int64_t sum(const sg::MemoryRequirement& of) {
  return std::accumulate(of.at_peak.begin(), of.at_peak.end(), of.unused_bytes);
}

// The bytes of the buffers of a rank's weights. A buffer that tied weights share counts once.
std::int64_t bytes_of(const sg::StepGraph& step, sg::Rank rank,
                      std::initializer_list<sg::StoredRange sg::StepWeight::*> of) {
  std::set<std::uint32_t> buffers;
  for (const sg::StepWeight& weight : step.ranks[static_cast<std::size_t>(sg::index(rank))].weights) {
    for (const auto member : of) {
      if (!(weight.*member).empty()) buffers.insert((weight.*member).buffer.id);
    }
  }
  std::int64_t bytes = 0;
  for (const std::uint32_t id : buffers) bytes += step.graph.spec(sg::Buffer{id}).size_bytes;
  return bytes;
}

}  // namespace

TEST_CASE("the requirements of a rank add up to its arena, and those of weights to the weights' bytes",
          "[graphs][memory]") {
  const std::vector<sg::Plan> all = plans();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const sg::Plan& plan  = all[i];
    const sg::Model model = small(i % 2 == 1, 2 * plan.pipeline.chunks);
    CAPTURE(model.kind, to_string(plan.layout), plan.pipeline.schedule, plan.recompute);
    const auto step = sg::training_step(model, plan, batch_of_4, {.keep_gradients = true});
    std::vector<sg::Rank> seen;
    for (const auto& row : sg::memory_requirements(model, plan, batch_of_4, {.keep_gradients = true})) {
      CHECK(row.rank == row.ranks.front());
      for (const sg::Rank rank : row.ranks) {
        CAPTURE(rank);
        seen.push_back(rank);
        const sg::Graph own = sg::slice(step.graph, rank);
        const auto arena    = sg::plan_memory(own, {.reuse = plan.reuse}).arena(rank);
        CHECK(row.peak_bytes == arena.size_bytes);
        CHECK(row.lower_bound_bytes == arena.lower_bound);
        CHECK(sum(row) == row.peak_bytes);
        CHECK(row.unused_bytes >= row.peak_bytes - row.lower_bound_bytes);
        CHECK(row[MemoryRole::parameters] == bytes_of(step, rank, {&sg::StepWeight::value}));
        CHECK(row[MemoryRole::gradients] >= bytes_of(step, rank, {&sg::StepWeight::gradient}));
        CHECK(row[MemoryRole::optimizer] ==
              bytes_of(step, rank, {&sg::StepWeight::first, &sg::StepWeight::second, &sg::StepWeight::master}));
        CHECK(row[MemoryRole::activations] > 0);
        CHECK(row[MemoryRole::other] > 0);
        CHECK_FALSE(row.node.empty());
      }
    }
    std::sort(seen.begin(), seen.end());
    REQUIRE(static_cast<int>(seen.size()) == step.layout.num_ranks());
    for (int rank = 0; rank < step.layout.num_ranks(); ++rank)
      CHECK(seen[static_cast<std::size_t>(rank)] == sg::Rank{rank});
  }
}

TEST_CASE("the requirements of a rank on a device add up with its workspaces, in every layout",
          "[graphs][memory][workspace]") {
  for (const sg::Plan& plan : {sg::Plan{.layout = {.dp = 2, .tp = 2, .pp = 2}}, sg::Plan{.layout = {.dp = 2},
                                                                                .shard = {.strategy = sg::Shard::full},
                                                                                .precision = {.param = sg::DType::bf16},
                                                                                .recompute = sg::Recompute::full,
                                                                                .algorithm = sg::Algorithm::ring}}) {
    const sg::Model model = small(true, 2);
    const auto host       = sg::memory_requirements(model, plan, batch_of_4);
    const auto device = sg::memory_requirements(model, plan, batch_of_4, {.workspaces = {.bodies = true, .part = {}}});
    REQUIRE(host.size() == device.size());
    for (std::size_t i = 0; i < host.size(); ++i) {
      CHECK(host[i].workspace_bytes == 0);
      CHECK(host[i].workspace_node.empty());
      CHECK(device[i].workspace_bytes > 0);
      CHECK(device[i].at_peak == host[i].at_peak);
      CHECK(device[i].peak_bytes == host[i].peak_bytes + device[i].workspace_bytes);
      CHECK(device[i].lower_bound_bytes == host[i].lower_bound_bytes + device[i].workspace_bytes);
      CHECK(sum(device[i]) + device[i].workspace_bytes == device[i].peak_bytes);
    }
    CHECK_THAT(sg::memory_table(device), ContainsSubstring("unused  workspace "));
    CHECK_THAT(sg::memory_table(host), !ContainsSubstring("workspace"));
    CHECK_THAT(sg::roles_text(device[0]), ContainsSubstring(", workspace "));
  }
}

TEST_CASE("the ranks of a row need the same workspaces for communication over NCCL",
          "[graphs][memory][workspace][nccl]") {
  const std::vector<sg::Plan> all = plans();
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (const bool exact : {false, true}) {
      const sg::Plan& plan  = all[i];
      const sg::Model model = small(i % 2 == 1, 2 * plan.pipeline.chunks);
      CAPTURE(i, exact, to_string(plan.layout));
      sg::MemoryRequirementOptions options{.join_tied_first = !exact, .issue_order = sg::IssueOrder::per_rank};
      options.workspaces = {.bodies = true, .part = [&](const sg::Graph& graph, sg::Node part) {
                              return sg::nccl::workspace_bytes(graph, part, {.exact = exact});
                            }};
      for (const auto& row : sg::memory_requirements(model, plan, batch_of_4, options)) {
        for (const sg::Rank rank : row.ranks) {
          CAPTURE(rank);
          options.rank   = rank;
          const auto one = sg::memory_requirements(model, plan, batch_of_4, options).at(0);
          CHECK(one.workspace_bytes == row.workspace_bytes);
          CHECK(one.peak_bytes == row.peak_bytes);
          CHECK(one.lower_bound_bytes == row.lower_bound_bytes);
          CHECK(one.at_peak == row.at_peak);
        }
      }
    }
  }
}

TEST_CASE("a rank needs the same memory in the whole step and built alone", "[graphs][memory]") {
  const sg::Plan plan{.layout = {.tp = 2, .pp = 2}, .recompute = sg::Recompute::full};
  const auto step  = sg::training_step(small(true, 2), plan, batch_of_4);
  const auto alone = sg::training_step(small(true, 2), plan, batch_of_4, {.only = sg::Rank{3}});
  const auto a = sg::memory_requirement(step, sg::Rank{3}), b = sg::memory_requirement(alone, sg::Rank{3});
  CHECK(a.at_peak == b.at_peak);
  CHECK(a.peak_bytes == b.peak_bytes);
  CHECK(a.node == b.node);
}

TEST_CASE("every buffer of a step has a role, also those that passes add", "[graphs][memory]") {
  sg::Plan plan{.layout    = {.dp = 2, .tp = 2, .pp = 2},
                .precision = {.param = sg::DType::bf16, .reduce = sg::DType::bf16},
                .recompute = sg::Recompute::full,
                .algorithm = sg::Algorithm::ring};
  const auto ring = sg::training_step(small(false, 2), plan, batch_of_4);
  plan.algorithm  = sg::Algorithm::direct;
  const auto step = sg::training_step(small(false, 2), plan, batch_of_4);
  CHECK(step.roles.size() == step.graph.num_buffers());
  CHECK(ring.roles.size() == ring.graph.num_buffers());
  const auto role_of = [&](const std::string& name) -> std::set<MemoryRole> {
    std::set<MemoryRole> found;
    for (std::uint32_t i = 0; i < step.graph.num_buffers(); ++i) {
      if (step.graph.spec(sg::Buffer{i}).name.starts_with(name)) found.insert(step.role(sg::Buffer{i}));
    }
    return found;
  };
  using Roles = std::set<MemoryRole>;
  CHECK(role_of("bucket ") == Roles{MemoryRole::gradients});
  CHECK(role_of("rounded gradient of ") == Roles{MemoryRole::gradients});
  for (const char* name : {"master of ", "mean of ", "square of "}) {
    CAPTURE(name);
    CHECK(role_of(name) == Roles{MemoryRole::optimizer});
  }
  for (const char* name : {"received activation", "received gradient", "recompute ", "attention"}) {
    CAPTURE(name);
    CHECK(role_of(name) == Roles{MemoryRole::activations});
  }
  for (const char* name : {"tokens", "targets", "loss", "grad_norm", "squares", "clip factor"}) {
    CAPTURE(name);
    CHECK(role_of(name) == Roles{MemoryRole::other});
  }
  REQUIRE(step.graph.num_buffers() < ring.graph.num_buffers());  // the ring adds buffers
  for (std::uint32_t i = 0; i < ring.graph.num_buffers(); ++i) {
    const bool added = i >= step.graph.num_buffers();
    CHECK(ring.role(sg::Buffer{i}) == (added ? MemoryRole::other : step.role(sg::Buffer{i})));
  }
  CHECK(ring.role(sg::Buffer{ring.graph.num_buffers()}) == MemoryRole::other);
  const auto logits =
      sg::forward_step(small(false, 2), {}, {.global = 1, .micro = 1, .seq = 8}, sg::ForwardResult::logits);
  CHECK(logits.role(logits.ranks[0].logits[0]) == MemoryRole::activations);
}

TEST_CASE("slots of a sharded step have the role slots, and shards have the roles of whole weights",
          "[graphs][memory]") {
  const auto step_of = [](sg::ReduceWhen reduce, sg::DType travel = sg::DType::f32) {
    return sg::training_step(small(false, 2),
                             {.layout    = {.dp = 2},
                              .shard     = {.strategy = sg::Shard::full, .reduce = reduce, .min_params = 100},
                              .precision = {.reduce = travel}},
                             batch_of_4);
  };
  const auto roles_of = [](const sg::StepGraph& step, const std::string& name) {
    std::set<MemoryRole> found;
    for (std::uint32_t i = 0; i < step.graph.num_buffers(); ++i) {
      if (step.graph.spec(sg::Buffer{i}).name.starts_with(name)) found.insert(step.role(sg::Buffer{i}));
    }
    return found;
  };
  using Roles     = std::set<MemoryRole>;
  const auto each = step_of(sg::ReduceWhen::each);
  CHECK(each.roles.size() == each.graph.num_buffers());
  CHECK(roles_of(each, "weight slot ") == Roles{MemoryRole::slots});
  CHECK(roles_of(each, "gradient slot ") == Roles{MemoryRole::slots});
  CHECK(roles_of(each, "gradient of ") == Roles{MemoryRole::gradients});
  CHECK(roles_of(each, "incoming gradients") == Roles{MemoryRole::gradients});
  CHECK(roles_of(each, "mean of ") == Roles{MemoryRole::optimizer});
  const auto last = step_of(sg::ReduceWhen::last, sg::DType::bf16);
  CHECK(roles_of(last, "gradients of ") == Roles{MemoryRole::gradients});
  CHECK(roles_of(last, "rounded ") == Roles{MemoryRole::gradients});
  CHECK(roles_of(last, "attention") == Roles{MemoryRole::activations});
}

TEST_CASE("full sharding keeps a share of parameters, gradients and optimizer state, and adds slots",
          "[graphs][memory]") {
  const auto model = sg::gpt2({.layers = 4, .width = 64, .heads = 4, .context = 16, .vocab = 64});
  const sg::BatchSpec batch{.global = 8, .micro = 1, .seq = 16};
  const auto of = [&](const sg::ShardPlan& shard) {
    return sg::memory_requirements(model, {.layout = {.dp = 4}, .shard = shard}, batch, {.keep_gradients = true}).at(0);
  };
  const auto share = [](std::int64_t part, std::int64_t whole) {
    return static_cast<double>(part) / static_cast<double>(whole);
  };
  const auto none = of({}), zero1 = of({.strategy = sg::Shard::zero1}), grad_op = of({.strategy = sg::Shard::grad_op}),
             full = of({.strategy = sg::Shard::full, .reduce = sg::ReduceWhen::each});
  for (const MemoryRole role : {MemoryRole::parameters, MemoryRole::gradients, MemoryRole::optimizer}) {
    CAPTURE(role);
    CHECK(share(full[role], none[role]) < (role == MemoryRole::gradients ? 0.4 : 0.27));
    CHECK(share(full[role], none[role]) > 0.25);
  }
  CHECK(share(zero1[MemoryRole::optimizer], none[MemoryRole::optimizer]) < 0.27);
  CHECK(zero1[MemoryRole::parameters] >= none[MemoryRole::parameters]);
  CHECK(zero1[MemoryRole::gradients] >= none[MemoryRole::gradients]);
  CHECK(grad_op[MemoryRole::parameters] >= none[MemoryRole::parameters]);
  CHECK(none[MemoryRole::slots] == 0);
  CHECK(zero1[MemoryRole::slots] == 0);
  CHECK(full[MemoryRole::slots] > 0);
}

TEST_CASE("data-parallel ranks share a row, and tensor-parallel ranks do if their pieces are equal",
          "[graphs][memory]") {
  const auto ranks_of = [](const sg::Plan& plan, int vocab, const sg::MemoryRequirementOptions& options = {}) {
    const auto model = sg::gpt2({.layers = 3, .width = 16, .heads = 4, .context = 8, .vocab = vocab});
    std::vector<std::vector<int>> out;
    for (const auto& row : sg::memory_requirements(model, plan, batch_of_4, options)) {
      out.emplace_back();
      for (const sg::Rank rank : row.ranks) out.back().push_back(sg::index(rank));
    }
    return out;
  };
  using Rows = std::vector<std::vector<int>>;
  CHECK(ranks_of({.layout = {.dp = 4}}, 32) == Rows{{0, 1, 2, 3}});
  CHECK(ranks_of({.layout = {.dp = 2, .tp = 2}}, 32) == Rows{{0, 1, 2, 3}});
  CHECK(ranks_of({.layout = {.dp = 2, .tp = 2}}, 33) == Rows{{0, 2}, {1, 3}});
  // Only the first and the last stage have weights of the vocabulary.
  CHECK(ranks_of({.layout = {.tp = 2, .pp = 3}}, 33) == Rows{{0}, {1}, {2, 3}, {4}, {5}});
  CHECK(ranks_of({.layout = {.dp = 2, .tp = 2}}, 33, {.rank = sg::Rank{2}}) == Rows{{2}});
  CHECK_THROWS_WITH(ranks_of({.layout = {.dp = 2}}, 32, {.rank = sg::Rank{2}}),
                    ContainsSubstring("rank 2: is not in the layout (0 to 1)"));
}

TEST_CASE("recomputation reduces activations by what layers need not keep, and no other role", "[graphs][memory]") {
  // The same sizes as in recompute_step_test. With persistent gradients, the peak is at the product of the head or,
  // with full recomputation, at the last product of a layer's MLP.
  constexpr std::int64_t rows = 128, width = 64, heads = 4, inner = 1024, vocab = 48, element = 4, layers = 4;
  constexpr std::int64_t all = element * rows * (8 * width + 2 * inner + heads + 4), input = element * rows * width,
                         attention = element * rows * (width + heads),
                         at_head = element * rows * (3 * width + 2 + vocab), at_product = element * rows * width;
  const auto model =
      sg::gpt2({.layers = layers, .width = width, .heads = heads, .context = 64, .vocab = vocab, .inner = inner});
  const sg::BatchSpec batch{.global = 8, .micro = 2, .seq = 64};
  const auto of = [&](sg::Recompute kind) {
    return sg::memory_requirements(model, {.recompute = kind}, batch, {.keep_gradients = true}).at(0);
  };
  const auto none = of(sg::Recompute::none), selective = of(sg::Recompute::selective), full = of(sg::Recompute::full);
  CHECK(none[MemoryRole::activations] == layers * all + at_head);
  CHECK(selective[MemoryRole::activations] == layers * (all - attention) + at_head);
  CHECK(full[MemoryRole::activations] == (layers - 1) * input + all + at_product);
  for (const MemoryRole role : sg::all_memory_roles) {
    CAPTURE(role);
    if (role == MemoryRole::activations) continue;
    CHECK(selective[role] == none[role]);
    CHECK(full[role] == none[role]);
  }
}

TEST_CASE("an evaluation needs parameters and activations, but no gradients and no optimizer state",
          "[graphs][memory]") {
  const auto model    = small(false, 2);
  const auto trains   = sg::memory_requirements(model, {}, batch_of_4).at(0);
  const auto forwards = sg::memory_requirements(model, {}, batch_of_4, {.trains = false}).at(0);
  CHECK(forwards[MemoryRole::parameters] == trains[MemoryRole::parameters]);
  CHECK(forwards[MemoryRole::gradients] == 0);
  CHECK(forwards[MemoryRole::optimizer] == 0);
  CHECK(forwards[MemoryRole::activations] > 0);
  CHECK(forwards[MemoryRole::activations] < trains[MemoryRole::activations]);
}

TEST_CASE("seven billion parameters on 256 ranks are planned without allocating them", "[graphs][memory]") {
  const auto model =
      sg::llama({.layers = 32, .width = 4096, .heads = 32, .context = 4096, .vocab = 32000, .inner = 11008});
  const sg::Plan plan{
      .layout = {.dp = 8, .tp = 8, .pp = 4}, .precision = {.param = sg::DType::bf16}, .recompute = sg::Recompute::full};
  const auto rows =
      sg::memory_requirements(model, plan, {.global = 64, .micro = 1, .seq = 4096}, {.rank = sg::Rank{0}});
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].ranks == std::vector{sg::Rank{0}});
  // An eighth of 8 layers and of the embedding. Norms are not cut.
  constexpr std::int64_t elements = 8 * (4 * 4096 * 4096 + 3 * 4096 * 11008) / 8 + 32000 * 4096 / 8 + 8 * 2 * 4096;
  CHECK(rows[0][MemoryRole::parameters] == 2 * elements);
  CHECK(rows[0][MemoryRole::optimizer] == 12 * elements);
  CHECK(rows[0].peak_bytes > 18 * elements);
}

TEST_CASE("the table has ranks, roles and bytes in columns", "[graphs][memory]") {
  const sg::MemoryRequirement row{.rank              = sg::Rank{1},
                                  .ranks             = {sg::Rank{1}, sg::Rank{2}, sg::Rank{3}, sg::Rank{7}},
                                  .at_peak           = {1024, 2048, 0, 1 << 20, 0, 8},
                                  .unused_bytes      = 24,
                                  .peak_bytes        = 1'051'680,
                                  .lower_bound_bytes = 1'051'680,
                                  .node              = "linear"};
  const std::string table = sg::memory_table(std::vector{row});
  CHECK_THAT(table, ContainsSubstring("ranks  parameters  gradients  optimizer  activations  slots  other  unused ") &&
                        ContainsSubstring("1-3,7") && ContainsSubstring("1.0 KiB") && ContainsSubstring("1051680\n"));
  CHECK(sg::roles_text(row) == "parameters 1.0 KiB, gradients 2.0 KiB, activations 1.0 MiB, other 8 B, unused 24 B");
  sg::MemoryRequirement many = row;
  many.ranks.clear();
  for (int rank = 0; rank < 16; rank += 2) many.ranks.push_back(sg::Rank{rank});
  CHECK_THAT(sg::memory_table(std::vector{many}), ContainsSubstring("0,2,4,.. (8 ranks)"));
}
