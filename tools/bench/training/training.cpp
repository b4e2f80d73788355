#include "tools/bench/training/training.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <system_error>

#include "engine/base/error.hpp"
#include "graphs/files/token_data.hpp"
#include "tools/stepgraph/processes/worlds.hpp"

namespace stepgraph::bench {
namespace {

struct KnownModel {
  const char* name;
  Gpt2Spec spec;
  int batch;
  DType type = DType::f32;
};
// The sizes of GPT-2. The vocabulary is a multiple of 128, as GPUs need.
Gpt2Spec large(int layers, int width, int heads) {
  return {.layers = layers, .width = width, .heads = heads, .context = 1024, .vocab = 50304};
}
const std::vector<KnownModel>& models() {
  static const std::vector<KnownModel> all = {
      {"S", {.layers = 4, .width = 256, .heads = 8, .context = 128, .vocab = 4096}, 8},
      {"M", {.layers = 8, .width = 512, .heads = 8, .context = 256, .vocab = 8192}, 4},
      {"L", large(12, 768, 12), 4},
      {"S-bf16", {.layers = 4, .width = 256, .heads = 8, .context = 128, .vocab = 4096}, 8, DType::bf16},
      {"M-bf16", {.layers = 8, .width = 512, .heads = 8, .context = 256, .vocab = 8192}, 4, DType::bf16},
      {"L-bf16", large(12, 768, 12), 4, DType::bf16},
      {"tiny", {.layers = 2, .width = 16, .heads = 2, .context = 8, .vocab = 64}, 4},
      {"124M", large(12, 768, 12), 64, DType::bf16},
      {"350M", large(24, 1024, 16), 32, DType::bf16},
      {"1558M", large(48, 1600, 25), 8, DType::bf16},
  };
  return all;
}

constexpr int pipeline_microbatches = 8;

std::vector<std::int32_t> tokens_of(const TrainingCase& what) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(what.tokens()) + 1);
  TokenData(SyntheticTokens{.seed = 1}, what.spec.vocab).read(0, tokens);
  return tokens;
}

}  // namespace

std::vector<std::string> known_models() {
  std::vector<std::string> names;
  for (const KnownModel& model : models()) names.emplace_back(model.name);
  return names;
}

LayoutSpec parse_degrees(const std::string& text) {
  LayoutSpec layout;
  const char *at = text.data(), *const end = at + text.size();
  bool right = true;
  for (int* const degree : {&layout.dp, &layout.tp, &layout.pp}) {
    if (degree != &layout.dp) right = right && at != end && *at++ == 'x';
    const auto [rest, error] = std::from_chars(at, end, *degree);
    right                    = right && error == std::errc() && *degree >= 1 && *degree <= 9999;
    at                       = rest;
  }
  if (!right || at != end) {
    throw Error(ErrorKind::config, str("layout '", text,
                                       "': is not DPxTPxPP (as in 2x1x1: 2 data-parallel ranks, no tensor or "
                                       "pipeline parallelism)"));
  }
  return layout;
}

double TrainingCase::flops_per_token() const {
  const auto width  = static_cast<double>(spec.width);
  const auto layers = static_cast<double>(spec.layers);
  return 6 * (12 * layers * width * width + static_cast<double>(spec.vocab) * width) +
         12 * layers * static_cast<double>(batch.seq) * width;
}

TrainingCase TrainingCase::on_one_rank() const {
  TrainingCase out = *this;
  out.batch.micro *= plan.layout.dp;
  out.layout      = "1x1x1";
  out.plan.layout = {};
  return out;
}

TrainingCase TrainingCase::not_sharded() const {
  TrainingCase out = *this;
  out.plan.shard   = {};
  return out;
}

TrainingCase training_case(const std::string& model, const std::string& layout, Shard strategy) {
  const auto known = std::find_if(models().begin(), models().end(), [&](const auto& one) { return one.name == model; });
  if (known == models().end()) {
    std::string names;
    for (const std::string& name : known_models()) names += (names.empty() ? "" : ", ") + name;
    throw Error(ErrorKind::config, str("unknown model '", model, "' (known: ", names, ")"));
  }
  TrainingCase out{.model = model, .layout = layout, .spec = known->spec, .plan = {}, .batch = {}};
  out.plan.layout          = parse_degrees(layout);
  out.plan.shard.strategy  = strategy;
  out.plan.precision.param = known->type;
  const int dp             = out.plan.layout.dp;
  if (known->batch % dp != 0)
    throw Error(ErrorKind::config,
                str("layout '", layout, "': ", known->batch, " sequences of model ", model, " do not divide over ", dp,
                    " data-parallel ranks (a divisor of ", known->batch, ")"));
  const bool in_pieces = out.plan.layout.tp > 1 || out.plan.layout.pp > 1;
  out.batch            = {.global = known->batch * (in_pieces ? pipeline_microbatches : 1),
                          .micro  = known->batch / dp,
                          .seq    = static_cast<int>(known->spec.context)};
  return out;
}

Training::Training(const TrainingCase& what, int threads, const std::string& backend, const std::vector<int>& devices)
    : own_world_(cli::make_world(backend, Layout(what.plan.layout).num_ranks(), devices)),
      world_(*own_world_),
      trainer_(gpt2(what.spec), what.plan, what.batch, world_, {.threads = backend == "cuda" ? 0 : threads}),
      tokens_(tokens_of(what)) {}

Training::Training(const TrainingCase& what, int threads, World& world)
    : world_(world),
      trainer_(gpt2(what.spec), what.plan, what.batch, world, {.threads = threads}),
      tokens_(tokens_of(what)) {}

double Training::step(Recorder* recorder) {
  const auto begin        = std::chrono::steady_clock::now();
  const StepResult result = trainer_.step(tokens_, recorder);
  const double seconds    = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (!std::isfinite(result.loss)) throw Error(ErrorKind::run, str("loss is ", result.loss, " (a finite loss)"));
  return seconds;
}

}  // namespace stepgraph::bench
