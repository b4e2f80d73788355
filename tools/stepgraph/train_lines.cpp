#include "tools/stepgraph/train_lines.hpp"

#include <unistd.h>

#include "graphs/files/json_value.hpp"
#include "tools/stepgraph/output.hpp"

namespace stepgraph::cli {

std::string step_line(std::int64_t step, const StepResult& result, double tokens_per_s, const TrainState& state,
                      bool json) {
  if (json)
    return str("{\"type\":\"step\",\"step\":", step, ",\"loss\":", digits(result.loss),
               ",\"grad_norm\":", digits(result.grad_norm), ",\"rate\":", digits(result.rate),
               ",\"tokens_per_s\":", digits(tokens_per_s), ",\"seconds\":", digits(state.seconds),
               ",\"tokens\":", state.tokens,
               result.loss_scale ? str(",\"loss_scale\":", digits(*result.loss_scale),
                                       ",\"skipped\":", result.skipped ? "true" : "false")
                                 : "",
               "}");
  return str(
      "step ", step, "  loss ", short_number(result.loss, 17), "  grad_norm ", short_number(result.grad_norm, 17),
      "  rate ", short_number(result.rate), "  ", short_number(tokens_per_s), " tokens/s",
      result.skipped ? str("  skipped: gradients overflow at loss scale ", short_number(*result.loss_scale)) : "");
}

std::string eval_line(std::int64_t steps, double loss, const TrainState& state, bool json) {
  if (json)
    return str("{\"type\":\"eval\",\"step\":", steps, ",\"loss\":", digits(loss),
               ",\"seconds\":", digits(state.seconds), "}");
  return str("eval after ", steps, steps == 1 ? " step" : " steps", "  loss ", short_number(loss, 17));
}

std::string checkpoint_line(const CheckpointLine& line, bool json) {
  if (json)
    return json_line({{"type", "checkpoint"},
                      {"step", line.step},
                      {"path", line.path},
                      {"bytes", line.bytes},
                      {"seconds", line.seconds},
                      {"stage_s", line.stage_s},
                      {"write_s", line.write_s}});
  return str("checkpoint ", line.path, "  ", short_number(static_cast<double>(line.bytes) / (1 << 20), 4), " MiB in ",
             short_number(line.seconds, 3), " s");
}

std::string resume_line(std::int64_t steps, const std::string& path, bool json) {
  if (json) return json_line({{"type", "resume"}, {"step", steps}, {"path", path}});
  return str("continues after ", steps, steps == 1 ? " step" : " steps", " from ", path);
}

std::string summary_line(const TrainState& state, double loss, bool interrupted, bool json) {
  const double tokens_per_s = state.seconds > 0 ? static_cast<double>(state.new_tokens) / state.seconds : 0;
  if (json)
    return str("{\"type\":\"summary\",\"steps\":", state.steps, ",\"tokens\":", state.tokens,
               ",\"seconds\":", digits(state.seconds), ",\"tokens_per_s\":", digits(tokens_per_s),
               ",\"loss\":", digits(loss), ",\"interrupted\":", interrupted ? "true" : "false", "}");
  const std::int64_t steps = state.steps - state.first_step;
  return str(steps, steps == 1 ? " step, " : " steps, ", state.new_tokens, " tokens in ",
             short_number(state.seconds, 4), " s: ", short_number(tokens_per_s), " tokens/s",
             state.first_step > 0 ? str("; ", state.steps, " steps in all") : "");
}

std::string shard_line(const ShardStats& stats, Shard strategy, bool json) {
  if (json)
    return str("{\"type\":\"shard\",\"strategy\":\"", to_string(strategy),
               "\",\"rank\":0,\"whole_bytes\":", stats.whole_bytes, ",\"current_bytes\":", stats.current_bytes,
               ",\"peak_bytes\":", stats.peak_bytes, ",\"saved_bytes\":", stats.saved_bytes,
               ",\"local_ratio\":", digits(stats.local_ratio), ",\"all_gathers\":", stats.all_gathers,
               ",\"reduce_scatters\":", stats.reduce_scatters, ",\"all_reduces\":", stats.all_reduces, "}");
  const auto mib = [](std::int64_t bytes) { return short_number(static_cast<double>(bytes) / (1 << 20), 3); };
  return str("sharding (", to_string(strategy), "): rank 0 keeps ", short_number(100 * stats.local_ratio, 3),
             "% of the elements of its weights; weights, gradients and optimizer states take ",
             mib(stats.current_bytes), " MiB between steps and at most ", mib(stats.peak_bytes),
             " MiB in a step, instead of ", mib(stats.whole_bytes), " MiB; a step has ", stats.all_gathers,
             " all-gathers, ", stats.reduce_scatters, " reduce-scatters and ", stats.all_reduces,
             " gradient all-reduces");
}

void TrainOutput::print(const std::string& line) {
  if (closed_ || !options_.prints) return;
  if (isatty(STDOUT_FILENO) == 1) progress_.clear();
  try {
    print_line(line);
  } catch (const OutputClosed&) {
    closed_ = true;
  } catch (const Error& error) {
    closed_  = true;
    failure_ = error;
    if (options_.has_files)
      progress_.note(str("stepgraph train: ", error.what(), "; the run goes on without it, to write its files"));
  }
}

void TrainOutput::print_note(const std::string& line) {
  if (options_.prints) progress_.note(str("stepgraph train: ", line));
}

void TrainOutput::print_failed_checkpoint(std::int64_t steps, const Error& error) {
  if (!options_.prints) return;
  print_note(str(error.what(), "; the run goes on"));
  if (options_.json) print(json_line({{"type", "checkpoint"}, {"step", steps}, {"error", error.what()}}));
}

}  // namespace stepgraph::cli
