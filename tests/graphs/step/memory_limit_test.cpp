#include "graphs/step/memory_limit.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <regex>
#include <sstream>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/config/config.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/worlds/eager_world.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr const char* small = R"({"model": {"kind": "gpt2", "layers": 2, "width": 32, "heads": 4, "context": 32,
  "vocab": 64}, "data": {"synthetic": 1}, "batch": {"global": 8, "micro": 4, "seq": 32}})";

sg::Config with(const std::vector<std::string>& settings) { return sg::parse_config(small, settings); }
sg::Model model_of(const sg::Config& config) { return sg::gpt2(std::get<sg::Gpt2Spec>(config.model)); }

// The largest arena of a config's training step.
std::int64_t peak(std::vector<std::string> settings) {
  settings.push_back("memory.limit_bytes=0");
  const sg::Config config = with(settings);
  const auto plan         = sg::plan_memory(sg::training_step(model_of(config), config.plan, config.batch).graph,
                                            {.reuse = config.plan.reuse});
  std::int64_t most       = 0;
  for (const sg::ArenaPlan& arena : plan.arenas) {
    if (arena.space == sg::Space::device) most = std::max(most, arena.size_bytes);
  }
  return most;
}

// The error message of training_step for these settings; empty if it accepts them.
std::string refusal(const std::vector<std::string>& settings) {
  const sg::Config config = with(settings);
  try {
    (void)sg::training_step(model_of(config), config.plan, config.batch);
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::config);
    return error.what();
  }
  return {};
}

struct Offer {
  std::vector<std::string> settings;
  std::int64_t bytes;
};
// All changes with bytes, in the order of the message.
std::vector<Offer> offers_of(const std::string& refusal) {
  std::vector<Offer> out;
  const std::regex change(R"(([a-z_.]+=[^ ()]+(?: [a-z_.]+=[^ ()]+)*) needs ([0-9]+) \()");
  for (std::sregex_iterator found(refusal.begin(), refusal.end(), change), end; found != end; ++found) {
    out.push_back({{}, std::stoll((*found)[2])});
    std::istringstream words((*found)[1]);
    for (std::string word; words >> word;) out.back().settings.push_back(word);
  }
  return out;
}
Offer offer_of(const std::string& refusal) {
  CAPTURE(refusal);
  const std::vector<Offer> offers = offers_of(refusal);
  REQUIRE_FALSE(offers.empty());
  return offers.front();
}

std::vector<std::string> joined(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
std::string limit(std::int64_t bytes) { return sg::str("memory.limit_bytes=", bytes); }

}  // namespace

TEST_CASE("a step that needs one byte more than the limit is refused, with the rank and its roles",
          "[graphs][memory]") {
  const std::vector<std::string> layout{"layout.pp=2"};
  const std::int64_t needed = peak(layout);
  CHECK(refusal(joined(layout, {limit(needed)})).empty());
  const std::string text = refusal(joined(layout, {limit(needed - 1)}));
  CHECK_THAT(text, ContainsSubstring(sg::str(" needs ", needed, " (")) && ContainsSubstring(": parameters ") &&
                       ContainsSubstring(", gradients ") && ContainsSubstring(", optimizer ") &&
                       ContainsSubstring(", activations ") &&
                       ContainsSubstring(sg::str("; the limit is ", needed - 1, " (")));
  CHECK(text.starts_with("memory.limit_bytes: rank "));
  const sg::Config config = with(joined(layout, {limit(needed - 1)}));
  sg::LoopbackWorld world(2);
  CHECK_THROWS_WITH(sg::Trainer(model_of(config), config.plan, config.batch, world), text);
}

TEST_CASE("a step on a device that fits only without its workspaces is refused, with their bytes",
          "[graphs][memory][workspace]") {
  const std::int64_t arena     = peak({});
  const sg::Config config      = with({limit(arena)});
  const sg::Model model        = model_of(config);
  sg::Plan unlimited           = config.plan;
  unlimited.memory_limit_bytes = 0;
  const sg::StepOptions on_device{.workspaces = {.bodies = true, .part = {}}};
  const auto row = sg::memory_requirements(model, unlimited, config.batch, {.workspaces = on_device.workspaces}).at(0);
  CHECK(row.workspace_bytes > 0);
  CHECK(row.peak_bytes == arena + row.workspace_bytes);
  CHECK_FALSE(row.workspace_node.empty());

  CHECK_NOTHROW(sg::training_step(model, config.plan, config.batch));
  CHECK_THROWS_WITH(sg::training_step(model, config.plan, config.batch, on_device),
                    ContainsSubstring(sg::str("memory.limit_bytes: rank 0 needs ", row.peak_bytes, " (")) &&
                        ContainsSubstring(", workspace ") &&
                        ContainsSubstring(sg::str("; the limit is ", arena, " (")));
  sg::Plan enough           = config.plan;
  enough.memory_limit_bytes = row.peak_bytes;
  CHECK_NOTHROW(sg::training_step(model, enough, config.batch, on_device));

  // A trainer takes them from its world.
  sg::testing::EagerWorld device(1);
  CHECK_THROWS_WITH(sg::Trainer(model, config.plan, config.batch, device),
                    ContainsSubstring(sg::str("rank 0 needs ", row.peak_bytes, " (")));
  CHECK_THROWS_WITH(
      sg::check_memory_limit(std::vector{row}, model, config.plan, config.batch, {.workspaces = on_device.workspaces}),
      ContainsSubstring(", workspace "));
}

TEST_CASE("a refusal offers the first change that fits", "[graphs][memory]") {
  const std::vector<std::string> base{"model.layers=3"};
  // In the order in which training_step tries them.
  const std::vector<std::vector<std::string>> changes{{"recompute=selective"},
                                                      {"recompute=full"},
                                                      {"batch.micro=2"},
                                                      {"batch.micro=1"},
                                                      {"recompute=full", "batch.micro=2"},
                                                      {"recompute=full", "batch.micro=1"}};
  std::vector<std::int64_t> peaks;
  for (const auto& change : changes) peaks.push_back(peak(joined(base, change)));
  std::size_t offered = 0;
  for (std::size_t i = 0; i < changes.size(); ++i) {
    CAPTURE(changes[i], peaks[i]);
    // Expects the first change that needs no more than this one.
    std::size_t first = 0;
    while (peaks[first] > peaks[i]) ++first;
    const std::string text = refusal(joined(base, {limit(peaks[i])}));
    const Offer offer      = offer_of(text);
    CHECK(offer.settings == changes[first]);
    CHECK(offer.bytes == peaks[first]);
    CHECK(text.ends_with(sg::str(", or ", limit(peak(base)), ")")));
    for (const Offer& each : offers_of(text)) {
      CAPTURE(each.settings);
      CHECK(each.bytes <= peaks[i]);
      CHECK(each.bytes == peak(joined(base, each.settings)));
      CHECK(refusal(joined(joined(base, {limit(peaks[i])}), each.settings)).empty());
    }
    offered += first == i;
  }
  CHECK(offered >= 4);
  // Offload is the next way to fit.
  const std::int64_t least = *std::min_element(peaks.begin(), peaks.end());
  CHECK(offer_of(refusal(joined(base, {limit(least - 1)}))).settings.front() == "offload.optimizer=true");
  const std::string never = refusal(joined(base, {limit(1000)}));
  CHECK_THAT(never, ContainsSubstring(sg::str("(", limit(peak(base)), "; of the tried settings ")) &&
                        ContainsSubstring(" needs the least, ") &&
                        ContainsSubstring("; other ways: a larger layout.tp or layout.pp, a shorter batch.seq, a "
                                          "smaller model)"));
}

TEST_CASE("a setting that the config already has is not offered", "[graphs][memory]") {
  const std::vector<std::string> free{"layout.dp=2", "layout.pp=2", "memory.reuse=free"};
  const std::int64_t loose = peak(free), tight = peak(joined(free, {"memory.reuse=tight"}));
  REQUIRE(tight < loose);
  CHECK(offer_of(refusal(joined(free, {limit(tight)}))).settings == std::vector<std::string>{"memory.reuse=tight"});
  CHECK(offer_of(refusal(joined(free, {limit(tight - 1)}))).settings.front() == "memory.reuse=tight");
  const std::vector<std::string> full{"recompute=full",      "batch.micro=1",      "offload.optimizer=true",
                                      "offload.params=true", "offload.grads=true", "offload.activations=true"};
  CHECK_THAT(refusal(joined(full, {limit(peak(full) - 1)})),
             ContainsSubstring(sg::str("(", limit(peak(full)), "; no tried setting needs less; other ways: ")));
}

TEST_CASE("if recomputation and small microbatches are not enough, sharding is offered, least first",
          "[graphs][memory]") {
  const std::vector<std::string> base{"model.layers=8", "layout.dp=4", "batch.micro=1", "recompute=full"};
  const auto offered = [&](std::int64_t bytes) { return offer_of(refusal(joined(base, {limit(bytes)}))).settings; };
  const std::int64_t zero1 = peak(joined(base, {"shard.strategy=zero1"})),
                     full  = peak(joined(base, {"shard.strategy=full"})),
                     each  = peak(joined(base, {"shard.strategy=full", "shard.reduce=each"}));
  REQUIRE(zero1 < peak(base));
  REQUIRE(full < zero1);
  CHECK(offered(zero1) == std::vector<std::string>{"shard.strategy=zero1"});
  CHECK(offered(full) == std::vector<std::string>{"shard.strategy=full"});
  REQUIRE(each < full);
  CHECK(offered(each) == std::vector<std::string>{"shard.strategy=full", "shard.reduce=each"});
}

TEST_CASE("a change that the schedule does not allow is not offered", "[graphs][memory]") {
  // Interleaved needs a multiple of 2 microbatches: 2 of 6 sequences or 4 of 3, but not 3 of 4.
  const std::vector<std::string> base{"batch.global=12",
                                      "batch.micro=6",
                                      "layout.pp=2",
                                      "model.layers=4",
                                      "pipeline={\"schedule\": \"interleaved\", \"chunks\": 2}",
                                      "recompute=full"};
  const std::int64_t as_is = peak(base);
  const Offer offer        = offer_of(refusal(joined(base, {limit(as_is - 1)})));
  CHECK(offer.settings == std::vector<std::string>{"batch.micro=3"});
}

TEST_CASE("recomputation is not offered for an evaluation", "[graphs][memory]") {
  const sg::Config config = with({});
  const sg::Model model   = model_of(config);
  const auto peak_of      = [&](int micro) {
    sg::BatchSpec batch = config.batch;
    batch.micro         = micro;
    return sg::plan_memory(sg::forward_step(model, {}, batch).graph).arena(sg::Rank{0}).size_bytes;
  };
  CHECK_NOTHROW(sg::forward_step(model, {.memory_limit_bytes = peak_of(4)}, config.batch));
  CHECK_THROWS_WITH(sg::forward_step(model, {.memory_limit_bytes = peak_of(4) - 1}, config.batch),
                    ContainsSubstring(sg::str("(batch.micro=2 needs ", peak_of(2), " (")));
  CHECK_THROWS_WITH(sg::forward_step(model, {.memory_limit_bytes = 1000}, config.batch),
                    ContainsSubstring("offload.params=true batch.micro=1 needs the least, ") &&
                        ContainsSubstring("; other ways: a larger layout.tp"));
}

TEST_CASE("memory requirements by rank are checked against the limit", "[graphs][memory]") {
  sg::Config config  = with({"layout.dp=2", "layout.pp=2", "model.layers=4"});
  const auto model   = model_of(config);
  const auto peak_of = [&](sg::Recompute kind) {
    sg::Plan plan  = config.plan;
    plan.recompute = kind;
    return sg::largest(sg::memory_requirements(model, plan, config.batch)).peak_bytes;
  };
  const auto rows                = sg::memory_requirements(model, config.plan, config.batch);
  config.plan.memory_limit_bytes = sg::largest(rows).peak_bytes;
  CHECK_NOTHROW(sg::check_memory_limit(rows, model, config.plan, config.batch));
  config.plan.memory_limit_bytes = peak_of(sg::Recompute::full);
  CHECK_THROWS_WITH(sg::check_memory_limit(rows, model, config.plan, config.batch),
                    ContainsSubstring(sg::str("(recompute=full needs ", config.plan.memory_limit_bytes, " (")));
  // Computing the requirements does not check the limit.
  CHECK(sg::memory_requirements(model, config.plan, config.batch).size() == rows.size());
}

TEST_CASE("what is offered for one rank fits all ranks", "[graphs][memory]") {
  sg::Config config = with({"layout.pp=2", "model.layers=4", "recompute=full"});
  const auto model  = model_of(config);
  const auto rows   = sg::memory_requirements(model, config.plan, config.batch);
  REQUIRE(rows.size() == 2);
  const auto& small = rows[rows[0].peak_bytes < rows[1].peak_bytes ? 0 : 1];
  REQUIRE(small.peak_bytes < sg::largest(rows).peak_bytes);
  config.plan.memory_limit_bytes = small.peak_bytes - 1;
  try {
    sg::check_memory_limit(std::vector{small}, model, config.plan, config.batch, {.rank = small.rank});
    FAIL("the rank was not refused");
  } catch (const sg::Error& error) {
    const std::string text = error.what();
    CAPTURE(text);
    CHECK(text.starts_with(sg::str("memory.limit_bytes: rank ", small.rank, " needs ")));
    CHECK(text.ends_with(sg::str(limit(sg::largest(rows).peak_bytes), ")")));
    for (const Offer& offer : offers_of(text)) {
      const sg::Config changed = with(joined({"layout.pp=2", "model.layers=4", "recompute=full"}, offer.settings));
      CHECK(sg::largest(sg::memory_requirements(model, changed.plan, changed.batch)).peak_bytes == offer.bytes);
      CHECK(offer.bytes <= config.plan.memory_limit_bytes);
    }
  }
}

TEST_CASE("a preset sets the keys that the config does not give", "[graphs][memory][config]") {
  const auto recompute = [](const std::vector<std::string>& settings) { return with(settings).plan.recompute; };
  CHECK(with({}).preset == sg::MemoryPreset::basic);
  CHECK(recompute({"memory.preset=basic"}) == sg::Recompute::none);
  CHECK(recompute({"memory.preset=standard"}) == sg::Recompute::selective);
  CHECK(recompute({"memory.preset=aggressive"}) == sg::Recompute::full);
  CHECK(recompute({"memory.preset=extreme"}) == sg::Recompute::full);
  CHECK(recompute({"recompute=none", "memory.preset=extreme"}) == sg::Recompute::none);
  CHECK(recompute({"memory.preset=standard", "recompute=full"}) == sg::Recompute::full);
  CHECK(with({"memory.preset=extreme"}).preset == sg::MemoryPreset::extreme);
  const auto shard = [](const std::vector<std::string>& settings) { return with(settings).plan.shard; };
  CHECK(shard({"memory.preset=standard"}).strategy == sg::Shard::zero1);
  CHECK(shard({"memory.preset=aggressive"}) == sg::ShardPlan{.strategy = sg::Shard::full});
  CHECK(shard({"memory.preset=extreme"}).reduce == sg::ReduceWhen::each);
  CHECK(shard({"memory.preset=extreme", "shard.slots=3"}).slots == 3);
  CHECK(shard({"memory.preset=extreme", "shard.strategy=none"}) == sg::ShardPlan{});
  CHECK(sg::with_preset({.reuse = sg::Reuse::free}, sg::MemoryPreset::basic) == sg::Plan{.reuse = sg::Reuse::free});
  for (const sg::MemoryPreset preset : sg::all_memory_presets) {
    const sg::Config config = with({sg::str("memory.preset=", preset), "memory.limit_bytes=123456789012"});
    CHECK(config.plan.memory_limit_bytes == 123'456'789'012);
    CHECK(sg::parse_config(sg::to_json(config)) == config);
  }
  // Each preset needs no more memory than the one before it.
  for (const char* layout : {"layout.dp=1", "layout.dp=2"}) {
    std::int64_t before = peak({"memory.preset=basic", layout});
    for (const char* preset : {"standard", "aggressive", "extreme"}) {
      const std::int64_t now = peak({sg::str("memory.preset=", preset), layout});
      CAPTURE(layout, preset);
      CHECK(now <= before);
      before = now;
    }
  }
}
