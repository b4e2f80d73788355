// Keys of the config section `shard` that have no effect with the other settings.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "graphs/config/config.hpp"
#include "graphs/plan/memory_preset.hpp"

namespace sg = stepgraph;

namespace {

constexpr const char* smallest = R"({"model": {"kind": "gpt2"}, "data": {"synthetic": 1}, "batch": {},
                                     "layout": {"dp": 4}})";

using Overrides = std::vector<std::string>;

sg::Config with(const Overrides& overrides) { return sg::parse_config(smallest, overrides); }

// The error message for a config; empty if it is accepted.
std::string refusal(const Overrides& overrides) {
  try {
    static_cast<void>(with(overrides));
    return {};
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::config);
    return error.what();
  }
}

Overrides joined(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// The overrides that choose a strategy.
Overrides strategy(const std::string& name) {
  if (name == "hybrid") return {"shard.strategy=hybrid", "shard.group=2"};
  return {"shard.strategy=" + name};
}

struct Idle {
  std::string key, given;
  std::vector<std::string> strategies;  // those with which the key has no effect
  std::string why;
};

}  // namespace

TEST_CASE("a key without effect in a strategy is refused, with the strategies that use it",
          "[graphs][config][shard][refuses]") {
  const std::string cut = "shards nothing (strategy zero1, grad_op, full or hybrid)",
                    use = "gathers no weights in forward or backward (strategy full or hybrid)",
                    all = "reduces gradients unit by unit (strategy none, which reduces buckets)";
  const std::vector<std::string> none{"none"}, whole{"none", "zero1", "grad_op"},
      units{"zero1", "grad_op", "full", "hybrid"};
  const std::vector<Idle> keys{
      {"units", "model", none, cut},
      {"min_params", "10", none, cut},
      {"flat", "false", none, cut},
      {"slots", "3", whole, use},
      {"prefetch", "backward_post", whole, use},
      {"prefetch", "none", whole, use},
      {"forward_prefetch", "false", whole, use},
      {"delay_all_reduce", "true", units, all},
  };
  for (const Idle& idle : keys) {
    for (const char* each : {"none", "zero1", "grad_op", "full", "hybrid"}) {
      CAPTURE(idle.key, idle.given, each);
      const bool refused = std::find(idle.strategies.begin(), idle.strategies.end(), each) != idle.strategies.end();
      const std::string shown = idle.key == "units" ? "'model'" : idle.given;
      CHECK(refusal(joined(strategy(each), {sg::str("shard.", idle.key, "=", idle.given)})) ==
            (refused
                 ? sg::str("shard.", idle.key, ": ", shown, " has no effect with strategy ", each, ", which ", idle.why)
                 : ""));
    }
  }
}

TEST_CASE("a key without effect beside another key is refused, with the setting that would make it useful",
          "[graphs][config][shard][refuses]") {
  struct Refused {
    Overrides overrides;
    std::string why;
  };
  const std::vector<Refused> cases{
      {{"shard.strategy=full", "shard.grad_slots=3"},
       "shard.grad_slots: 3 has no effect with reduce last, which keeps the whole gradients of all units until the "
       "last microbatch (reduce each)"},
      {{"shard.grad_slots=1"},
       "shard.grad_slots: 1 has no effect with reduce last, which keeps the whole gradients of all units until the "
       "last microbatch (reduce each)"},
      {{"shard.strategy=full", "shard.reshard_after_forward=false", "shard.slots=1"},
       "shard.slots: 1 has no effect with reshard_after_forward false, which keeps every unit gathered in its own "
       "buffer (reshard_after_forward true, keep_between_microbatches false)"},
      {{"shard.strategy=full", "shard.keep_between_microbatches=true", "shard.slots=1"},
       "shard.slots: 1 has no effect with keep_between_microbatches true, which keeps every unit gathered in its own "
       "buffer (reshard_after_forward true, keep_between_microbatches false)"},
      {{"shard.strategy=full", "shard.reshard_after_forward=false", "shard.prefetch=none"},
       "shard.prefetch: none has no effect with reshard_after_forward false, because backward gathers no weights "
       "(reshard_after_forward true)"},
      {{"shard.delay_all_reduce=true", "shard.bucket_mb=3"},
       "shard.bucket_mb: 3 has no effect with delay_all_reduce true, which puts all gradients of a stage in one bucket "
       "(delay_all_reduce false)"},
      {{"shard.delay_all_reduce=true", "shard.first_bucket_mb=1"},
       "shard.first_bucket_mb: 1 has no effect with delay_all_reduce true, which puts all gradients of a stage in one "
       "bucket (delay_all_reduce false)"},
      {{"shard.strategy=zero1", "shard.min_params=0", "shard.bucket_mb=3"},
       "shard.bucket_mb: 3 has no effect with strategy zero1 and min_params 0, which shard all weights and leave no "
       "buckets (strategy none, or min_params above 0)"},
      {{"shard.strategy=full", "shard.min_params=0", "shard.first_bucket_mb=3"},
       "shard.first_bucket_mb: 3 has no effect with strategy full and min_params 0, which shard all weights and leave "
       "no buckets (strategy none, or min_params above 0)"},
      {{"shard.strategy=full", "shard.min_params=0", "shard.bucket_views=false"},
       "shard.bucket_views: false has no effect with strategy full and min_params 0, which shard all weights and leave "
       "no buckets (strategy none, or min_params above 0)"},
  };
  for (const Refused& each : cases) {
    CAPTURE(each.overrides);
    CHECK(refusal(each.overrides) == each.why);
  }
}

TEST_CASE("hybrid sharding without a group is refused, with the possible groups", "[graphs][config][shard][refuses]") {
  const auto refused = [](int dp, const Overrides& more = {}) {
    return refusal(
        joined({sg::str("layout.dp=", dp), sg::str("batch.global=", 2 * dp), "shard.strategy=hybrid"}, more));
  };
  const std::string missing =
      "shard.group: missing with strategy hybrid (number of ranks that share one copy of the weights; ";
  CHECK(refused(12) == missing + "a divisor of 12: 2, 3, 4, 6 or 12)");
  CHECK(refused(7) == missing + "a divisor of 7: 7)");
  CHECK(refused(1) == missing + "1)");
  CHECK(refused(12, {"shard.group=5"}) ==
        "shard.group: 5 ranks do not divide layout.dp, 12 (a divisor of 12: 2, 3, 4, 6 or 12)");
  CHECK(refused(4, {"shard.group=1"}) ==
        "shard.group: 1 with strategy hybrid shards nothing (a divisor of 4: 2 or 4; or strategy none)");
  for (const int group : {2, 3, 4, 6, 12}) CHECK(refused(12, {sg::str("shard.group=", group)}).empty());
  CHECK(refused(1, {"shard.group=1"}).empty());
}

TEST_CASE("a default value is never refused, also if the config gives it", "[graphs][config][shard]") {
  const std::string each = GENERATE("none", "zero1", "grad_op", "full", "hybrid");
  const Overrides defaults{"shard.reduce=last",
                           "shard.prefetch=backward_pre",
                           "shard.forward_prefetch=true",
                           "shard.slots=2",
                           "shard.grad_slots=2",
                           "shard.bucket_mb=25",
                           "shard.first_bucket_mb=0",
                           "shard.bucket_views=true",
                           "shard.delay_all_reduce=false",
                           "shard.units=layer",
                           "shard.min_params=1000",
                           "shard.flat=true",
                           "shard.reshard_after_forward=true",
                           "shard.reshard_group=0",
                           "shard.keep_between_microbatches=false"};
  CAPTURE(each);
  CHECK(with(joined(strategy(each), defaults)) == with(strategy(each)));
}

TEST_CASE("settings of a preset are dropped if other keys make them useless", "[graphs][config][shard]") {
  for (const sg::MemoryPreset preset : sg::all_memory_presets) {
    CAPTURE(to_string(preset));
    const std::string chosen = sg::str("memory.preset=", preset);
    CHECK(refusal({chosen}).empty());
    for (const char* each : {"none", "zero1", "grad_op", "full", "hybrid"})
      CHECK(refusal(joined({chosen}, strategy(each))).empty());
  }
  const auto shard = [](const Overrides& more) { return with(joined({"memory.preset=extreme"}, more)).plan.shard; };
  CHECK(shard({}).grad_slots == 1);
  CHECK(shard({"shard.reduce=last"}) == sg::ShardPlan{.strategy = sg::Shard::full, .slots = 1});
  CHECK(shard({"shard.keep_between_microbatches=true"}).slots == 2);
  CHECK(shard({"shard.reshard_after_forward=false"}).slots == 2);
  for (const Overrides& more : {Overrides{"shard.reduce=last"}, Overrides{"shard.reshard_after_forward=false"}}) {
    const sg::Config config = with(joined({"memory.preset=extreme"}, more));
    CHECK(sg::parse_config(sg::to_json(config)) == config);
  }
  CHECK_FALSE(refusal({"memory.preset=extreme", "shard.reduce=last", "shard.grad_slots=1"}).empty());
}
