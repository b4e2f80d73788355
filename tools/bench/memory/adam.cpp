#include "tools/bench/memory/adam.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <memory>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/files/json_value.hpp"
#include "ops/updates/optimizer.hpp"
#include "tools/bench/machine/floors.hpp"
#include "tools/bench/memory/adam_copies.hpp"
#include "tools/stepgraph/processes/worlds.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

Buffer array(Graph& graph, const char* name, std::int64_t count, DType type = DType::f32) {
  return graph.buffer({.name       = name,
                       .size_bytes = count * static_cast<std::int64_t>(size_bytes(type)),
                       .type       = type,
                       .lifetime   = Lifetime::persistent});
}

double seconds(Executor& executor, const Program& program) {
  const auto start = std::chrono::steady_clock::now();
  executor.run(program);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class AdamStep {
 public:
  explicit AdamStep(std::int64_t elements) : elements_(elements) {
    weight_   = array(graph_, "weight", elements);
    gradient_ = array(graph_, "gradient", elements);
    first_    = array(graph_, "first", elements);
    second_   = array(graph_, "second", elements);
    factor_   = array(graph_, "factor", 1, DType::f64);
    rate_     = array(graph_, "rate", 1, DType::f64);
    step_     = array(graph_, "step", 1, DType::i64);
    adamw(graph_, {.name     = "adamw",
                   .weight   = weight_,
                   .gradient = gradient_,
                   .first    = first_,
                   .second   = second_,
                   .factor   = factor_,
                   .rate     = rate_,
                   .step     = step_,
                   .beta1    = 0.5,
                   .beta2    = 0.5,
                   .eps      = 0});
    verify(graph_);
    program_ = std::make_unique<Program>(graph_, world_);
    for (const Buffer buffer : {weight_, first_, second_}) fill(buffer, 0);
    fill(gradient_, 0.5f);
    memory().span<double>(factor_)[0] = 1;
    memory().span<double>(rate_)[0]   = rate;
  }

  // With constant gradients each step changes a weight by exactly the learning rate.
  double run(Executor& executor) {
    memory().span<std::int64_t>(step_)[0] = ++steps_;
    return seconds(executor, *program_);
  }
  void check() const {
    const double expected = -rate * static_cast<double>(steps_);
    for (const float weight : memory().span<float>(weight_)) {
      if (std::abs(static_cast<double>(weight) - expected) <= 1e-4 * std::abs(expected)) continue;
      throw Error(ErrorKind::run, str("adamw: a weight is ", weight, " after ", steps_, " steps (", expected, ")"));
    }
  }
  [[nodiscard]] double num_bytes() const { return 28 * static_cast<double>(elements_); }

 private:
  static constexpr double rate = 0.125;
  [[nodiscard]] Memory& memory() const { return program_->memory(); }
  void fill(Buffer buffer, float value) {
    const auto values = memory().span<float>(buffer);
    std::fill(values.begin(), values.end(), value);
  }

  std::int64_t elements_;
  Graph graph_;
  LoopbackWorld world_{1};
  Buffer weight_, gradient_, first_, second_, factor_, rate_, step_;
  std::unique_ptr<Program> program_;
  std::int64_t steps_ = 0;
};

class Triad {
 public:
  Triad(std::int64_t elements, int threads) : elements_(elements) {
    a_ = array(graph_, "a", elements);
    b_ = array(graph_, "b", elements);
    c_ = array(graph_, "c", elements);
    graph_.add({.name = "triad", .reads = {b_, c_}, .writes = a_, .parallel = true}, [threads](const Context& context) {
      const std::span<float> a = context.write<float>();
      const float *b = context.read<float>(0).data(), *c = context.read<float>(1).data();
      const auto count         = static_cast<std::int64_t>(a.size());
      const std::int64_t tiles = 32 * threads, tile = (count + tiles - 1) / tiles;
      context.parallel_for(tiles, [=](std::int64_t i) {
        const std::int64_t begin = std::min(count, i * tile), end = std::min(count, begin + tile);
        triad(a.data() + begin, b + begin, c + begin, end - begin);
      });
    });
    verify(graph_);
    program_     = std::make_unique<Program>(graph_, world_);
    const auto b = program_->memory().span<float>(b_), c = program_->memory().span<float>(c_);
    std::fill(b.begin(), b.end(), 1.0f);
    std::fill(c.begin(), c.end(), 2.0f);
  }
  double run(Executor& executor) const { return seconds(executor, *program_); }
  void check() const {
    for (const float sum : program_->memory().span<float>(a_)) {
      if (sum != 7.0f) throw Error(ErrorKind::run, str("triad: 1 + 3 * 2 is ", sum));
    }
  }
  [[nodiscard]] double num_bytes() const { return 12 * static_cast<double>(elements_); }

 private:
  std::int64_t elements_;
  Graph graph_;
  LoopbackWorld world_{1};
  Buffer a_, b_, c_;
  std::unique_ptr<Program> program_;
};

// Prints the rates of AdamW and copies at the same time, beside those of AdamW alone.
void beside_copies(const AdamOptions& options, std::int64_t elements, int runs) {
  const std::unique_ptr<World> world = cli::make_world(options.backend, 1);
  const std::int64_t bytes           = options.dry_run ? 64 << 10 : 32 << 20;
  using Rates                        = AdamBesideCopies::Rates;
  const auto medians                 = [&](int copies) {
    AdamBesideCopies what(*world, elements, bytes, copies, options.threads);
    std::vector<Rates> all;
    for (int i = -2; i < runs; ++i) {
      const Rates rates = what.run();
      if (i >= 0) all.push_back(rates);
    }
    what.check();
    const auto median = [&](double Rates::*of) {
      std::vector<double> values;
      for (const Rates& rates : all) values.push_back(rates.*of);
      return quantile(values, 0.5);
    };
    return Rates{median(&Rates::adam_s), median(&Rates::h2d_rate), median(&Rates::d2h_rate), median(&Rates::copies_s)};
  };
  const Rates alone = medians(0);
  // Copies that take at least as long as AdamW: a few tell how long they take beside it.
  constexpr int few = 4;
  const Rates probe = medians(few);
  const auto enough = static_cast<int>(std::clamp(1.5 * few * probe.adam_s / probe.copies_s, 4.0, 2000.0)) + 1;
  const Rates found = medians(options.dry_run ? few : enough);

  const auto parameters = static_cast<double>(elements);
  const auto adam_rate  = [&](const Rates& rates) { return 28 * parameters / rates.adam_s / 1e9; };
  if (options.json) {
    cli::print_line(json_line({{"type", "adam_beside_copies"},
                               {"backend", options.backend},
                               {"elements", elements},
                               {"threads", options.threads},
                               {"runs", runs},
                               {"adam_GBps", adam_rate(found)},
                               {"adam_alone_GBps", adam_rate(alone)},
                               {"parameters_per_s", parameters / found.adam_s},
                               {"parameters_per_s_alone", parameters / alone.adam_s},
                               {"h2d_GBps", found.h2d_rate / 1e9},
                               {"d2h_GBps", found.d2h_rate / 1e9},
                               {"copies_cover", found.copies_s >= found.adam_s}}));
    return;
  }
  std::cout << "beside copies in both directions, " << options.backend
            << "\n   elements     adam GB/s    h2d GB/s    d2h GB/s   parameters/s   alone GB/s\n"
            << std::setw(11) << elements << std::fixed << std::setprecision(2) << std::setw(14) << adam_rate(found)
            << std::setw(12) << found.h2d_rate / 1e9 << std::setw(12) << found.d2h_rate / 1e9 << std::setw(13)
            << parameters / found.adam_s / 1e9 << " G" << std::setw(13) << adam_rate(alone) << std::endl;
}

}  // namespace

void adam(const AdamOptions& options) {
  const std::int64_t elements = options.dry_run ? std::min<std::int64_t>(options.elements, 100'000) : options.elements;
  const int runs              = options.dry_run ? 1 : options.runs;
  Executor executor({.threads = options.threads});
  AdamStep step(elements);
  const Triad as_much((4 * elements + 2) / 3, options.threads);
  std::vector<double> steps, triads;
  for (int i = -2; i < runs; ++i) {
    const double of_step = step.run(executor), of_triad = as_much.run(executor);
    if (i < 0) continue;
    steps.push_back(step.num_bytes() / of_step / 1e9);
    triads.push_back(as_much.num_bytes() / of_triad / 1e9);
  }
  step.check();
  as_much.check();
  const double adam_rate = quantile(steps, 0.5), triad_rate = quantile(triads, 0.5);
  if (options.json) {
    cli::print_line(json_line({{"type", "adam"},
                               {"elements", elements},
                               {"threads", options.threads},
                               {"runs", runs},
                               {"adam_GBps", adam_rate},
                               {"adam_GBps_p95", quantile(steps, 0.05)},  // the rate that 95% of the steps reach
                               {"triad_GBps", triad_rate},
                               {"triad_GBps_p95", quantile(triads, 0.05)},
                               {"ratio", adam_rate / triad_rate}}));
    if (options.copies) beside_copies(options, elements, runs);
    return;
  }
  std::cout << "AdamW on f32, " << options.threads << " threads, median of " << runs
            << " runs, and a triad over the same amount of memory\n"
            << "   elements     adam GB/s    triad GB/s   ratio\n"
            << std::setw(11) << elements << std::fixed << std::setprecision(2) << std::setw(14) << adam_rate
            << std::setw(14) << triad_rate << std::setw(8) << adam_rate / triad_rate << std::endl;
  if (options.copies) beside_copies(options, elements, runs);
}

}  // namespace stepgraph::bench
