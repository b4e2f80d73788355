#include "tools/stepgraph/train/lines.hpp"

#include <unistd.h>

#include <map>
#include <tuple>

#include "engine/base/text.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/stepgraph/terminal/output.hpp"

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
               result.staleness ? str(",\"staleness_mean\":", digits(result.staleness->mean), ",\"staleness_max\":",
                                      result.staleness->largest, ",\"dropped\":", result.staleness->num_dropped)
                                : "",
               "}");
  return str("step ", step, "  loss ", short_number(result.loss, 17), "  grad_norm ",
             short_number(result.grad_norm, 17), "  rate ", short_number(result.rate), "  ", short_number(tokens_per_s),
             " tokens/s",
             result.staleness
                 ? str("  staleness ", short_number(result.staleness->mean, 3), ", at most ", result.staleness->largest)
                 : "",
             result.skipped ? str("  skipped: gradients overflow at loss scale ", short_number(*result.loss_scale))
             : result.staleness && result.staleness->num_dropped > 0
                 ? str("  dropped: gradients of ", result.staleness->num_dropped, " ranks")
                 : "");
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
               ",\"beside_bytes\":", stats.beside_bytes, ",\"peak_bytes\":", stats.peak_bytes,
               ",\"saved_bytes\":", stats.saved_bytes, ",\"local_ratio\":", digits(stats.local_ratio),
               ",\"all_gathers\":", stats.all_gathers, ",\"reduce_scatters\":", stats.reduce_scatters,
               ",\"all_reduces\":", stats.all_reduces, "}");
  const auto mib = [](std::int64_t bytes) { return short_number(static_cast<double>(bytes) / (1 << 20), 3); };
  return str("sharding (", to_string(strategy), "): rank 0 keeps ", short_number(100 * stats.local_ratio, 3),
             "% of the elements of its weights; weights, gradients and optimizer states take ",
             mib(stats.current_bytes), " MiB of the device between steps and at most ", mib(stats.peak_bytes),
             " MiB in a step, instead of ", mib(stats.whole_bytes), " MiB; ",
             stats.beside_bytes > 0 ? str(mib(stats.beside_bytes), " MiB lie in host memory or on disk; ") : "",
             "a step has ", stats.all_gathers, " all-gathers, ", stats.reduce_scatters, " reduce-scatters and ",
             stats.all_reduces, " gradient all-reduces");
}

namespace {

// Units of the same name on several ranks are one entry.
JsonValue units_json(const std::vector<OffloadedUnit>& units) {
  std::map<std::tuple<OffloadClass, std::string, Space, UpdateMode>, std::size_t> places;
  std::vector<OffloadedUnit> joined;
  for (const OffloadedUnit& unit : units) {
    const auto [place, is_new] = places.try_emplace({unit.of, unit.unit, unit.space, unit.update}, joined.size());
    if (is_new) {
      joined.push_back(unit);
    } else {
      joined[place->second].bytes += unit.bytes;
    }
  }
  JsonValue list = JsonValue::list();
  for (const OffloadedUnit& unit : joined) {
    JsonValue& item = list.items.emplace_back(JsonValue{{"unit", unit.unit},
                                                        {"class", to_string(unit.of)},
                                                        {"space", unit.space == Space::disk ? "disk" : "host"},
                                                        {"update", "none"},
                                                        {"bytes", unit.bytes}});
    if (unit.of == OffloadClass::optimizer) item.set("update", to_string(unit.update));
  }
  return list;
}

// "optimizer 24 of 24 units" and so on.
std::string units_text(const std::vector<OffloadedUnit>& units) {
  std::string out;
  for (const OffloadClass of :
       {OffloadClass::params, OffloadClass::grads, OffloadClass::optimizer, OffloadClass::activations}) {
    std::int64_t bytes = 0, on_host = 0, count = 0;
    for (const OffloadedUnit& unit : units) {
      if (unit.of != of) continue;
      bytes += unit.bytes;
      ++count;
      on_host += unit.update == UpdateMode::host;
    }
    if (count == 0) continue;
    out += str(out.empty() ? "" : ", ", to_string(of), " ", bytes_text(static_cast<double>(bytes)));
    if (of == OffloadClass::optimizer) out += str(" (the host updates ", on_host, " of ", count, " units)");
  }
  return out;
}

}  // namespace

std::string offload_line(const OffloadFigures& figures, const OffloadPlan& plan,
                         const std::optional<PredictedStep>& predicted, bool json) {
  const TransferBytes& moved = figures.moved;
  if (json) {
    JsonValue line = {{"type", "offload"},
                      {"h2d_bytes", moved.h2d},
                      {"d2h_bytes", moved.d2h},
                      {"disk_read_bytes", moved.disk_read},
                      {"disk_write_bytes", moved.disk_write},
                      {"transfer_s", figures.transfer_s},
                      {"exposed_s", figures.exposed_s},
                      {"host_bytes", figures.host_bytes},
                      {"disk_bytes", figures.disk_bytes},
                      {"strategy", to_string(plan.strategy)},
                      {"compress", to_string(plan.compress)},
                      {"lossy", figures.lossy},
                      {"ratio", figures.ratio()}};
    if (predicted)
      line.add({{"predicted_s", predicted->seconds}, {"bound", predicted->bound}, {"bound_s", predicted->bound_s}});
    line.set("units", units_json(figures.units));
    return json_line(line);
  }
  if (figures.units.empty()) {
    const bool has_device = plan.strategy != OffloadStrategy::manual || plan.device_bytes > 0;
    return str("offload: nothing is moved", has_device ? ": the step fits the device" : "");
  }
  const auto text = [](std::int64_t bytes) { return bytes_text(static_cast<double>(bytes)); };
  std::string out = str("offload: ", units_text(figures.units), "; a step copies ", text(moved.h2d),
                        " to the device and ", text(moved.d2h), " back");
  if (moved.disk_read + moved.disk_write > 0)
    out += str(", reads ", text(moved.disk_read), " from disk and writes ", text(moved.disk_write));
  out += str("; ", text(figures.host_bytes), " in host memory");
  if (figures.disk_bytes > 0) out += str(", ", text(figures.disk_bytes), " on disk");
  if (figures.lossy) {
    out += str("; compress ", to_string(plan.compress), " is lossy: it changes losses");
    if (rounds_weights(figures.units)) out += ", and weights are rounded after each update";
  }
  out += str("; transfers take ", seconds_text(figures.transfer_s), ", ", seconds_text(figures.exposed_s),
             " of it without compute");
  if (predicted)
    out += str("; predicted step: ", seconds_text(predicted->seconds), ", bound by ", predicted->bound, " (",
               seconds_text(predicted->bound_s), ")");
  return out;
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
