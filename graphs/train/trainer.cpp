#include "graphs/train/trainer.hpp"

#include <algorithm>
#include <cmath>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/run/packed.hpp"
#include "graphs/models/weights.hpp"

namespace stepgraph {
namespace {

// The ranks of this process. Checked before a step is built: its messages know only the ranks of the layout.
RankSet ranks_of(const Plan& plan, const World& world) {
  require_ranks(Layout(plan.layout), world);
  return world.local_ranks();
}

}  // namespace

Trainer::Trainer(const Model& model, const Plan& plan, const BatchSpec& batch, World& world,
                 const TrainerOptions& options)
    : run_(training_step(model, plan, batch,
                         {.keep_gradients = options.keep_gradients,
                          .seed           = options.seed,
                          .only           = ranks_of(plan, world),
                          .machine        = options.machine}),
           world,
           {.threads       = options.threads,
            .step_timeout  = options.step_timeout,
            .stall_timeout = options.stall_timeout,
            .reuse         = plan.reuse}),
      rate_(plan.optimizer.lr),
      seed_(options.seed) {}

StepResult Trainer::step(std::span<const std::int32_t> tokens, Recorder* recorder) {
  run_.set_tokens(tokens);
  if (!run_.has_weights()) set_fresh_weights(run_, seed_);
  Memory& memory = run_.memory();
  for (const StepRank& rank : run_.step().ranks) {
    memory.set_first(rank.step_number, num_steps_ + 1);
    memory.set_first(rank.rate, rate_);
  }
  run_.run(recorder);
  ++num_steps_;
  return {
      .loss = run_.loss(), .grad_norm = run_.grad_norm(), .loss_scale = run_.loss_scale(), .skipped = run_.skipped()};
}

Evaluator::Evaluator(const Model& model, const Plan& plan, const BatchSpec& batch, World& world,
                     const RunOptions& options)
    : run_(forward_step(model, plan, batch, ForwardResult::loss,
                        {.only = ranks_of(plan, world), .machine = options.machine}),
           world, options) {}

double Evaluator::loss(std::span<const std::int32_t> tokens) {
  run_.set_tokens(tokens);
  run_.run();
  return run_.loss();
}

// Every data-parallel rank gets the same prompt.
Generator::Generator(const Model& model, const Plan& plan, int window, World& world, const RunOptions& options)
    : run_(forward_step(model, plan, {.global = plan.layout.dp, .micro = 1, .seq = window}, ForwardResult::logits,
                        {.only = ranks_of(plan, world), .machine = options.machine}),
           world, options) {}

namespace {

// Process 0 puts the logits of all processes together, and tells all.
std::vector<double> shared_logits(Peers& peers, std::vector<double> logits, Bytes mine) {
  for (const Bytes& bytes : peers.gather("logits", std::move(mine))) {
    for (Unpacker received(bytes); !received.empty();) {
      const auto begin                  = received.get<std::int64_t>();
      const std::vector<double> columns = received.get_list<double>();
      std::copy(columns.begin(), columns.end(), logits.begin() + static_cast<std::ptrdiff_t>(begin));
    }
  }
  const bool is_first = peers.process() == 0;
  const Bytes told =
      peers.broadcast("logits", is_first ? Packer().add_list(std::span<const double>(logits)).take() : Bytes());
  return Unpacker(told).get_list<double>();
}

}  // namespace

std::vector<double> Generator::logits(std::span<const std::int32_t> prompt) {
  const StepGraph& step = run_.step();
  const auto window     = static_cast<std::size_t>(step.batch.seq);
  if (prompt.empty() || prompt.size() > window) {
    throw Error(ErrorKind::config, str("generate: a prompt of ", prompt.size(), " tokens (1 to ", window, ")"));
  }
  // The tokens after the prompt do not influence its last position: attention is causal.
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(step.batch.global) * window + 1, 0);
  for (int copy = 0; copy < step.batch.global; ++copy) {
    std::copy(prompt.begin(), prompt.end(),
              tokens.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(copy) * window));
  }
  run_.set_tokens(tokens);
  run_.run();
  std::vector<double> logits(static_cast<std::size_t>(step.model.vocab));
  Packer sent;
  for (const StepRank& rank : step.ranks) {
    if (rank.logits.empty() || rank.coord.dp != 0) continue;
    const IndexRange vocab = tp_range(step.model.vocab, step.layout.degree(Axis::tp), rank.coord.tp);
    const auto columns     = static_cast<std::size_t>(vocab.end - vocab.begin);
    dispatch_float(step.type, [&]<class T>(T) {
      std::vector<T> row(columns);
      run_.memory().read(rank.logits[0], std::span(row), static_cast<std::int64_t>((prompt.size() - 1) * columns));
      std::transform(row.begin(), row.end(), logits.begin() + static_cast<std::ptrdiff_t>(vocab.begin),
                     [](T logit) { return static_cast<double>(wide(logit)); });
    });
    sent.add(vocab.begin);
    sent.add_list(std::span<const double>(logits).subspan(static_cast<std::size_t>(vocab.begin), columns));
  }
  return run_.peers() == nullptr ? logits : shared_logits(*run_.peers(), std::move(logits), sent.take());
}

std::vector<std::int32_t> Generator::generate(std::vector<std::int32_t> prompt, int num_tokens) {
  std::vector<std::int32_t> generated;
  const auto window = static_cast<std::size_t>(run_.step().batch.seq);
  for (int i = 0; i < num_tokens; ++i) {
    const std::size_t seen          = std::min(prompt.size(), window);
    const std::vector<double> found = logits(std::span(prompt).last(seen));
    const auto largest              = std::max_element(found.begin(), found.end());
    if (!std::all_of(found.begin(), found.end(), [](double logit) { return std::isfinite(logit); })) {
      throw Error(ErrorKind::run,
                  str("generate: a logit is ", *largest, " (weights that are finite, and not too large)"));
    }
    const auto best = static_cast<std::int32_t>(largest - found.begin());
    prompt.push_back(best);
    generated.push_back(best);
  }
  return generated;
}

}  // namespace stepgraph
