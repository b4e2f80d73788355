// Steps with offload that fail: their weights are not used any more until they are set again.
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/loopback/world.hpp"
#include "backends/storage/spill_file.hpp"
#include "engine/base/error.hpp"
#include "graphs/train/checkpoint.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/checkpointed.hpp"
#include "tests/support/training/short_training.hpp"
#include "tests/support/worlds/thread_processes.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::small_gpt2;
using sg::testing::tokens_for;

namespace {

const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};

// A spill file whose transfers fail while `fails` is set.
class FailingFile final : public sg::Storage {
 public:
  FailingFile(const std::string& folder, sg::Rank rank, std::int64_t size, const std::atomic<bool>& fails)
      : file_(folder, rank, size), fails_(fails) {}
  [[nodiscard]] std::int64_t size_bytes() const noexcept override { return file_.size_bytes(); }
  void read(std::int64_t offset, std::span<std::byte> to) override {
    check();
    file_.read(offset, to);
  }
  void write(std::int64_t offset, std::span<const std::byte> from) override {
    check();
    file_.write(offset, from);
  }

 private:
  void check() const {
    if (fails_) throw sg::Error(sg::ErrorKind::backend, "the disk is gone");
  }
  sg::SpillFile file_;
  const std::atomic<bool>& fails_;
};

sg::MakeStorage failing_files(const std::string& folder, const std::atomic<bool>& fails) {
  return [folder, &fails](sg::Rank rank, std::int64_t size) {
    return std::make_unique<FailingFile>(folder, rank, size, fails);
  };
}

auto throws_text(const std::string& text) { return MessageMatches(ContainsSubstring(text)); }
const std::string refused = "weights and optimizer states may be wrong, because a run has failed: ";

// The graph with other bodies for the nodes of an op: they fail while `fails` is set.
sg::Graph with_failing(const sg::Graph& graph, std::string_view op, const std::atomic<bool>& fails) {
  sg::Graph out(graph.num_ranks(), graph.ranks());
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const sg::BufferSpec& spec = graph.spec(sg::Buffer{i});
    static_cast<void>(spec.token ? out.token(spec.rank, spec.name) : out.buffer(spec));
  }
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const sg::Node node{i};
    if (graph.op(node) != op) {
      out.add(graph.spec(node), graph.body(node));
      continue;
    }
    out.add(graph.spec(node), sg::Body([body = graph.body(node), &fails](const sg::Context& context) {
              if (fails) throw std::runtime_error("the host is out of order");
              void* const closure = body.closure();
              body.invoke()(&closure, context);
            }));
  }
  return out;
}

}  // namespace

TEST_CASE("after a step whose disk has failed, only a checkpoint or new weights help",
          "[graphs][train][offload][disk]") {
  const sg::testing::TempFolder folder(sg::testing::fast_folder());
  const bool overlap = GENERATE(true, false);
  if (sg::testing::sanitized() && !overlap) return;
  CAPTURE(overlap);
  const sg::Model model = small_gpt2();
  std::atomic<bool> fails{false};
  const sg::Plan plan{.offload = {.params     = true,
                                  .grads      = true,
                                  .optimizer  = true,
                                  .host_bytes = 64 << 10,
                                  .disk       = folder.path().string(),
                                  .overlap    = overlap}};
  sg::LoopbackWorld world(1);
  sg::Trainer trainer(model, plan, batch, world,
                      {.threads = 2, .seed = 7, .storage = failing_files(plan.offload.disk, fails)});
  sg::Evaluator evaluator(trainer, batch);
  const auto step = [&] {
    return trainer.step(tokens_for(batch, static_cast<int>(trainer.num_steps()), model.vocab)).loss;
  };
  const auto train = [&](int end) {
    std::vector<double> losses;
    while (trainer.num_steps() < end) losses.push_back(step());
    return losses;
  };
  const std::vector<double> first = train(2);
  const std::string saved         = sg::testing::save_checkpoint(trainer, folder.path() / "checkpoints");
  const std::vector<double> later = train(4);

  fails = true;
  CHECK_THROWS_MATCHES(step(), sg::Error, throws_text("the disk is gone"));
  fails = false;
  for (int again = 0; again < 2; ++again) {
    CHECK_THROWS_MATCHES(step(), sg::Error, throws_text(refused) && throws_text("the disk is gone"));
    CHECK(trainer.num_steps() == 4);
    CHECK_THROWS_MATCHES(trainer.flush(), sg::Error, throws_text(refused));
    CHECK_THROWS_MATCHES(sg::testing::save_checkpoint(trainer, folder.path() / "checkpoints"), sg::Error,
                         throws_text(refused));
    CHECK_THROWS_MATCHES(sg::save_model(trainer.run(), (folder.path() / "model").string()), sg::Error,
                         throws_text(refused));
    CHECK_THROWS_MATCHES(evaluator.loss(tokens_for(batch, 9, model.vocab)), sg::Error, throws_text(refused));
    CHECK_THROWS_AS(load_checkpoint(trainer, (folder.path() / "none").string()), sg::Error);
  }
  load_checkpoint(trainer, saved);
  CHECK(train(4) == later);

  fails = true;
  CHECK_THROWS_MATCHES(step(), sg::Error, throws_text("the disk is gone"));
  fails = false;
  CHECK_THROWS_MATCHES(step(), sg::Error, throws_text(refused));
  set_fresh_weights(trainer.run(), 7);  // optimizer states are zero again
  trainer.set_num_steps(0);
  CHECK(train(2) == first);
}

TEST_CASE("after a step whose host node has failed, with hundreds of nodes behind it, weights must be set",
          "[graphs][train][offload]") {
  const sg::Model model = sg::gpt2({.layers = 12, .width = 16, .heads = 2, .context = 16, .vocab = 32});
  std::atomic<bool> fails{false};
  sg::StepGraph step = sg::training_step(
      model, {.offload = {.params = true, .grads = true, .optimizer = true, .activations = true}}, batch);
  REQUIRE(step.update_first);  // so most nodes follow the updates on the host
  REQUIRE(step.graph.num_nodes() > 1000);
  step.graph = with_failing(step.graph, "adamw", fails);
  sg::LoopbackWorld world(1);
  sg::StepRun run(std::move(step), world, {.threads = 2});
  const std::vector<double> rates{1e-3};
  std::int64_t updates = 0;
  const auto run_one   = [&] {
    const sg::StepRank& rank = run.step().ranks.front();
    run.set_tokens(tokens_for(batch, static_cast<int>(updates), model.vocab));
    run.memory().set_first(rank.step_number, updates + 1);
    run.run();
    run.memory().write(rank.rate, std::span(rates));
    run.memory().set_first(rank.num_updates, ++updates);
    return run.loss();
  };
  const auto start = [&] {
    set_fresh_weights(run, 7);
    updates = 0;
    std::vector<double> losses;
    for (int i = 0; i < 3; ++i) losses.push_back(run_one());
    return losses;
  };
  const std::vector<double> losses = start();
  CHECK(losses[0] != losses[2]);

  const bool by_flush = GENERATE(false, true);
  CAPTURE(by_flush);
  fails = true;
  CHECK_THROWS_MATCHES(by_flush ? run.flush() : static_cast<void>(run_one()), sg::Error,
                       throws_text("the host is out of order"));
  fails = false;
  CHECK_THROWS_MATCHES(run_one(), sg::Error, throws_text(refused) && throws_text("the host is out of order"));
  CHECK_THROWS_MATCHES(run.flush(), sg::Error, throws_text(refused));
  CHECK_THROWS_MATCHES(sg::testing::hash_weights(run), sg::Error, throws_text(refused));
  CHECK(start() == losses);
}

TEST_CASE("a flush or a step that fails in one process fails in all of them",
          "[graphs][train][offload][disk][processes][threads]") {
  const sg::testing::TempFolder folder(sg::testing::fast_folder());
  const sg::Model model = small_gpt2();
  const int failing     = GENERATE(0, 1);
  const auto strategy   = GENERATE(sg::Shard::none, sg::Shard::zero1);
  const std::string how = GENERATE("flush", "read", "load", "step");
  static int seen       = 0;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(failing, to_string(strategy), how);
  const sg::Plan plan{.layout  = {.dp = 2},
                      .shard   = {.strategy = strategy},
                      .offload = {.optimizer = true, .host_bytes = 64 << 10, .disk = folder.path().string()}};
  std::vector<std::string> errors(2), later(2);
  const auto error_of = [](const std::function<void()>& work) -> std::string {
    try {
      work();
      return {};
    } catch (const sg::Error& error) {
      return error.what();
    }
  };
  sg::testing::in_processes(sg::testing::neighbours(2, 2), sg::testing::Exchanges::messages, [&](sg::World& world) {
    const auto process = static_cast<std::size_t>(world.peers()->process());
    std::atomic<bool> fails{false};
    sg::Trainer trainer(model, plan, batch, world,
                        {.threads      = 1,
                         .step_timeout = std::chrono::minutes(5),
                         .seed         = 7,
                         .storage      = failing_files(plan.offload.disk, fails)});
    static_cast<void>(trainer.step(tokens_for(batch, 0, model.vocab)));
    fails           = static_cast<int>(process) == failing;
    errors[process] = error_of([&] {
      const auto parameters = model.parameters();
      const auto& parameter = parameters.parameters().front();
      std::vector<float> values(process == 0 ? static_cast<std::size_t>(parameter.num_elements()) : 0);
      if (how == "flush") trainer.flush();
      if (how == "read") trainer.run().read_tensor(sg::StepRun::Which::value, parameter.name, std::span(values));
      if (how == "load") static_cast<void>(load_checkpoint(trainer, (folder.path() / "none").string()));
      if (how == "step") static_cast<void>(trainer.step(tokens_for(batch, 1, model.vocab)));
    });
    fails           = false;
    later[process]  = error_of([&] { trainer.flush(); });
  });
  CHECK_THAT(errors[static_cast<std::size_t>(failing)], ContainsSubstring("the disk is gone"));
  for (const std::string& error : errors) CHECK_FALSE(error.empty());
  for (const std::string& error : later) CHECK_THAT(error, ContainsSubstring(refused));
}

TEST_CASE("a step with homes that host memory cannot hold says which settings use a disk", "[graphs][train][offload]") {
  // More bytes than there are addresses.
  const sg::Model large =
      sg::gpt2({.layers = 1, .width = 64, .heads = 4, .context = 8, .vocab = std::int64_t{1} << 44});
  sg::LoopbackWorld world(1);
  const auto make = [&](const sg::OffloadPlan& offload) {
    static_cast<void>(sg::Trainer(large, {.offload = offload}, {.global = 1, .micro = 1, .seq = 8}, world, {}));
  };
  const std::string fails = "memory: cannot allocate ";
  const std::string hint  = "(offload.disk=FOLDER with offload.host_bytes, such as \"16GiB\": ";
  CHECK_THROWS_MATCHES(make({}), sg::Error,
                       MessageMatches(ContainsSubstring(fails) && !ContainsSubstring("offload.disk")));
  CHECK_THROWS_MATCHES(make({.optimizer = true}), sg::Error,
                       MessageMatches(ContainsSubstring(fails) && ContainsSubstring(hint)));
}
