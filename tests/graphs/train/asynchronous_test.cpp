// Training with ranks that do not wait for each other.
#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <numeric>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/step/with_bodies.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/checkpointed.hpp"
#include "tests/support/training/short_training.hpp"
#include "tests/support/worlds/thread_processes.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::hash_weights;
using sg::testing::small_gpt2;
using sg::testing::small_llama;
using sg::testing::Tokens;

namespace {

sg::Plan plan_of(int dp, int bound, sg::OptimizerPlan optimizer = {}) {
  return {.layout    = {.dp = dp},
          .optimizer = std::move(optimizer),
          .update    = {.mode = sg::UpdateWhen::asynchronous, .max_staleness = bound}};
}
sg::Plan synchronous(sg::Plan plan) {
  plan.update = {};
  return plan;
}
sg::BatchSpec batch_of(int dp, int microbatches = 1) { return {.global = dp * microbatches, .micro = 1, .seq = 8}; }

std::vector<sg::Batch> batches_for(const sg::BatchSpec& batch, int first, int count, std::int64_t vocab = 64,
                                   Tokens kind = Tokens::chain) {
  std::vector<sg::Batch> made;
  for (int step = first; step < first + count; ++step) {
    const std::vector<std::int32_t> tokens = sg::testing::tokens_for(batch, step, vocab, kind);
    made.push_back({.inputs = {tokens.begin(), tokens.end() - 1}, .targets = {tokens.begin() + 1, tokens.end()}});
  }
  return made;
}

// All bytes of a rank's weights, and of weights that other ranks' share; of moments and masters.
std::vector<std::byte> bytes_of(const sg::StepRun& run, sg::StoredRange sg::StepWeight::*which) {
  std::vector<std::byte> found;
  for (const sg::StepWeight& weight : run.step().ranks.front().weights) {
    if ((weight.*which).empty()) continue;
    const auto bytes = run.memory().bytes((weight.*which).buffer);
    found.insert(found.end(), bytes.begin(), bytes.end());
  }
  return found;
}

// The results of a synchronous run of one rank, and of an asynchronous one with a window of `window` steps.
void check_one_rank(const sg::Model& model, const sg::Plan& plan, int steps, int window) {
  const sg::BatchSpec batch            = batch_of(1, 2);
  const std::vector<sg::Batch> batches = batches_for(batch, 0, steps, model.vocab, Tokens::noise);
  sg::LoopbackWorld world(1);
  sg::Trainer plain(model, synchronous(plan), batch, world, {.threads = 2, .seed = 7});
  sg::Trainer windows(model, plan, batch, world, {.threads = 2, .seed = 7, .window = window});
  const std::vector<sg::StepResult> expected = plain.steps(batches), found = windows.steps(batches);
  REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    CHECK(found[i].loss == expected[i].loss);
    CHECK(found[i].skipped == expected[i].skipped);
    if (!expected[i].skipped) CHECK(found[i].grad_norm == expected[i].grad_norm);
    CHECK(found[i].rate == expected[i].rate);
    CHECK(found[i].loss_scale == expected[i].loss_scale);
    CHECK(found[i].staleness->largest == 0);
    CHECK_FALSE(expected[i].staleness);
  }
  CHECK(windows.num_updates() == plain.num_updates());
  CHECK(windows.num_steps() == plain.num_steps());
  CHECK(hash_weights(windows.run()) == hash_weights(plain.run()));
  for (const auto which : {&sg::StepWeight::first, &sg::StepWeight::second, &sg::StepWeight::master})
    CHECK(bytes_of(windows.run(), which) == bytes_of(plain.run(), which));
}

}  // namespace

TEST_CASE("one asynchronous rank has the bits of a synchronous one", "[graphs][asynchronous]") {
  const int window = GENERATE(1, 3, 5);
  CAPTURE(window);
  if (sg::testing::sanitized() && window != 3) return;
  const sg::OptimizerPlan groups{.schedule = {.kind = sg::RateKind::cosine, .warmup = 2, .steps = 9},
                                 .groups   = {{.match = "*.1.*.weight", .lr = 3e-3, .weight_decay = 0.0}}};
  check_one_rank(small_gpt2(0.1), plan_of(1, 2, groups), 5, window);
  check_one_rank(small_llama(), plan_of(1, 0, {.kind = sg::OptimizerKind::sgd, .lr = 0.1, .clip = 0}), 5, window);
  sg::Plan bf16        = plan_of(1, 1);
  bf16.precision.param = sg::DType::bf16;
  bf16.recompute       = sg::Recompute::full;
  bf16.precision.norm  = sg::DType::f32;
  check_one_rank(small_llama(), bf16, 5, window);
  sg::Plan f16             = plan_of(1, 1);
  f16.precision.param      = sg::DType::f16;
  f16.precision.loss_scale = {.value = 0x1p22, .growth_steps = 2};
  check_one_rank(small_gpt2(), f16, 7, window);
  sg::Plan f64        = plan_of(1, 1);
  f64.precision.param = sg::DType::f64;
  check_one_rank(small_gpt2(), f64, 3, window);
}

namespace {

// A run of several ranks, and the order in which they took and gave versions.
struct Event {
  int rank = 0, step = 0;
  std::int64_t taken = 0, given = 0;
};

std::vector<Event> events_of(const sg::StepRun& run) {
  std::vector<Event> found;
  for (std::size_t step = 0; step < run.step().window.size(); ++step) {
    for (const sg::StepRank& rank : run.step().window[step]) {
      std::vector<std::int64_t> taken(2);
      run.memory().read(rank.taken, std::span(taken));
      found.push_back({.rank  = rank.coord.dp,
                       .step  = static_cast<int>(step),
                       .taken = taken[0],
                       .given = run.memory().first<std::int64_t>(rank.given)});
    }
  }
  std::ranges::sort(found, {}, &Event::given);
  return found;
}

// A sequential program made of synchronous pieces: the gradient of a share of the batch with an older version of the
// weights, then its update of the newest version.
class Replay {
 public:
  Replay(const sg::Model& model, const sg::Plan& plan, const sg::BatchSpec& batch)
      : dp_(plan.layout.dp), batch_(batch), world_(1), run_(step_of(model, plan, batch), world_) {
    sg::set_fresh_weights(run_, 7);
    versions_.push_back(weights());
  }

  void apply(const Event& event, const sg::Batch& batch, double rate) {
    const auto share         = batch.inputs.size() / static_cast<std::size_t>(dp_);
    const auto begin         = share * static_cast<std::size_t>(event.rank);
    const sg::StepRank& rank = run_.step().ranks.front();
    set_weights(versions_.at(static_cast<std::size_t>(event.taken)));
    run_.set_tokens(std::span(batch.inputs).subspan(begin, share), std::span(batch.targets).subspan(begin, share));
    run_.memory().set_first<std::int64_t>(rank.step_number, event.step + 1);
    run_.run();
    set_weights(versions_.back());
    run_.memory().set_first(rank.rate, rate / dp_);
    run_.memory().set_first<std::int64_t>(rank.num_updates, event.given);
    losses_[event.step] += run_.loss() / dp_;
    run_.flush();
    versions_.push_back(weights());
  }
  [[nodiscard]] const std::vector<std::byte>& newest() const { return versions_.back(); }
  [[nodiscard]] double loss(int step) const { return losses_.at(step); }

 private:
  static sg::StepGraph step_of(const sg::Model& model, sg::Plan plan, sg::BatchSpec batch) {
    batch.global /= plan.layout.dp;
    plan.layout.dp = 1;
    return sg::training_step(model, synchronous(plan), batch, {.update_first = true, .seed = 7});
  }
  [[nodiscard]] std::vector<std::byte> weights() const { return bytes_of(run_, &sg::StepWeight::value); }
  void set_weights(const std::vector<std::byte>& bytes) {
    auto from = bytes.begin();
    for (const sg::StepWeight& weight : run_.step().ranks.front().weights) {
      const auto to = run_.memory().bytes(weight.value.buffer);
      std::copy_n(from, to.size(), to.begin());
      from += static_cast<std::ptrdiff_t>(to.size());
    }
  }
  int dp_;
  sg::BatchSpec batch_;
  sg::LoopbackWorld world_;
  sg::StepRun run_;
  std::vector<std::vector<std::byte>> versions_;
  std::map<int, double> losses_;
};

}  // namespace

TEST_CASE("an asynchronous window is the sequential program that takes and gives in the order of arrival",
          "[graphs][asynchronous]") {
  const int dp = GENERATE(2, 4), bound = GENERATE(0, 2), steps = sg::testing::sanitized() ? 5 : 8;
  CAPTURE(dp, bound);
  if (sg::testing::sanitized() && (dp != 4 || bound != 2)) return;
  const sg::Model model                = small_gpt2();
  const sg::Plan plan                  = plan_of(dp, bound, {.lr = 2e-3});
  const sg::BatchSpec batch            = batch_of(dp, 2);
  const std::vector<sg::Batch> batches = batches_for(batch, 0, steps);
  sg::LoopbackWorld world(dp);
  sg::Trainer trainer(model, plan, batch, world, {.threads = 3, .seed = 7, .window = steps});
  const std::vector<sg::StepResult> results = trainer.steps(batches);
  Replay replay(model, plan, batch);
  std::int64_t version = 0;
  for (const Event& event : events_of(trainer.run())) {
    CHECK(event.given == ++version);  // each gradient makes the next version
    CHECK(event.taken < event.given);
    replay.apply(event, batches[static_cast<std::size_t>(event.step)], 2e-3);
  }
  CHECK(version == dp * steps);
  CHECK(trainer.num_updates() == version);
  CHECK(bytes_of(trainer.run(), &sg::StepWeight::value) == replay.newest());
  static_cast<void>(hash_weights(trainer.run()));  // throws if a rank has other weights
  for (int step = 0; step < steps; ++step) {
    const sg::StepResult& result = results[static_cast<std::size_t>(step)];
    CHECK(std::abs(result.loss - replay.loss(step)) < 1e-12);
    CHECK(result.staleness->largest <= bound);
    CHECK(result.staleness->mean <= static_cast<double>(result.staleness->largest));
    CHECK(result.staleness->num_dropped == 0);
  }
}

TEST_CASE("over 1,000 steps of 8 ranks no staleness is beyond the bound, and the loss falls",
          "[graphs][asynchronous]") {
  const int dp = 8, bound = 3, window = 50, steps = sg::testing::cases(1000 / window) * window;
  const sg::Model model     = sg::gpt2({.layers = 1, .width = 8, .heads = 2, .context = 8, .vocab = 16});
  const sg::BatchSpec batch = batch_of(dp);
  sg::LoopbackWorld world(dp);
  sg::Trainer trainer(model, plan_of(dp, bound, {.lr = 5e-3}), batch, world,
                      {.threads = 4, .seed = 7, .window = window});
  std::vector<sg::StepResult> results;
  std::int64_t largest = 0;
  for (int done = 0; done < steps; done += window) {
    for (const sg::StepResult& result : trainer.steps(batches_for(batch, done, window, 16))) results.push_back(result);
    std::vector<std::int64_t> taken(2);
    for (const sg::StepRanks& step : trainer.run().step().window) {
      for (const sg::StepRank& rank : step) {
        trainer.run().memory().read(rank.taken, std::span(taken));
        CHECK(taken[1] >= 0);
        largest = std::max(largest, taken[1]);
      }
    }
  }
  CHECK(largest <= bound);
  CHECK(trainer.num_updates() == std::int64_t{dp} * steps);
  CHECK(trainer.num_steps() == steps);
  const auto mean = [](auto first, auto last) {
    return std::accumulate(first, last, 0.0, [](double sum, const auto& each) { return sum + each.loss; }) /
           static_cast<double>(last - first);
  };
  const double falls = steps == 1000 ? 0.8 : 0.95;
  CHECK(mean(results.end() - window, results.end()) < falls * mean(results.begin(), results.begin() + 10));
  for (const sg::StepResult& result : results) CHECK(result.staleness->largest <= bound);
}

TEST_CASE("asynchronous ranks train in bf16 and f16, and an overflow drops the gradient of its own rank",
          "[graphs][asynchronous][precision]") {
  const sg::DType type = GENERATE(sg::DType::bf16, sg::DType::f16);
  if (sg::testing::sanitized() && type == sg::DType::bf16) return;  // the test of evaluators below trains in bf16
  CAPTURE(to_string(type));
  sg::Plan plan        = plan_of(2, 1, {.lr = 3e-3});
  plan.precision.param = type;
  const bool scales    = type == sg::DType::f16;
  if (scales) plan.precision.loss_scale = {.value = 0x1p30, .growth_steps = 1000};
  const sg::BatchSpec batch = batch_of(2, 2);
  sg::LoopbackWorld world(2);
  sg::Trainer trainer(small_gpt2(), plan, batch, world, {.threads = 2, .seed = 7, .window = 20});
  const int steps                           = sg::testing::sanitized() ? 40 : 60;
  const std::vector<sg::StepResult> results = trainer.steps(batches_for(batch, 0, steps));
  std::int64_t dropped                      = 0;
  for (const sg::StepResult& result : results) {
    dropped += result.staleness->num_dropped;
    CHECK(std::isfinite(result.loss));
    CHECK((std::isfinite(result.grad_norm) || result.skipped));
  }
  CHECK(trainer.num_updates() + dropped == 2 * steps);
  CHECK((dropped > 0) == scales);
  CHECK(results.back().loss < results.front().loss);
  if (scales) CHECK(*results.back().loss_scale < 0x1p30);
  static_cast<void>(hash_weights(trainer.run()));  // masters round to the values of all ranks
}

TEST_CASE("the steps since the loss scale changed are counted as in other modes", "[graphs][asynchronous][precision]") {
  sg::Plan plan             = plan_of(2, 1);
  plan.precision.param      = sg::DType::f16;
  plan.precision.loss_scale = {.scaling = sg::Scaling::dynamic, .value = 8, .growth_steps = 6};
  const sg::BatchSpec batch = batch_of(2);
  sg::LoopbackWorld world(2);
  sg::Trainer trainer(small_gpt2(), plan, batch, world, {.threads = 2, .seed = 7, .window = 3});
  const sg::StepRank& rank = trainer.run().step().ranks.front();
  static_cast<void>(trainer.steps(batches_for(batch, 0, 5)));  // windows of 3 and 2 steps
  CHECK(trainer.run().memory().first<std::int64_t>(rank.good_steps) == 5);
  CHECK(trainer.run().memory().first<double>(rank.loss_scale) == 8);
  static_cast<void>(trainer.steps(batches_for(batch, 5, 1)));
  CHECK(trainer.run().memory().first<std::int64_t>(rank.good_steps) == 0);
  CHECK(trainer.run().memory().first<double>(rank.loss_scale) == 16);
}

TEST_CASE("a gradient of targets that do not count is dropped, and shares count by their targets",
          "[graphs][asynchronous]") {
  const sg::BatchSpec batch = batch_of(2);
  sg::LoopbackWorld world(2), one(1);
  sg::Trainer trainer(small_gpt2(), plan_of(2, 0), batch, world, {.threads = 2, .seed = 7});
  sg::Trainer plain(small_gpt2(), {}, batch, one, {.threads = 2, .seed = 7});
  sg::Batch given = batches_for(batch, 0, 1).front();
  std::fill(given.targets.begin(), given.targets.begin() + 8, -1);  // of rank 0
  given.targets.back()        = -1;
  const sg::StepResult result = trainer.step(given);
  CHECK(std::abs(result.loss - plain.step(given).loss) < 1e-6);
  CHECK(result.staleness->num_dropped == 1);
  CHECK(trainer.num_updates() == 1);
}

TEST_CASE("evaluators and checkpoints of an asynchronous run are those of its last version",
          "[graphs][asynchronous][checkpoint]") {
  const sg::Model model = small_gpt2();
  sg::Plan plan         = plan_of(3, 1);
  plan.precision.param  = GENERATE(sg::DType::f32, sg::DType::bf16);
  if (sg::testing::sanitized() && plan.precision.param == sg::DType::f32) return;
  const sg::BatchSpec batch = batch_of(3, 2);
  const sg::testing::TempFolder folder;
  sg::LoopbackWorld world(3), one(1);
  sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .seed = 7, .window = 4});
  static_cast<void>(trainer.steps(batches_for(batch, 0, 6)));
  sg::Evaluator evaluator(trainer, batch);
  const double loss           = evaluator.loss(batches_for(batch, 50, 1).front());
  const std::string path      = sg::testing::save_checkpoint(trainer, folder.path());
  const std::uint64_t weights = hash_weights(trainer.run());

  const auto loaded = [&](const sg::Plan& by, sg::World& in) {
    sg::Trainer resumed(model, by, batch, in, {.threads = 2, .seed = 9, .window = 4});
    const sg::CheckpointState state = sg::load_checkpoint(resumed, path);
    CHECK(state.steps == 6);
    CHECK(resumed.num_updates() == 3 * 6);
    CHECK(hash_weights(resumed.run()) == weights);
    sg::Evaluator again(resumed, batch);
    CHECK(std::abs(again.loss(batches_for(batch, 50, 1).front()) - loss) < 1e-5);
    for (const sg::StepResult& result : resumed.steps(batches_for(batch, 6, 2))) CHECK(std::isfinite(result.loss));
    CHECK(resumed.num_steps() == 8);
  };
  loaded(plan, world);
  sg::Plan alone = synchronous(plan);
  loaded(alone, world);
  alone.layout.dp = 1;
  loaded(alone, one);
  // The states of both are the same.
  sg::Trainer resumed(model, plan, batch, world, {.threads = 2, .seed = 9, .window = 4});
  static_cast<void>(sg::load_checkpoint(resumed, path));
  const sg::testing::TempFolder second;
  const std::string again = sg::testing::save_checkpoint(resumed, second.path());
  CHECK(sg::testing::states_of(sg::CheckpointReader(again)) == sg::testing::states_of(sg::CheckpointReader(path)));
}

TEST_CASE("the norm of the last step is that of its result, in windows of any length and after a change of the mode",
          "[graphs][asynchronous]") {
  const sg::BatchSpec batch = batch_of(2);
  sg::LoopbackWorld world(2);
  sg::Trainer trainer(small_gpt2(), plan_of(2, 1), batch, world, {.threads = 2, .seed = 7, .window = 3});
  CHECK(std::isnan(trainer.last_grad_norm()));
  for (const int length : {3, 2, 1, 5}) {
    CAPTURE(length);
    const std::vector<sg::StepResult> results = trainer.steps(batches_for(batch, 0, length));
    CHECK(trainer.last_grad_norm() == results.back().grad_norm);
  }
  sg::Trainer plain(small_gpt2(), synchronous(plan_of(2, 0)), batch, world, {.threads = 2, .seed = 7});
  CHECK(std::isnan(plain.last_grad_norm()));
  const double norm = plain.step(batches_for(batch, 0, 1).front()).grad_norm;
  CHECK(plain.last_grad_norm() == norm);
  static_cast<void>(plain.set_update_mode({.mode = sg::UpdateWhen::stale, .max_staleness = 1}));
  CHECK(plain.last_grad_norm() == norm);
  const sg::StepResult late = plain.step(batches_for(batch, 1, 1).front());
  CHECK(late.norm_is_late);
  CHECK(std::isfinite(plain.last_grad_norm()));
  CHECK(plain.last_grad_norm() != norm);
}

TEST_CASE("one asynchronous rank goes on from a checkpoint as if nothing had happened",
          "[graphs][asynchronous][checkpoint]") {
  const sg::Model model     = small_gpt2(0.1);
  const sg::BatchSpec batch = batch_of(1, 2);
  const sg::testing::TempFolder folder;
  sg::LoopbackWorld world(1);
  sg::Trainer whole(model, plan_of(1, 1), batch, world, {.threads = 2, .seed = 7, .window = 3});
  sg::Trainer first(model, plan_of(1, 1), batch, world, {.threads = 2, .seed = 7, .window = 3});
  static_cast<void>(whole.steps(batches_for(batch, 0, 9)));
  static_cast<void>(first.steps(batches_for(batch, 0, 4)));
  const std::string path = sg::testing::save_checkpoint(first, folder.path());
  sg::Trainer second(model, plan_of(1, 1), batch, world, {.threads = 2, .seed = 7, .window = 5});
  static_cast<void>(sg::load_checkpoint(second, path));
  static_cast<void>(second.steps(batches_for(batch, 4, 5)));
  CHECK(hash_weights(second.run()) == hash_weights(whole.run()));
}

namespace {

// Rank 1 cannot give the gradient of its second step while `fails`.
sg::Graph failing(const sg::Graph& graph, const std::shared_ptr<std::atomic<bool>>& fails) {
  return sg::with_bodies(graph, [&](sg::Node node, const sg::Body& body) {
    if (!graph.name(node).starts_with("give gradient, make next version s1") || graph.rank(node) != sg::Rank{1})
      return body;
    return sg::Body([fails, body](const sg::Context& context) {
      if (*fails) throw sg::Error(sg::ErrorKind::run, "planted");
      sg::call_body(body, context);
    });
  });
}

}  // namespace

TEST_CASE("after a window that has failed nothing goes on until weights are set or loaded",
          "[graphs][asynchronous][errors]") {
  const std::size_t length = GENERATE(4, 3);  // the trainer's window, and a shorter one
  if (sg::testing::sanitized() && length == 4) return;
  CAPTURE(length);
  const sg::BatchSpec batch            = batch_of(3);
  const std::vector<sg::Batch> batches = batches_for(batch, 0, 4);
  const auto fails                     = std::make_shared<std::atomic<bool>>(false);
  const sg::testing::TempFolder folder, other;
  sg::LoopbackWorld world(3);
  sg::Trainer trainer(
      small_gpt2(), plan_of(3, 1), batch, world,
      {.threads = 2, .seed = 7, .window = 4, .change = [&](const sg::Graph& graph) { return failing(graph, fails); }});
  static_cast<void>(trainer.steps(batches));
  const std::uint64_t weights = hash_weights(trainer.run());
  const std::string saved     = sg::testing::save_checkpoint(trainer, folder.path());
  sg::Evaluator evaluator(trainer, batch);
  const double loss    = evaluator.loss(batches.front());
  const auto fail_once = [&] {
    *fails = true;
    CHECK_THROWS_MATCHES(
        trainer.steps(std::span(batches).first(length)), sg::Error,
        MessageMatches(ContainsSubstring("give gradient, make next version s1") && ContainsSubstring("planted")));
    *fails = false;
  };
  const auto refuses = [&](const auto& call) {
    CHECK_THROWS_MATCHES(
        call(), sg::Error,
        MessageMatches(ContainsSubstring("weights and optimizer states may be wrong") && ContainsSubstring("planted") &&
                       ContainsSubstring("(load a checkpoint, or set the weights)")));
  };

  fail_once();
  CHECK(trainer.num_steps() == 4);
  for (const std::size_t next : {std::size_t{4}, std::size_t{3}, std::size_t{1}})
    refuses([&] { return trainer.steps(std::span(batches).first(next)); });
  refuses([&] { return evaluator.loss(batches.front()); });
  refuses([&] { return sg::testing::save_checkpoint(trainer, other.path()); });
  refuses([&] { return trainer.set_update_mode({}); });
  CHECK(sg::load_checkpoint(trainer, saved).steps == 4);
  CHECK(trainer.num_updates() == 3 * 4);
  CHECK(hash_weights(trainer.run()) == weights);
  CHECK(evaluator.loss(batches.front()) == loss);
  for (const sg::StepResult& result : trainer.steps(batches)) CHECK(result.staleness->largest <= 1);
  CHECK(trainer.num_updates() == 2 * 3 * 4);

  // Fresh weights have no moments.
  fail_once();
  sg::set_fresh_weights(trainer.run(), 7);
  CHECK(trainer.num_updates() == 0);
  for (const auto which : {&sg::StepWeight::first, &sg::StepWeight::second}) {
    for (const std::byte each : bytes_of(trainer.run(), which)) REQUIRE(each == std::byte{0});
  }
  for (const sg::StepResult& result : trainer.steps(batches)) CHECK(result.staleness->largest <= 1);
  static_cast<void>(hash_weights(trainer.run()));
}

TEST_CASE("asynchronous ranks in other processes are refused", "[graphs][asynchronous][refuses]") {
  std::vector<std::string> said(2);
  sg::testing::in_processes(sg::testing::neighbours(2, 2), sg::testing::Exchanges::hub, [&](sg::World& world) {
    const auto place = static_cast<std::size_t>(world.peers()->process());
    try {
      sg::Trainer(small_gpt2(), plan_of(2, 1), batch_of(2), world);
    } catch (const sg::Error& error) {
      said[place] = error.what();
    }
  });
  for (const std::string& each : said)
    CHECK_THAT(each, ContainsSubstring("update.mode: asynchronous: ranks share the versions of weights") &&
                         ContainsSubstring("(backend loopback, or mode synchronous or stale)"));
}
