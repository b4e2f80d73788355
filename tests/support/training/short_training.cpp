#include "tests/support/training/short_training.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>

#include "backends/loopback/world.hpp"
#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "graphs/models/weights.hpp"

namespace stepgraph::testing {
namespace {

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]) / std::abs(b[i]);
    most                    = difference <= most ? most : difference;  // NaN counts as the largest
  }
  return most;
}

}  // namespace

Model small_gpt2(double dropout) {
  return gpt2({.layers = 4, .width = 32, .heads = 4, .context = 16, .vocab = 64, .dropout = dropout});
}

Model small_llama(double dropout) {
  return llama({.layers   = 4,
                .width    = 32,
                .heads    = 4,
                .kv_heads = 2,
                .context  = 16,
                .vocab    = 64,
                .tied     = true,
                .dropout  = dropout});
}

std::vector<std::int32_t> tokens_for(const BatchSpec& batch, int step, std::int64_t vocab, Tokens kind) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(batch.global * batch.seq + 1));
  const bool chain    = kind == Tokens::chain;
  std::uint32_t state = 12345u + static_cast<std::uint32_t>(chain ? step : step % 2) * 7919u, last = 0;
  for (auto& token : tokens) {
    state = state * 1664525u + 1013904223u;
    last  = chain ? 7 * last + 3 + (state >> 30) : state >> 8;
    last %= static_cast<std::uint32_t>(vocab);
    token = static_cast<std::int32_t>(last);
  }
  return tokens;
}

namespace {

// Throws if a rank's copy of a tensor, or of a part of it, has other bits than the whole tensor.
void check_copies(const StepRun& run, const std::map<std::string, std::vector<double>>& tensors) {
  const StepGraph& step = run.step();
  const int tp          = step.layout.degree(Axis::tp);
  for (std::size_t rank = 0; rank < step.ranks.size(); ++rank) {
    const int tp_index = step.ranks[rank].coord.tp;
    for (const StepWeight& weight : step.ranks[rank].weights) {
      const WeightSpec& spec = step.spec(weight);
      const auto elements    = num_elements(local_shape(spec, tp, tp_index));
      for (const StoredRange& part : {weight.value, weight.master}) {
        if (part.empty()) continue;
        dispatch_float(step.element_type(part.buffer), [&]<class T>(T) {
          std::vector<T> found(static_cast<std::size_t>(part.size()));
          run.values().read(part.buffer, std::span(found), part.offset);
          for (const TpPiece& piece : tp_pieces(spec, tp, tp_index)) {
            std::vector<T> expected = found;
            round_piece<T>(spec, piece, tensors.at(piece.tensor), elements, part.begin, expected);
            if (std::memcmp(expected.data(), found.data(), found.size() * sizeof(T)) != 0)
              throw std::runtime_error(str("rank ", rank, " has other bits of ", piece.tensor));
          }
        });
      }
    }
  }
}

}  // namespace

// FNV-1a (Fowler, Noll, Vo).
std::uint64_t hash_weights(const StepRun& run) {
  std::uint64_t hash                 = 0xcbf29ce484222325;
  const ParameterInventory inventory = run.step().model.parameters();
  std::map<std::string, std::vector<double>> tensors;
  for (const Parameter& parameter : inventory.parameters()) {
    std::vector<double> values(static_cast<std::size_t>(parameter.num_elements()));  // holds every type exactly
    run.read_tensor(StepRun::Which::value, parameter.name, std::span<double>(values));
    for (const double value : values) hash = (hash ^ std::bit_cast<std::uint64_t>(value)) * 0x100000001b3;
    tensors.emplace(parameter.name, std::move(values));
  }
  check_copies(run, tensors);
  return hash;
}

std::vector<std::byte> training_state(const StepRun& run) {
  run.flush();
  std::vector<std::byte> found;
  for (const StepRank& rank : run.step().ranks) {
    for (const StepWeight& weight : rank.weights) {
      for (const StoredRange& part : {weight.value, weight.master, weight.first, weight.second}) {
        if (part.empty()) continue;
        const auto bytes = run.memory().bytes(part.buffer);
        found.insert(found.end(), bytes.begin(), bytes.end());
      }
    }
    const auto updates = run.memory().bytes(rank.num_updates);
    found.insert(found.end(), updates.begin(), updates.end());
  }
  return found;
}

OffloadPlan offload_of(int classes) {
  return {.params      = (classes & 1) != 0,
          .grads       = (classes & 2) != 0,
          .optimizer   = (classes & 4) != 0,
          .activations = (classes & 8) != 0};
}

History train(const Model& model, const Plan& plan, const BatchSpec& batch, int steps, const TrainerOptions& options,
              Tokens kind) {
  LoopbackWorld world(Layout(plan.layout).num_ranks());
  Trainer trainer(model, plan, batch, world, options);
  History history;
  for (int step = 0; step < steps; ++step) {
    const StepResult result = trainer.step(tokens_for(batch, step, model.vocab, kind));
    history.loss.push_back(result.loss);
    history.grad_norm.push_back(result.grad_norm);
  }
  history.weights = hash_weights(trainer.run());
  return history;
}

ScaledHistory train_scaled(const Model& model, const Plan& plan, const BatchSpec& batch, int steps, int threads) {
  LoopbackWorld world(Layout(plan.layout).num_ranks());
  Trainer trainer(model, plan, batch, world, {.threads = threads, .seed = 7});
  ScaledHistory run;
  for (int step = 0; step < steps; ++step) {
    const StepResult result = trainer.step(tokens_for(batch, step, model.vocab));
    run.scales.push_back(result.loss_scale.value_or(0));
    run.skipped.push_back(result.skipped);
    if (result.skipped) continue;
    run.good.loss.push_back(result.loss);
    run.good.grad_norm.push_back(result.grad_norm);
  }
  run.good.weights = hash_weights(trainer.run());
  return run;
}

double loss_distance(const History& a, const History& b) { return distance(a.loss, b.loss); }
double norm_distance(const History& a, const History& b) { return distance(a.grad_norm, b.grad_norm); }

}  // namespace stepgraph::testing
