// Keys of a config's `shard` that others leave nothing to do.
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

// What a config is refused with; empty where it is not.
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

// A strategy as a config says it.
Overrides strategy(const std::string& name) {
  if (name == "hybrid") return {"shard.strategy=hybrid", "shard.group=2"};
  return {"shard.strategy=" + name};
}

struct Idle {
  std::string key, given;
  std::vector<std::string> strategies;  // with which it does nothing
  std::string why;
};

}  // namespace

TEST_CASE("a key that does nothing with a strategy is refused with those that have it",
          "[graphs][config][shard][refuses]") {
  const std::string cut = "cuts no weights (zero1, grad_op, full or hybrid)",
                    use = "gathers no weights for their use (full or hybrid)",
                    all = "reduces gradients unit by unit (strategy none, where all are in buckets)";
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
            (refused ? sg::str("shard.", idle.key, ": ", shown, " with strategy ", each, ", which ", idle.why) : ""));
    }
  }
}

TEST_CASE("a key that does nothing with another key is refused with what that one would have to be",
          "[graphs][config][shard][refuses]") {
  struct Refused {
    Overrides overrides;
    std::string why;
  };
  const std::vector<Refused> cases{
      {{"shard.strategy=full", "shard.grad_slots=3"},
       "shard.grad_slots: 3 with reduce last, where gradients of all units wait whole for the end (each)"},
      {{"shard.grad_slots=1"},
       "shard.grad_slots: 1 with reduce last, where gradients of all units wait whole for the end (each)"},
      {{"shard.strategy=full", "shard.reshard_after_forward=false", "shard.slots=1"},
       "shard.slots: 1 with reshard_after_forward false, where each unit has a place of its own (reshard_after_forward "
       "true, keep_between_microbatches false)"},
      {{"shard.strategy=full", "shard.keep_between_microbatches=true", "shard.slots=1"},
       "shard.slots: 1 with keep_between_microbatches true, where each unit has a place of its own "
       "(reshard_after_forward true, keep_between_microbatches false)"},
      {{"shard.strategy=full", "shard.reshard_after_forward=false", "shard.prefetch=none"},
       "shard.prefetch: none with reshard_after_forward false, where backward gathers nothing (true)"},
      {{"shard.delay_all_reduce=true", "shard.bucket_mb=3"},
       "shard.bucket_mb: 3 with delay_all_reduce, which makes one bucket of a stage (delay_all_reduce false)"},
      {{"shard.delay_all_reduce=true", "shard.first_bucket_mb=1"},
       "shard.first_bucket_mb: 1 with delay_all_reduce, which makes one bucket of a stage (delay_all_reduce false)"},
      {{"shard.strategy=zero1", "shard.min_params=0", "shard.bucket_mb=3"},
       "shard.bucket_mb: 3 with strategy zero1, which with min_params 0 cuts all weights and has no buckets (strategy "
       "none, or min_params of more than 0)"},
      {{"shard.strategy=full", "shard.min_params=0", "shard.first_bucket_mb=3"},
       "shard.first_bucket_mb: 3 with strategy full, which with min_params 0 cuts all weights and has no buckets "
       "(strategy none, or min_params of more than 0)"},
      {{"shard.strategy=full", "shard.min_params=0", "shard.bucket_views=false"},
       "shard.bucket_views: false with strategy full, which with min_params 0 cuts all weights and has no buckets "
       "(strategy none, or min_params of more than 0)"},
  };
  for (const Refused& each : cases) {
    CAPTURE(each.overrides);
    CHECK(refusal(each.overrides) == each.why);
  }
}

TEST_CASE("hybrid sharding without a group is refused with the groups that would do",
          "[graphs][config][shard][refuses]") {
  const auto refused = [](int dp, const Overrides& more = {}) {
    return refusal(
        joined({sg::str("layout.dp=", dp), sg::str("batch.global=", 2 * dp), "shard.strategy=hybrid"}, more));
  };
  const std::string missing =
      "shard.group: missing with strategy hybrid: how many neighbours keep a whole between them ";
  CHECK(refused(12) == missing + "(a divisor of 12: 2, 3, 4, 6 or 12)");
  CHECK(refused(7) == missing + "(a divisor of 7: 7)");
  CHECK(refused(1) == missing + "(1)");
  CHECK(refused(12, {"shard.group=5"}) ==
        "shard.group: 5 ranks do not divide layout.dp, 12 (a divisor of 12: 2, 3, 4, 6 or 12)");
  CHECK(refused(4, {"shard.group=1"}) ==
        "shard.group: 1 with strategy hybrid, where each rank keeps a whole (a divisor of 4: 2 or 4; or strategy "
        "none)");
  for (const int group : {2, 3, 4, 6, 12}) CHECK(refused(12, {sg::str("shard.group=", group)}).empty());
  CHECK(refused(1, {"shard.group=1"}).empty());
}

TEST_CASE("a default is never refused, whoever writes it down", "[graphs][config][shard]") {
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

TEST_CASE("what a preset chose goes with the way that it was for", "[graphs][config][shard]") {
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
