// The graphs of sharded steps: which nodes may run concurrently, and how much memory they need.
#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <limits>
#include <map>
#include <set>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/graph/without_nodes.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/simulate/simulate.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/step/shard_report.hpp"
#include "graphs/step/training_step.hpp"
#include "graphs/train/step_run.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::Shard;

namespace {

sg::Model model_of(int layers) {
  return sg::gpt2({.layers = layers, .width = 32, .heads = 2, .context = 16, .vocab = 64});
}

sg::StepGraph step_of(const sg::ShardPlan& shard, int layers = 4, int dp = 2) {
  return sg::training_step(model_of(layers), {.layout = {.dp = dp}, .shard = shard},
                           {.global = dp, .micro = 1, .seq = 16});
}

std::map<std::string, sg::Node> nodes_of(const sg::Graph& graph, sg::Rank rank) {
  std::map<std::string, sg::Node> found;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    if (graph.rank({i}) == rank) found.emplace(graph.name({i}), sg::Node{i});
  }
  return found;
}

std::vector<sg::Node> computing(const sg::Graph& graph, sg::Rank rank, int layer, std::string_view phase) {
  std::vector<sg::Node> found;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const sg::Labels labels = graph.labels({i});
    if (graph.rank({i}) == rank && graph.kind({i}) == sg::NodeKind::compute && labels.layer == layer &&
        labels.phase == phase) {
      found.push_back({i});
    }
  }
  return found;
}

bool ordered(const sg::Graph& graph, sg::Node a, sg::Node b) {
  return sg::reaches(graph, a, b) || sg::reaches(graph, b, a);
}

}  // namespace

TEST_CASE("a layer can be gathered while an earlier layer computes if there is a free slot", "[graphs][shard]") {
  const int slots          = GENERATE(1, 2, 3);
  const sg::StepGraph step = step_of({.strategy = Shard::full, .slots = slots, .min_params = 0});
  const sg::Graph& graph   = step.graph;
  CAPTURE(slots);
  for (const int rank : {0, 1}) {
    const auto nodes = nodes_of(graph, sg::Rank{rank});
    for (int layer = 0; layer < 4; ++layer) {
      for (int ahead = 1; layer + ahead < 4; ++ahead) {
        const sg::Node gather = nodes.at(sg::str("all_gather F layer", layer + ahead, " mb0"));
        bool any = false, all = true;
        for (const sg::Node node : computing(graph, sg::Rank{rank}, layer, "forward")) {
          any = any || ordered(graph, node, gather);
          all = all && ordered(graph, node, gather);
        }
        CAPTURE(rank, layer, ahead);
        CHECK(any == (ahead >= slots));
        CHECK(all == (ahead >= slots));
      }
    }
  }
}

TEST_CASE("prefetch determines how early weights are gathered for the backward pass", "[graphs][shard]") {
  const auto prefetch      = GENERATE(sg::Prefetch::backward_pre, sg::Prefetch::backward_post, sg::Prefetch::none);
  const sg::StepGraph step = step_of(
      {.strategy = Shard::full, .reduce = sg::ReduceWhen::each, .prefetch = prefetch, .slots = 3, .min_params = 0});
  const auto nodes = nodes_of(step.graph, sg::Rank{0});
  CAPTURE(to_string(prefetch));
  for (int layer = 1; layer < 3; ++layer) {  // the last layer still has its weights from the forward pass
    const sg::Node next    = nodes.at(sg::str("all_gather B layer", layer - 1, " mb0"));
    const sg::Node reduced = nodes.at(sg::str("reduce_scatter layer", layer, " mb0"));
    bool waits             = false;
    for (const sg::Node node : computing(step.graph, sg::Rank{0}, layer, "backward")) {
      waits = waits || sg::reaches(step.graph, node, next);
    }
    CHECK(waits == (prefetch != sg::Prefetch::backward_pre));
    CHECK(sg::reaches(step.graph, reduced, next) == (prefetch == sg::Prefetch::none));
  }
}

TEST_CASE("gradients that are reduced once are reduced during the last backward pass", "[graphs][shard]") {
  const sg::StepGraph step = step_of({.strategy = Shard::full, .slots = 2, .min_params = 0});
  const sg::Graph& graph   = step.graph;
  for (const int rank : {0, 1}) {
    const auto nodes = nodes_of(graph, sg::Rank{rank});
    const auto issue = [&](const std::string& name) { return graph.part(nodes.at(name)).issue; };
    const int last   = step.num_microbatches - 1;
    for (int layer = 2; layer < 4; ++layer) {
      // The weights of the layer two before need the slot of this layer, so they are gathered later.
      CAPTURE(rank, layer);
      CHECK(issue(sg::str("reduce_scatter layer", layer)) <
            issue(sg::str("all_gather B layer", layer - 2, " mb", last)));
    }
  }
}

TEST_CASE("without forward prefetch a layer is gathered after the layer before it has computed", "[graphs][shard]") {
  const sg::StepGraph step = step_of({.strategy = Shard::full, .forward_prefetch = false, .slots = 3, .min_params = 0});
  const auto nodes         = nodes_of(step.graph, sg::Rank{1});
  for (int layer = 0; layer + 1 < 4; ++layer) {
    const auto before = computing(step.graph, sg::Rank{1}, layer, "forward");
    CHECK(sg::reaches(step.graph, before.back(), nodes.at(sg::str("all_gather F layer", layer + 1, " mb0"))));
  }
}

TEST_CASE("a smaller reshard group keeps only the weights that it gathers again", "[graphs][shard]") {
  const bool flat          = GENERATE(true, false);
  const int microbatches   = GENERATE(1, 2);
  const sg::StepGraph step = sg::training_step(
      model_of(3),
      {.layout = {.dp = 4}, .shard = {.strategy = Shard::full, .min_params = 0, .flat = flat, .reshard_group = 2}},
      {.global = 4 * microbatches, .micro = 1, .seq = 16});
  CAPTURE(flat, microbatches);
  std::map<std::uint32_t, int> reads;  // reads of each kept buffer
  std::set<int> layers;
  for (std::uint32_t i = 0; i < step.graph.num_buffers(); ++i) {
    if (step.graph.spec(sg::Buffer{i}).name.starts_with("kept ")) reads[i] = 0;
  }
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    if (step.graph.name({i}).starts_with("keep ")) layers.insert(step.graph.labels({i}).layer);
    for (std::size_t a = 0; a < step.graph.num_accesses({i}); ++a) {
      const auto access = step.graph.access({i}, a);
      if (access.mode == sg::AccessMode::read && reads.contains(access.buffer.id)) ++reads[access.buffer.id];
    }
  }
  for (const auto& [buffer, count] : reads) {
    CAPTURE(step.graph.spec(sg::Buffer{buffer}).name);
    CHECK(count == microbatches);
  }
  // The backward pass of the head follows its forward pass at once. That of the embedding reads no weights.
  CHECK(layers == std::set<int>{0, 1, 2});
  sg::verify(step);
}

TEST_CASE("slots, prefetch and gradient slots change edges, never the set of nodes", "[graphs][shard]") {
  const sg::ShardPlan plan{.strategy = Shard::full, .reduce = sg::ReduceWhen::each, .min_params = 0};
  const sg::StepGraph usual   = step_of(plan);
  sg::ShardPlan other         = plan;
  other.slots                 = GENERATE(1, 4);
  other.grad_slots            = GENERATE(1, 3);
  other.prefetch              = GENERATE(sg::Prefetch::backward_pre, sg::Prefetch::none);
  const sg::StepGraph changed = step_of(other);
  REQUIRE(changed.graph.num_nodes() == usual.graph.num_nodes());
  for (std::uint32_t i = 0; i < usual.graph.num_nodes(); ++i) {
    CHECK(changed.graph.describe(sg::Node{i}) == usual.graph.describe(sg::Node{i}));
  }
}

TEST_CASE("with separate links, all gathers but the first are hidden behind computation", "[graphs][shard]") {
  const int layers         = 6;
  const sg::StepGraph step = step_of({.strategy = Shard::full, .min_params = 0}, layers);
  // Computation is slow enough that a layer can be gathered during the layer before it.
  const sg::Machine machine   = sg::two_level_machine({.ranks          = 2,
                                                       .ranks_per_node = 2,
                                                       .inside         = {.latency_s = 1e-6, .bytes_per_s = 1e9},
                                                       .between        = {.latency_s = 1e-6, .bytes_per_s = 1e9},
                                                       .rates          = {.compute = {.flops_per_s = 1e9}}});
  const sg::Timeline timeline = sg::simulate(step.graph, machine);
  const auto nodes            = nodes_of(step.graph, sg::Rank{0});
  int overlaps                = 0;
  for (int layer = 0; layer + 1 < layers; ++layer) {
    const auto& gather = timeline.nodes[nodes.at(sg::str("all_gather F layer", layer + 1, " mb0")).id];
    const auto compute = computing(step.graph, sg::Rank{0}, layer, "forward");
    overlaps += gather.begin_s < timeline.nodes[compute.back().id].end_s &&
                gather.end_s <= timeline.nodes[compute.back().id].end_s;
  }
  CHECK(overlaps == layers - 1);
}

TEST_CASE("weight gradients on their own gather no weights", "[graphs][shard]") {
  sg::Plan plan{.layout = {.dp = 2, .pp = 2}, .shard = {.strategy = Shard::full, .min_params = 0}};
  plan.pipeline.schedule   = "zb-h1";
  const sg::StepGraph step = sg::training_step(model_of(4), plan, {.global = 8, .micro = 1, .seq = 16});
  // A unit is gathered once for the forward and once for the backward of a microbatch, or once for both if the backward
  // follows at once.
  std::map<std::string, int> gathers;
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    if (step.graph.op({i}) != "all_gather" || step.graph.rank({i}) != sg::Rank{0}) continue;
    CHECK(++gathers[std::string(step.graph.name({i}))] == 1);
  }
  CHECK_FALSE(gathers.empty());
}

namespace {

// The total bytes of a rank's buffers that satisfy `which`.
std::int64_t bytes_of(const sg::Graph& graph, sg::Rank rank, const std::function<bool(const sg::BufferSpec&)>& which) {
  std::int64_t sum = 0;
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const sg::BufferSpec& spec = graph.spec(sg::Buffer{i});
    if (spec.rank == rank && !spec.token && which(spec)) sum += spec.size_bytes;
  }
  return sum;
}

}  // namespace

TEST_CASE("a rank holds its share of the weights, and the slots", "[graphs][shard]") {
  const int ranks = 8, layers = 24;
  const sg::Model model =
      sg::gpt2({.layers = layers, .width = 64, .heads = 4, .context = 8, .vocab = 64, .tied = false});
  const int slots = GENERATE(1, 2), grad_slots = GENERATE(1, 2);
  const bool flat = GENERATE(true, false);
  CAPTURE(slots, grad_slots, flat);
  if (sg::testing::scale() > 1 && slots + grad_slots < 4) return;
  const sg::Plan plan{.layout = {.dp = ranks},
                      .shard  = {.strategy   = Shard::full,
                                 .reduce     = sg::ReduceWhen::each,
                                 .slots      = slots,
                                 .grad_slots = grad_slots,
                                 .min_params = 0,
                                 .flat       = flat}};
  const sg::StepGraph step = sg::training_step(model, plan, {.global = 4 * ranks, .micro = 1, .seq = 8});
  const double parameters  = 4.0 * static_cast<double>(model.parameters().num_elements());
  const double unit        = 4.0 * (12 * 64 * 64 + 13 * 64);  // a layer
  for (const int r : {0, ranks - 1}) {
    const sg::Rank rank{r};
    const auto named = [&](std::string_view begin) {
      return [begin](const sg::BufferSpec& spec) { return spec.name.starts_with(begin); };
    };
    const auto kept         = bytes_of(step.graph, rank, [](const sg::BufferSpec& spec) {
      return spec.lifetime == sg::Lifetime::persistent && spec.type == sg::DType::f32;
    });
    const auto gradients    = bytes_of(step.graph, rank, named("gradient of "));
    const auto weight_slots = bytes_of(step.graph, rank, named("weight slot"));
    const auto grads        = bytes_of(step.graph, rank, named("gradient slot"));
    CHECK(static_cast<double>(kept) < 1.05 * 3 * parameters / ranks);  // values and the two moments of AdamW
    CHECK(static_cast<double>(kept) > 0.9 * 3 * parameters / ranks);
    const auto incoming = bytes_of(step.graph, rank, named("incoming gradients"));
    CHECK(static_cast<double>(gradients + incoming) < 1.05 * parameters / ranks + unit / ranks);
    CHECK(static_cast<double>(weight_slots) == slots * unit);
    CHECK(static_cast<double>(grads) == grad_slots * unit);
    const sg::MemoryPlan memory = sg::plan_memory(sg::slice(step.graph, rank));
    const auto peak             = static_cast<double>(memory.arena(rank).size_bytes);
    CHECK(peak < parameters);  // less than one copy of the weights
  }
}

namespace {

// A copy of the graph with a node before each reuse of a slot that fills the slot with NaN.
sg::Graph with_poison(const sg::Graph& graph, int& num_poisoned) {
  sg::Graph out = sg::without_nodes(graph);
  std::map<std::uint32_t, bool> filling;  // by slot: whether the last node that accessed it fills it
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    for (std::size_t i = 0; i < graph.num_accesses({node}); ++i) {
      const auto access       = graph.access({node}, i);
      const auto& spec        = graph.spec(access.buffer);
      const bool of_weights   = spec.name.starts_with("weight slot"),
                 of_gradients = spec.name.starts_with("gradient slot");
      if (!of_weights && !of_gradients) continue;
      const bool fills = of_weights ? graph.op({node}) == "all_gather" : graph.op({node}) != "reduce_scatter";
      if (fills && !filling[access.buffer.id]) {
        ++num_poisoned;
        out.add({.name = "poison", .writes = access.buffer}, [](const sg::Context& context) {
          for (float& value : context.write<float>()) value = std::numeric_limits<float>::quiet_NaN();
        });
      }
      filling[access.buffer.id] = fills;
    }
    out.add(graph.spec(sg::Node{node}), graph.body({node}));
  }
  return out;
}

}  // namespace

TEST_CASE("no node reads data that the previous use left in a slot", "[graphs][shard]") {
  const auto reduce = GENERATE(sg::ReduceWhen::last, sg::ReduceWhen::each);
  const bool flat   = GENERATE(true, false);
  const int dp      = GENERATE(2, 3);
  CAPTURE(to_string(reduce), flat, dp);
  if (sg::testing::scale() > 1 && dp != 3) return;
  const sg::Plan plan{.layout = {.dp = dp},
                      .shard  = {.strategy = Shard::full, .reduce = reduce, .min_params = 0, .flat = flat}};
  const sg::BatchSpec batch{.global = 2 * dp, .micro = 1, .seq = 16};
  const sg::Model model = model_of(4);
  const auto losses     = [&](bool poisons) {
    sg::StepGraph step = sg::training_step(model, plan, batch);
    int num_poisoned   = 0;
    if (poisons) {
      step.graph = with_poison(step.graph, num_poisoned);
      CHECK(num_poisoned > 8 * dp);
    }
    sg::LoopbackWorld world(plan.layout);
    sg::StepRun run(std::move(step), world, {.threads = 2});
    sg::set_fresh_weights(run, 1);
    std::vector<double> found;
    for (int i = 0; i < 3; ++i) {
      run.set_tokens(sg::testing::tokens_for(batch, i, model.vocab));
      for (const sg::StepRank& rank : run.step().ranks) {
        run.memory().span<std::int64_t>(rank.step_number)[0] = i + 1;
        run.memory().span<std::int64_t>(rank.num_updates)[0] = i + 1;
        run.memory().span<double>(rank.rate)[0]              = 1e-2;
      }
      run.run();
      found.push_back(run.loss());
    }
    return found;
  };
  CHECK(losses(true) == losses(false));
}

TEST_CASE("invalid units are refused by name", "[graphs][shard][refuses]") {
  const auto refuses = [](sg::ShardPlan plan, const std::string& why) {
    plan.strategy = Shard::full;
    CHECK_THROWS_MATCHES(step_of(plan), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refuses({.units = "type:attention"},
          "shard.units: 'type:attention' matches no block (blocks are embedding, layer0, layer1, layer2, layer3, ");
  refuses({.units = "layers"}, "shard.units: 'layers' is unknown (layer, model, params:N or type:NAME)");
  refuses({.slots = 0}, "shard.slots: 0 (at least 1)");
  refuses({.grad_slots = 0}, "shard.grad_slots: 0 (at least 1)");
  refuses({.unit_of = [](const sg::Block& block) { return block.name == "layer1" ? "inner" : "outer"; }},
          "shard.units: unit 'outer' has block 'layer2', but not the block before it");
}

TEST_CASE("a user's function chooses the units", "[graphs][shard]") {
  const sg::StepGraph step =
      step_of({.strategy = Shard::full,
               .unit_of =
                   [](const sg::Block& block) {
                     return block.name == "embedding" || block.layer == 0 || block.layer == 1 ? "a" : "b";
                   },
               .min_params = 0});
  std::set<std::string> names;
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    if (step.graph.op({i}) == "all_gather" && step.graph.labels({i}).phase == "forward")
      names.insert(std::string(step.graph.name({i})));
  }
  CHECK(names.size() >= 2);
  CHECK(names.contains("all_gather F embedding to layer1 mb0"));
}

TEST_CASE("weights below min_params stay whole, and are reduced in a bucket", "[graphs][shard]") {
  const sg::StepGraph step = step_of({.strategy = Shard::full, .min_params = 1000});
  for (std::size_t i = 0; i < step.ranks[0].weights.size(); ++i) {
    const sg::StepWeight &here = step.ranks[0].weights[i], &there = step.ranks[1].weights[i];
    const std::int64_t elements = sg::num_elements(step.spec(here).shape);
    CAPTURE(step.spec(here).name);
    CHECK(here.value.size() + there.value.size() == (elements < 1000 ? 2 * elements : elements));
    CHECK(here.first.size() + there.first.size() == (here.tied ? 0 : elements < 1000 ? 2 * elements : elements));
  }
}

TEST_CASE("a weight that no op reads is refused, or gets zero gradients and is listed as unused", "[graphs][shard]") {
  sg::Model model         = model_of(2);
  const std::size_t block = GENERATE(0, 1, 2, 3);
  model.blocks[block].weights.push_back({.name = "spare", .shape = {40, 40}});
  const sg::BatchSpec batch{.global = 2, .micro = 1, .seq = 16};
  const auto strategy = GENERATE(Shard::none, Shard::zero1, Shard::grad_op, Shard::full);
  const auto reduce   = GENERATE(sg::ReduceWhen::last, sg::ReduceWhen::each);
  if (reduce == sg::ReduceWhen::each && (strategy == Shard::none || strategy == Shard::zero1)) return;
  sg::Plan plan{.layout = {.dp = 2}, .shard = {.strategy = strategy, .reduce = reduce, .grad_slots = GENERATE(1, 2)}};
  CAPTURE(to_string(strategy), to_string(reduce), block, plan.shard.grad_slots);
  if (sg::testing::scale() > 1 && (block != 2 || plan.shard.grad_slots != 2)) return;
  CHECK_THROWS_MATCHES(
      sg::training_step(model, plan, batch), sg::Error,
      MessageMatches(ContainsSubstring("weight 'spare' of block '" + model.blocks[block].name + "': no op adds")));
  (GENERATE(true, false) ? plan.shard.find_unused_parameters : plan.shard.static_graph) = true;
  const sg::StepGraph step = sg::training_step(model, plan, batch);
  CHECK(step.unused == std::vector<std::string>{"spare"});
  const auto with = sg::testing::train(model, plan, batch, 3);
  CHECK(with.loss == sg::testing::train(model_of(2), {.layout = {.dp = 2}}, batch, 3).loss);
}

TEST_CASE("every element of a sharded weight has one owner and one place", "[graphs][shard]") {
  const bool flat          = GENERATE(true, false);
  const sg::StepGraph step = step_of({.strategy = Shard::full, .min_params = 0, .flat = flat}, 2, 3);
  for (const sg::StepWeight& weight : step.ranks[0].weights) {
    const sg::WeightSpec& spec  = step.spec(weight);
    const std::int64_t elements = sg::num_elements(spec.shape);
    CAPTURE(flat, spec.name);
    const auto shards = sg::weight_shards(step, spec.name);
    std::int64_t next = 0;
    for (const sg::WeightShard& shard : shards) {
      CHECK(shard.elements.begin == next);
      next += shard.elements.size();
      CHECK(sg::find_element(step, spec.name, shard.elements.begin).owner == shard.owner);
      CHECK(sg::find_element(step, spec.name, next - 1).local == shard.elements.size() - 1);
    }
    CHECK(next == elements);
    CHECK_THROWS_MATCHES(sg::find_element(step, spec.name, elements), sg::Error,
                         MessageMatches(ContainsSubstring(sg::str("has no element ", elements))));
  }
  CHECK_THROWS_AS(sg::weight_shards(step, "none"), sg::Error);
  CHECK_THROWS_AS(sg::weight_shards(step, step.spec(step.ranks[0].weights[0]).name, 1), sg::Error);
}

TEST_CASE("sharding statistics equal the counts in the graph", "[graphs][shard]") {
  const sg::StepGraph full   = step_of({.strategy = Shard::full, .min_params = 0}, 4, 4);
  const sg::ShardStats stats = sg::shard_stats(full, sg::plan_memory(full.graph), sg::Rank{0});
  // Forward: the embedding, four layers and the head. The head needs two gathers, because its tied weight is cut like
  // the embedding. Backward: only the four layers. The head still has its weights, and the embedding reads none.
  CHECK(stats.all_gathers == 5 + 2 + 4);
  CHECK(stats.reduce_scatters == 6 + 1);
  CHECK(stats.all_reduces == 0);
  CHECK(stats.local_ratio == Catch::Approx(0.25).epsilon(0.01));
  CHECK(static_cast<double>(stats.current_bytes) < 0.26 * 0.75 * static_cast<double>(stats.whole_bytes));
  CHECK(stats.peak_bytes < stats.whole_bytes / 2);
  for (const int rank : {1, 2, 3}) {  // the same total on every rank
    CHECK(sg::shard_stats(full, sg::plan_memory(full.graph), sg::Rank{rank}).whole_bytes == stats.whole_bytes);
  }
  const sg::StepGraph plain = step_of({.min_params = 0}, 4, 4);
  const sg::ShardStats none = sg::shard_stats(plain, sg::plan_memory(plain.graph), sg::Rank{0});
  CHECK(none.local_ratio == 1);
  CHECK(none.all_gathers == 0);
  CHECK(none.peak_bytes > none.current_bytes);
  CHECK(none.whole_bytes == stats.whole_bytes);
  CHECK(none.all_reduces >= 1);
}

TEST_CASE("units are gathered, used and resharded in this order, and a slot holds one unit at a time",
          "[graphs][shard]") {
  const int slots             = GENERATE(1, 2);
  const sg::StepGraph step    = step_of({.strategy = Shard::full, .slots = slots, .min_params = 0});
  const sg::Machine machine   = sg::two_level_machine({.ranks          = 2,
                                                       .ranks_per_node = 2,
                                                       .inside         = {.latency_s = 1e-6, .bytes_per_s = 1e9},
                                                       .between        = {.latency_s = 1e-6, .bytes_per_s = 1e9},
                                                       .rates = {.compute = {.flops_per_s = 1e9, .overhead_s = 1e-6}}});
  const sg::Timeline timeline = sg::simulate(step.graph, machine);
  const auto states           = sg::shard_states(step, timeline, sg::Rank{0});
  std::map<std::string, int> gathered;
  std::vector<std::pair<double, int>> whole;  // +1 when the gather of a unit begins, -1 when its last use ends
  for (const sg::ShardInterval& interval : states) {
    CHECK(interval.begin_s <= interval.end_s);
    gathered[interval.unit] += interval.state == sg::ShardState::gathered;
    if (interval.unit == "head")
      continue;  // smaller than a slot: its gather may begin before the last use of the slot ends
    if (interval.state == sg::ShardState::gathering) whole.emplace_back(interval.begin_s, 1);
    if (interval.state == sg::ShardState::gathered)
      whole.emplace_back(interval.end_s - 1e-9, -1);  // the next gather may begin at the same time
  }
  std::sort(whole.begin(), whole.end());
  int now = 0, most = 0;
  for (const auto& [time, change] : whole) most = std::max(most, now += change);
  CHECK(most == slots);
  CHECK(gathered.at("layer0") == 2);
  CHECK(gathered.at("embedding") >= 1);
}
