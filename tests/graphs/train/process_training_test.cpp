// Training over several processes, which are threads here: each has its own ranks, its slice of the step, memory and
// executor. Results have the bits of loopback.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <chrono>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/models/model_folder.hpp"
#include "graphs/train/broadcast_weights.hpp"
#include "graphs/train/check_gradients.hpp"
#include "graphs/train/data_parallel.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/golden.hpp"
#include "tests/support/training/short_training.hpp"
#include "tests/support/worlds/hub_world.hpp"
#include "tests/support/worlds/thread_processes.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::Exchanges;
using sg::testing::golden;
using sg::testing::in_processes;
using sg::testing::neighbours;
using sg::testing::Trained;

namespace {

sg::Plan plan_of(int dp, int tp, int pp, const std::string& schedule = "1f1b") {
  return {.layout = {.dp = dp, .tp = tp, .pp = pp}, .pipeline = {.schedule = schedule}};
}

sg::Plan sharded(sg::Plan plan, sg::Shard strategy, int group = 0) {
  plan.shard.strategy = strategy;
  plan.shard.group    = group;
  return plan;
}

// The results of every process.
std::vector<Trained> train_in_processes(const std::string& model, const sg::Plan& plan, int steps,
                                        const std::vector<sg::RankSet>& processes, Exchanges exchanges) {
  static_cast<void>(golden(model));  // read before threads start
  std::vector<Trained> results(processes.size());
  in_processes(processes, exchanges, [&](sg::World& world) {
    results[static_cast<std::size_t>(world.peers()->process())] =
        sg::testing::train(golden(model), plan, 2, steps, world, 1);
  });
  return results;
}

void check_like_loopback(const std::string& model, const sg::Plan& plan, int steps,
                         const std::vector<sg::RankSet>& processes, Exchanges exchanges) {
  const Trained expected           = sg::testing::train(golden(model), plan, 2, steps);
  const std::vector<Trained> found = train_in_processes(model, plan, steps, processes, exchanges);
  for (const Trained& each : found) {
    CHECK(each.loss == expected.loss);
    CHECK(each.grad_norm == expected.grad_norm);
  }
  CHECK(found[0].gradients == expected.gradients);
}

}  // namespace

TEST_CASE("both golden models train over processes to the bits of loopback", "[graphs][processes][threads]") {
  struct Case {
    const char* name;
    sg::Plan plan;
  };
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const Case each =
      GENERATE(Case{"2x1x1", plan_of(2, 1, 1)}, Case{"1x2x1", plan_of(1, 2, 1)}, Case{"1x1x2", plan_of(1, 1, 2)},
               Case{"1x1x2 zb-h1", plan_of(1, 1, 2, "zb-h1")}, Case{"2x2x2", plan_of(2, 2, 2)},
               Case{"full 2", sharded(plan_of(2, 1, 1), sg::Shard::full)},
               Case{"full 4", sharded(plan_of(4, 1, 1), sg::Shard::full)});
  static int seen = 0;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(model, each.name);
  const int ranks = sg::Layout(each.plan.layout).num_ranks();
  check_like_loopback(model, each.plan, sg::testing::cases(6), neighbours(ranks, ranks), Exchanges::messages);
}

TEST_CASE("processes can have one rank or several, neighbours or not", "[graphs][processes][threads]") {
  const int processes = GENERATE(1, 2, 3, 4, 8);
  if (sg::testing::sanitized() && processes != 2 && processes != 3) return;
  CAPTURE(processes);
  const int steps = sg::testing::sanitized() ? 2 : 3;
  check_like_loopback("llama-tiny", plan_of(2, 2, 2), steps, neighbours(8, processes), Exchanges::hub);
  if (processes != 2) return;
  const std::vector<sg::RankSet> mixed{sg::RankSet({sg::Rank{0}, sg::Rank{3}, sg::Rank{5}, sg::Rank{6}}),
                                       sg::RankSet({sg::Rank{1}, sg::Rank{2}, sg::Rank{4}, sg::Rank{7}})};
  check_like_loopback("gpt2-tiny", plan_of(2, 2, 2), steps, mixed, Exchanges::messages);
}

TEST_CASE("sharding, recomputation, sequence parallelism and expanded collectives work over processes",
          "[graphs][processes][threads]") {
  const std::string what = GENERATE("zero1", "grad_op", "hybrid", "recompute", "sequence", "ring", "interleaved",
                                    "zb-v", "dualpipe-v", "auto");
  static int seen        = 2;
  if (sg::testing::left_out(seen, 4)) return;  // sanitized: "hybrid" and "interleaved"
  CAPTURE(what);
  sg::Plan plan = plan_of(4, 1, 1);
  if (what == "zero1") plan = sharded(plan, sg::Shard::zero1);
  if (what == "grad_op") plan = sharded(plan, sg::Shard::grad_op);
  if (what == "hybrid") plan = sharded(plan, sg::Shard::hybrid, 2);
  if (what == "recompute") {
    plan           = sharded(plan_of(2, 1, 2), sg::Shard::full);
    plan.recompute = sg::Recompute::full;
  }
  if (what == "sequence") {
    plan                          = plan_of(1, 2, 2);
    plan.layout.sequence_parallel = true;
  }
  if (what == "ring") plan.algorithm = sg::Algorithm::ring;
  if (what == "interleaved") {
    plan                 = plan_of(2, 1, 2, "interleaved");
    plan.pipeline.chunks = 2;
  }
  if (what == "zb-v" || what == "dualpipe-v" || what == "auto") plan = plan_of(2, 1, 2, what);
  if (what == "auto") plan.pipeline.chunks = 2;
  for (const int processes : {4, 2}) {
    if (sg::testing::sanitized() && processes == 2) continue;
    check_like_loopback("llama-tiny", plan, 3, neighbours(4, processes), Exchanges::messages);
  }
}

TEST_CASE("weights, their hash, a saved model and saved gradients are those of loopback",
          "[graphs][processes][threads]") {
  const bool shards         = GENERATE(false, true);
  const sg::Plan plan       = shards ? sharded(plan_of(4, 2, 1), sg::Shard::hybrid, 2) : plan_of(2, 2, 2);
  const sg::BatchSpec batch = {.global = 8, .micro = 1, .seq = 8};
  const sg::Model model     = sg::testing::small_llama();
  const sg::testing::TempFolder folder;
  const auto train = [&](sg::World& world, const std::string& name) {
    sg::Trainer trainer(model, plan, batch, world,
                        {.threads = 1, .step_timeout = std::chrono::minutes(5), .keep_gradients = true, .seed = 5});
    sg::set_fresh_weights(trainer.run(), 5);
    std::uint64_t hash = sg::broadcast_weights(trainer.run());
    static_cast<void>(trainer.step(sg::testing::tokens_for(batch, 0, model.vocab)));
    sg::save_gradients(trainer.run(), (folder / (name + ".safetensors")).string());
    static_cast<void>(trainer.step(sg::testing::tokens_for(batch, 1, model.vocab)));
    sg::save_model(trainer.run(), (folder / name).string());
    return hash ^ sg::check_weights(trainer.run());
  };
  sg::LoopbackWorld loopback(8);
  const std::uint64_t expected = train(loopback, "one");
  std::mutex mutex;
  std::vector<std::uint64_t> hashes;
  in_processes(neighbours(8, 4), Exchanges::messages, [&](sg::World& world) {
    const std::uint64_t hash = train(world, "many");
    const std::lock_guard lock(mutex);
    hashes.push_back(hash);
  });
  CHECK(hashes == std::vector<std::uint64_t>(4, expected));
  for (const char* file : {".safetensors", "/model.safetensors", "/config.json"}) {
    CAPTURE(file);
    CHECK(sg::testing::file_bytes((folder / (std::string("many") + file)).string()) ==
          sg::testing::file_bytes((folder / (std::string("one") + file)).string()));
  }
}

TEST_CASE("a model that cannot be saved is an error in every process, and the run can go on",
          "[graphs][processes][threads]") {
  const sg::BatchSpec batch = {.global = 2, .micro = 1, .seq = 8};
  const sg::Model model     = sg::testing::small_gpt2();
  const sg::testing::TempFolder folder;
  std::mutex mutex;
  std::vector<std::string> errors;
  std::vector<double> losses;
  in_processes(neighbours(2, 2), Exchanges::messages, [&](sg::World& world) {
    sg::Trainer trainer(model, plan_of(2, 1, 1), batch, world, {.threads = 1, .keep_gradients = true});
    const auto tokens = sg::testing::tokens_for(batch, 0, model.vocab);
    static_cast<void>(trainer.step(tokens));
    std::string error;
    try {
      sg::save_gradients(trainer.run(), (folder / "no/such/folder/x.safetensors").string());
    } catch (const sg::Error& caught) {
      error = caught.what();
    }
    const double loss = trainer.step(tokens).loss;
    const std::lock_guard lock(mutex);
    errors.push_back(error);
    losses.push_back(loss);
  });
  CHECK_THAT(errors[0], ContainsSubstring("no/such/folder"));
  CHECK(errors[0] == errors[1]);
  CHECK(losses[0] == losses[1]);
}

TEST_CASE("evaluation and generation over processes give the results of loopback, in every process",
          "[graphs][processes][threads]") {
  const sg::testing::Golden& gold = golden("gpt2-tiny");
  const sg::Plan plan             = plan_of(1, 2, 2);
  using Results                   = std::pair<double, std::vector<std::int32_t>>;
  const auto results              = [&](sg::World& world) {
    sg::BatchSpec batch = gold.batch;
    batch.micro         = 2;
    sg::Evaluator evaluator(gold.model, plan, batch, world, {.threads = 1});
    sg::set_weights(evaluator.run(), sg::ModelFolder(gold.folder));
    sg::Generator generator(gold.model, plan, 16, world, {.threads = 1});
    sg::set_weights(generator.run(), sg::ModelFolder(gold.folder));
    const double loss = evaluator.loss(gold.tokens_of(0));
    return Results(loss, generator.generate({gold.tokens.begin(), gold.tokens.begin() + 8}, 6));
  };
  sg::LoopbackWorld loopback(4);
  const Results expected = results(loopback);
  std::mutex mutex;
  std::vector<Results> found;
  in_processes(neighbours(4, 4), Exchanges::messages, [&](sg::World& world) {
    const Results here = results(world);
    const std::lock_guard lock(mutex);
    found.push_back(here);
  });
  CHECK(found == std::vector<Results>(4, expected));
}

TEST_CASE("a step that fails in one process fails in all, and the next step works", "[graphs][processes][threads]") {
  const sg::BatchSpec batch = {.global = 2, .micro = 1, .seq = 8};
  const sg::Model model     = sg::testing::small_gpt2();
  std::mutex mutex;
  std::vector<std::string> errors;
  std::vector<double> losses;
  in_processes(neighbours(2, 2), Exchanges::messages, [&](sg::World& world) {
    sg::Trainer trainer(model, plan_of(1, 1, 2), batch, world, {.threads = 1, .step_timeout = std::chrono::minutes(5)});
    auto tokens = sg::testing::tokens_for(batch, 0, model.vocab), bad = tokens;
    bad[0] = -1;  // only the first stage sees it
    std::string error;
    try {
      static_cast<void>(trainer.step(bad));
    } catch (const sg::Error& caught) {
      error = caught.what();
    }
    const double loss = trainer.step(tokens).loss;
    const std::lock_guard lock(mutex);
    errors.push_back(error);
    losses.push_back(loss);
  });
  for (const std::string& error : errors) CHECK_THAT(error, ContainsSubstring("-1"));
  CHECK(losses[0] == losses[1]);
}

TEST_CASE("a step that fails in one process after the last communication fails in all, and the next step works",
          "[graphs][processes][threads]") {
  const sg::BatchSpec batch = {.global = 2, .micro = 1, .seq = 8};
  const sg::Model model     = sg::testing::small_gpt2();
  const sg::Plan plan       = plan_of(1, 1, 2);
  const int failing         = GENERATE(0, 1);
  CAPTURE(failing);
  std::vector<std::string> errors(2);
  std::vector<double> before(2), after(2);
  in_processes(neighbours(2, 2), Exchanges::messages, [&](sg::World& world) {
    const int process  = world.peers()->process();
    sg::StepGraph step = sg::forward_step(model, plan, batch, sg::ForwardResult::loss, {.only = world.local_ranks()});
    bool fails         = false;
    step.graph.add({.name = "last", .lane = step.graph.lane(sg::Rank{process}, sg::LaneKind::compute)}, [&] {
      if (fails) throw std::runtime_error("the last node fails");
    });
    sg::StepRun run(std::move(step), world, {.threads = 1, .step_timeout = std::chrono::minutes(5)});
    sg::set_fresh_weights(run, 5);
    run.set_tokens(sg::testing::tokens_for(batch, 0, model.vocab));
    run.run();
    before[static_cast<std::size_t>(process)] = run.loss();
    fails                                     = process == failing;
    try {
      run.run();
    } catch (const sg::Error& caught) {
      errors[static_cast<std::size_t>(process)] = caught.what();
    }
    fails = false;
    run.run();
    after[static_cast<std::size_t>(process)] = run.loss();
  });
  for (const std::string& error : errors) CHECK_THAT(error, ContainsSubstring("the last node fails"));
  CHECK(before[0] == before[1]);
  CHECK(after == before);
}

TEST_CASE("a tensor that one process cannot give is an error in process 0 too, and the next one can be read",
          "[graphs][processes][threads]") {
  const sg::BatchSpec batch = {.global = 2, .micro = 1, .seq = 8};
  const sg::Model model     = sg::testing::small_gpt2();
  const int failing         = GENERATE(0, 1);
  CAPTURE(failing);
  std::vector<std::string> errors(2);
  in_processes(neighbours(2, 2), Exchanges::messages, [&](sg::World& world) {
    const auto process = static_cast<std::size_t>(world.peers()->process());
    sg::Trainer trainer(model, plan_of(1, 1, 2), batch, world, {.threads = 1});
    const sg::StepRun& run = trainer.run();
    const auto parameters  = model.parameters();
    const auto& parameter  = parameters.parameters().front();
    const auto read        = [&](std::size_t more) {
      std::vector<float> values((process == 0 ? static_cast<std::size_t>(parameter.num_elements()) : 0) + more);
      run.read_tensor(sg::StepRun::Which::value, parameter.name, std::span(values));
    };
    try {
      read(static_cast<int>(process) == failing ? 1 : 0);
    } catch (const sg::Error& caught) {
      errors[process] = caught.what();
    }
    read(0);
  });
  CHECK_THAT(errors[0], ContainsSubstring("a span of "));
  CHECK((failing == 0 ? errors[1].empty() : !errors[1].empty()));
}

TEST_CASE("a model with an element that is not finite is not saved, and all processes say so",
          "[graphs][processes][threads]") {
  const sg::BatchSpec batch = {.global = 2, .micro = 1, .seq = 8};
  const sg::Model model     = sg::testing::small_gpt2();
  const sg::testing::TempFolder folder;
  std::vector<std::string> errors(2);
  in_processes(neighbours(2, 2), Exchanges::messages, [&](sg::World& world) {
    sg::Trainer trainer(model, plan_of(1, 1, 2), batch, world, {.threads = 1});
    const auto parameters  = model.parameters();
    const std::string bad  = parameters.parameters()[parameters.parameters().size() / 2].name;
    const auto set_weights = [&](double value) {
      trainer.run().set_weights([&](const std::string& name, const sg::TensorShape&, const sg::Init&,
                                    std::span<double> values) { values[0] = name == bad ? value : 0; });
    };
    set_weights(std::numeric_limits<double>::quiet_NaN());
    try {
      sg::save_model(trainer.run(), (folder / "model").string());
    } catch (const sg::Error& caught) {
      errors[static_cast<std::size_t>(world.peers()->process())] = caught.what();
    }
    set_weights(1);
    sg::save_model(trainer.run(), (folder / "model").string());
  });
  CHECK_THAT(errors[0], ContainsSubstring("not saved: element 0"));
  CHECK(errors[0] == errors[1]);
}

TEST_CASE("a world of more ranks than the layout is refused before a step is built", "[graphs][refuses]") {
  const sg::Model model     = sg::testing::small_gpt2();
  const sg::BatchSpec batch = {.global = 2, .micro = 1, .seq = 8};
  sg::testing::Hub hub(8);
  sg::testing::HubWorld world(hub, sg::Rank{7});
  const auto refused = MessageMatches(ContainsSubstring("step: the layout has 2 ranks, but the world has 8"));
  CHECK_THROWS_MATCHES(sg::Trainer(model, plan_of(2, 1, 1), batch, world), sg::Error, refused);
  CHECK_THROWS_MATCHES(sg::Evaluator(model, plan_of(2, 1, 1), batch, world), sg::Error, refused);
  CHECK_THROWS_MATCHES(sg::Generator(model, plan_of(2, 1, 1), 8, world), sg::Error, refused);
}

TEST_CASE("a step without a way to its other processes is refused, and what needs all ranks here says so",
          "[graphs][processes][refuses]") {
  const sg::Model model     = sg::testing::small_gpt2();
  const sg::BatchSpec batch = {.global = 2, .micro = 1, .seq = 8};
  sg::testing::Hub hub(2);
  sg::testing::HubWorld world(hub, sg::Rank{0});
  CHECK_THROWS_MATCHES(sg::StepRun(sg::training_step(model, plan_of(2, 1, 1), batch), world), sg::Error,
                       MessageMatches(ContainsSubstring("StepOptions::only = world.local_ranks()")));
  CHECK_THROWS_MATCHES(sg::Trainer(model, plan_of(2, 1, 1), batch, world), sg::Error,
                       MessageMatches(ContainsSubstring("cannot exchange host data with them (World::peers)")));
  CHECK_THROWS_MATCHES(sg::Trainer(model, plan_of(4, 1, 1), {.global = 4, .micro = 1, .seq = 8}, world), sg::Error,
                       MessageMatches(ContainsSubstring("step: the layout has 4 ranks, but the world has 2")));
  CHECK_THROWS_MATCHES(sg::DataParallel(model, {.global = 2, .seq = 8}, world), sg::Error,
                       MessageMatches(ContainsSubstring("data_parallel: 1 of 2 ranks are in this process")));
  CHECK_THROWS_MATCHES(sg::check_gradients(model, world), sg::Error,
                       MessageMatches(ContainsSubstring("check_gradients: 1 of 2 ranks are in this process")));
}
