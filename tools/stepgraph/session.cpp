#include "tools/stepgraph/session.hpp"

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "engine/error.hpp"
#include "graphs/huggingface.hpp"
#include "graphs/trainer.hpp"
#include "tools/stepgraph/output.hpp"

namespace stepgraph::cli {
namespace {

std::int64_t tokens_of(const BatchSpec& batch) { return std::int64_t{batch.global} * batch.seq; }

std::int64_t choose_steps(const TokenData& data, std::int64_t tokens_per_step, std::optional<std::int64_t> asked) {
  if (!data.num_tokens()) {
    if (!asked) throw Error(ErrorKind::config, "--steps: missing (synthetic data has no end)");
    return *asked;
  }
  const std::int64_t there = data.num_steps(tokens_per_step);
  if (asked && *asked > there)
    throw Error(ErrorKind::config, str("--steps ", *asked, ": the data has ", *data.num_tokens(), " tokens, which are ",
                                       there, " steps of ", tokens_per_step, " and one (at most ", there, ")"));
  return asked.value_or(there);
}

}  // namespace

void add_config_options(CLI::App& command, ConfigOptions& options, bool runs) {
  command.add_option("CONFIG", options.path, "The run, in JSON; file names in it are relative to the current folder")
      ->required();
  command
      .add_option(
          "--set", options.overrides,
          "path=value: change the config, as in layout.dp=2 or 'data={\"text\": \"FILE\"}'; a value is JSON, or "
          "else a string (may be repeated)")
      ->allow_extra_args(false);
  if (runs)
    command.add_option("--threads", options.threads, "Workers, instead of the config's; 0: all cores")
        ->check(CLI::Range(0, 1024));
  command.add_flag("--json", options.json, "Print JSON lines and nothing else");
}

Config read(const ConfigOptions& options) {
  Config config = read_config(options.path, options.overrides);
  if (options.threads) config.threads = *options.threads;
  return config;
}

Model model_of(const ModelSource& source) {
  return std::visit(
      [](const auto& from) {
        if constexpr (std::is_same_v<std::decay_t<decltype(from)>, LoadFrom>) {
          Model model = load_model(from.folder);
          for (const std::string& note : model.notes) std::cerr << from.folder << "/config.json: " << note << '\n';
          return model;
        } else {
          return make_model(from);
        }
      },
      source);
}

Start make_start(const Config& config) {
  Start start{.model = model_of(config.model), .checkpoint = {}};
  if (const auto* from = std::get_if<LoadFrom>(&config.model)) {
    start.checkpoint = std::make_shared<const Checkpoint>(from->folder);
    check_tensors(*start.checkpoint, start.model.parameters().parameters());
  }
  return start;
}

void set_weights(StepRun& run, const Start& start, std::uint64_t seed) {
  start.checkpoint ? stepgraph::set_weights(run, *start.checkpoint) : set_fresh_weights(run, seed);
}

Batches::Batches(const Config& config, std::int64_t vocab, std::optional<std::int64_t> asked)
    : data_(config.data, vocab),
      tokens_per_step_(tokens_of(config.batch)),
      num_steps_(choose_steps(data_, tokens_per_step_, asked)),
      tokens_(static_cast<std::size_t>(tokens_per_step_) + 1) {}

std::span<const std::int32_t> Batches::read(std::int64_t step) {
  data_.read(step * tokens_per_step_, tokens_);
  return tokens_;
}

void print_plan(const Config& config, const StepGraph& step, const MemoryPlan& plan, bool json) {
  std::vector<std::int64_t> peaks;
  for (int rank = 0; rank < step.layout.num_ranks(); ++rank) peaks.push_back(plan.arena(Rank{rank}).size_bytes);
  const std::int64_t num_parameters = step.model.parameters().num_elements();
  if (json) {
    const nlohmann::ordered_json line = {
        {"type", "plan"},
        {"model", step.model.kind},
        {"parameters", num_parameters},
        {"layout", to_string(step.layout.spec())},
        {"ranks", step.layout.num_ranks()},
        {"schedule", config.plan.pipeline.schedule},
        {"stages", step.schedule.num_stages()},
        {"microbatches", step.num_microbatches},
        {"nodes", step.graph.num_nodes()},
        {"edges", plan.edges.preds.size()},
        {"reuse_edges", plan.num_reuse_edges()},
        {"peak_bytes", peaks},
    };
    return print_line(line.dump());
  }
  const auto count = [](std::int64_t number, std::string_view one, std::string_view more) {
    return str(number, " ", number == 1 ? one : more);
  };
  const double mib = static_cast<double>(*std::max_element(peaks.begin(), peaks.end())) / (1 << 20);
  print_line(str(step.model.kind, ": ", count(step.model.layers, "layer", "layers"), ", width ", step.model.width, ", ",
                 num_parameters, " parameters; ", count(step.layout.num_ranks(), "rank", "ranks"), " (",
                 to_string(step.layout.spec()), "), ", config.plan.pipeline.schedule, " over ",
                 count(step.schedule.num_stages(), "stage", "stages"), " and ",
                 count(step.num_microbatches, "microbatch", "microbatches")));
  print_line(str("step: ", step.graph.num_nodes(), " nodes, ", plan.edges.preds.size(), " edges; at most ",
                 short_number(mib, 3), " MiB on a rank"));
}

void check_can_write(std::string_view what, const std::optional<std::string>& path) {
  if (!path) return;
  const auto refuse = [&](std::string_view why) { throw Error(ErrorKind::config, str(what, " '", *path, "': ", why)); };
  if (path->empty()) refuse("is empty (a file's name)");
  std::error_code ignored;
  if (std::filesystem::is_directory(*path, ignored)) refuse("is a folder (a file's name)");
  const std::filesystem::path folder = std::filesystem::path(*path).parent_path();
  if (!folder.empty() && !std::filesystem::is_directory(folder, ignored))
    refuse(str("there is no folder ", folder.string(), " (one that exists)"));
}

}  // namespace stepgraph::cli
