#include "graphs/config/config.hpp"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"
#include "graphs/config/reader.hpp"
#include "graphs/config/sections.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/schedule/kinds.hpp"

namespace stepgraph {
namespace {

constexpr int max_int    = std::numeric_limits<int>::max();
constexpr int max_degree = 1 << 20;
constexpr auto max_seed  = std::numeric_limits<std::uint64_t>::max();

using Names = ConfigReader::Names;

BatchSpec read_batch(const ConfigReader& root, BatchSpec batch) {
  root.required("batch", R"({"global": 8, "micro": 2, "seq": 128})");
  const ConfigReader section = root.section("batch", {"global", "micro", "seq"});
  section.integer("global", batch.global, 1, max_int);
  section.integer("micro", batch.micro, 1, max_int);
  section.integer("seq", batch.seq, 1, max_int);
  return batch;
}

void read_layout(const ConfigReader& root, LayoutSpec& layout) {
  const ConfigReader section =
      root.section("layout", {"dp", "tp", "pp", "order", "devices_per_node", "sequence_parallel"});
  section.integer("dp", layout.dp, 1, max_degree);
  section.integer("tp", layout.tp, 1, max_degree);
  section.integer("pp", layout.pp, 1, max_degree);
  section.text("order", layout.order);
  section.integer("devices_per_node", layout.devices_per_node, 1, max_degree);
  section.boolean("sequence_parallel", layout.sequence_parallel);
}

void read_pipeline(const ConfigReader& root, PipelinePlan& pipeline) {
  const ConfigReader section = root.section("pipeline", {"schedule", "chunks", "split", "limit"});
  section.integers("split", pipeline.split, {"even", "balanced"}, 1, max_degree);
  pipeline.balanced = section.is_text("split", "balanced");
  section.text("schedule", pipeline.schedule);
  // A number of activations is in microbatches, text is a size in bytes.
  if (section.is_text("limit")) {
    section.size("limit", pipeline.limit_bytes);
  } else {
    section.real("limit", pipeline.limit, not_negative);
  }
  if ((pipeline.limit > 0 || pipeline.limit_bytes > 0) && pipeline.schedule != "auto")
    section.refuse("limit", str("with schedule ", pipeline.schedule, ", whose order is fixed (schedule auto)"));
  const bool from_file = pipeline.schedule.ends_with(".csv");
  std::size_t kind     = 0;
  if (!from_file) {
    Names kinds;
    for (const ScheduleKind each : all_schedule_kinds) kinds.push_back(to_string(each));
    kinds.push_back("auto");
    kinds.push_back("or a FILE.csv");  // for the message
    kind = section.choice("schedule", static_cast<std::size_t>(ScheduleKind::one_f_one_b), kinds);
  }
  const bool searched = pipeline.schedule == "auto";
  if (!from_file && !searched) pipeline.chunks = usual_chunks(all_schedule_kinds[kind]);  // the default
  section.integer("chunks", pipeline.chunks, 1, searched ? 2 : max_degree);
}

// A limit that no schedule can reach is a mistake: most likely it was meant in bytes.
void check_limit(const ConfigReader& root, const Config& config) {
  const double limit = config.plan.pipeline.limit;
  const double micro = static_cast<double>(config.batch.micro) * config.plan.layout.dp;
  const double count = std::ceil(config.batch.global / micro);
  const int chunks   = config.plan.pipeline.chunks;
  if (limit > count * chunks)
    root.refuse("pipeline.limit", str(limit, " is above ", count, " microbatches x ", chunks,
                                      " chunks, so it limits nothing (0: no limit; text is in bytes: \"8MiB\")"));
}

// What other libraries call them.
constexpr ConfigReader::OtherName types_elsewhere[] = {
    {"float", "\"fp32\""},   {"float32", "\"fp32\""}, {"f32", "\"fp32\""},      {"float64", "\"fp64\""},
    {"f64", "\"fp64\""},     {"double", "\"fp64\""},  {"bfloat16", "\"bf16\""}, {"half", "\"fp16\""},
    {"float16", "\"fp16\""}, {"f16", "\"fp16\""},
};

// A value equal to the default is not stored as given, so that to_json() followed by parse_config() gives an equal
// config.
void read_precision(const ConfigReader& root, const JsonValue* value, PrecisionPlan& precision) {
  const ConfigReader section =
      root.section("precision", {"param", "reduce", "loss_scale", "keep_low_precision_grads", "norm"});
  constexpr DType types[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
  Names names;
  for (const DType type : types) names.push_back(config_name(type));
  const auto choice = [&](std::string_view key, DType otherwise) {
    const auto place = std::find(types, std::end(types), otherwise) - types;
    return types[section.choice(key, static_cast<std::size_t>(place), names, {}, types_elsewhere)];
  };
  precision.param = choice("param", DType::f32);
  if (section.has("reduce")) precision.reduce = choice("reduce", DType::f32);
  if (const DType norm = choice("norm", precision.param); norm != precision.param) precision.norm = norm;
  section.boolean("keep_low_precision_grads", precision.keep_low_precision_grads);
  LossScale& scale       = precision.loss_scale;
  const JsonValue* given = value ? value->find("loss_scale") : nullptr;
  if (given && (given->kind == JsonValue::Kind::integer || given->kind == JsonValue::Kind::real)) {
    section.real("loss_scale", scale.value, positive);
    scale.scaling = Scaling::fixed;
  } else if (given) {
    const Names words{"none", "dynamic", "or a number above 0"};
    const std::size_t word = section.choice("loss_scale", 0, words);
    if (word > 1) section.refuse("loss_scale", "\"or a number above 0\" is not a number (65536)");
    const Scaling scaling = word == 0 ? Scaling::none : Scaling::dynamic;
    if (scaling != precision.usual_scaling()) scale.scaling = scaling;
  }
  check_precision(precision);
}

// What other systems call them.
constexpr ConfigReader::OtherName update_modes_elsewhere[] = {
    {"sync", "\"synchronous\""},        {"async", "\"asynchronous\""}, {"bounded", "\"stale\""},
    {"bounded_staleness", "\"stale\""}, {"ssp", "\"asynchronous\""},   {"hogwild", "\"asynchronous\""},
    {"delayed", "\"stale\""},
};

void read_update(const ConfigReader& root, UpdatePlan& update) {
  const ConfigReader section = root.section("update", {"mode", "max_staleness"});
  update.mode = read_enum(section, "mode", update.mode, UpdateWhen::asynchronous, update_modes_elsewhere);
  section.integer("max_staleness", update.max_staleness, 0, most_staleness);
  check_update(update);
}

// Must run first: other keys override the choices of the preset.
void read_memory(const ConfigReader& root, Config& config) {
  const ConfigReader section = root.section("memory", {"limit_bytes", "reuse", "preset"});
  Names presets;
  for (const MemoryPreset preset : all_memory_presets) presets.push_back(to_string(preset));
  config.preset = all_memory_presets[section.choice("preset", 0, presets)];
  config.plan   = with_preset(config.plan, config.preset);
  section.size("limit_bytes", config.plan.memory_limit_bytes);
  config.plan.reuse = section.choice("reuse", 1, {"free", "tight"}) == 0 ? Reuse::free : Reuse::tight;
}

const Names comm_keys{"algorithm", "timeout_ms", "machine", "exact"};

void read_comm(const ConfigReader& root, Config& config) {
  const ConfigReader section = root.section("comm", comm_keys);
  config.plan.algorithm      = read_enum(section, "algorithm", Algorithm::direct, Algorithm::adaptive);
  section.integer("timeout_ms", config.timeout_ms, 1, max_int);
  section.boolean("exact", config.exact);
  if (section.is_empty_text("machine")) return;  // the default
  section.text("machine", config.machine);
}

// Needs all that may look at a machine.
void check_machine(const ConfigReader& root, const Config& config) {
  const Plan& plan        = config.plan;
  const bool has_devices  = config.backend == "cuda" || config.backend == "nccl";
  const bool uses_devices = plan.offload.moves_something() || plan.recompute == Recompute::automatic;
  const bool looks        = plan.algorithm == Algorithm::adaptive || plan.pipeline.balanced ||
                     plan.pipeline.schedule == "auto" || (has_devices && uses_devices);
  if (config.machine.empty() || looks) return;
  root.section("comm", comm_keys)
      .refuse("machine", str("'", config.machine, "' with algorithm ", plan.algorithm,
                             ", which does not look at a machine (adaptive, pipeline.split balanced, pipeline.schedule "
                             "auto, or on GPUs offload or recompute auto)"));
}

// Needs `comm`. NCCL has algorithms of its own, which it chooses among unless it is told one.
void check_nccl(const ConfigReader& root, Config& config) {
  if (config.backend != "nccl") return;
  const ConfigReader section = root.section("comm", comm_keys);
  const Algorithm algorithm  = std::exchange(config.plan.algorithm, Algorithm::direct);
  if (algorithm == Algorithm::hierarchical || algorithm == Algorithm::adaptive)
    section.refuse("algorithm", str("'", algorithm,
                                    "' with backend nccl, which cannot be told that (direct, where NCCL "
                                    "chooses; ring or tree)"));
  if (config.exact && algorithm != Algorithm::direct)
    section.refuse("algorithm", str("'", algorithm, "' with comm.exact, where NCCL reduces nothing (direct)"));
  config.nccl_algorithm = algorithm;
}

// Needs layout and backend.
void read_world(const ConfigReader& root, Config& config) {
  WorldSpec& world           = config.world;
  const ConfigReader section = root.section("world", {"rank", "size", "address"});
  section.integer("rank", world.rank, -1, max_int);
  section.integer("size", world.size, 0, max_int);
  if (!section.is_empty_text("address")) section.text("address", world.address);
  const std::string_view given = world.rank >= 0         ? "rank"
                                 : world.size > 0        ? "size"
                                 : world.address.empty() ? ""
                                                         : "address";
  if (given.empty()) return;
  if (!has_processes(config.backend))
    section.refuse(given,
                   str("with backend ", config.backend, ", which has all ranks in one process (gloo, mpi or nccl)"));
  if (world.rank >= 0 && world.size == 0)
    section.refuse("rank", str("is ", world.rank, ", but size is not given (both, or none of them)"));
  if (world.rank < 0 && world.size > 0)
    section.refuse("size", str("is ", world.size, ", but rank is not given (both, or none of them)"));
  if (world.size == 0) return;
  if (world.rank >= world.size)
    section.refuse("rank", str("is ", world.rank, ", but size is ", world.size, " (0 to ", world.size - 1, ")"));
  if (const int num_ranks = Layout(config.plan.layout).num_ranks(); num_ranks != world.size)
    section.refuse("size", str("is ", world.size, ", but the layout has ", num_ranks,
                               num_ranks == 1 ? " rank" : " ranks", " (as many)"));
}

// Needs layout and backend.
void read_devices(const ConfigReader& root, Config& config) {
  constexpr int max_device = 1023;
  if (!root.has("devices")) return;
  std::vector<int> devices;  // "all": empty
  root.integers("devices", devices, {"all"}, 0, max_device);
  const bool is_default = config.backend == "nccl" ? devices.empty() : devices == std::vector<int>{0};
  if (is_default) return;
  if (config.backend != "cuda" && config.backend != "nccl")
    root.refuse("devices", str("with backend ", config.backend, ", whose ranks are not on GPUs (cuda or nccl)"));
  const int num_devices = static_cast<int>(devices.size()), num_ranks = Layout(config.plan.layout).num_ranks();
  if (config.backend == "cuda" && num_devices > num_ranks) {
    root.refuse("devices", str("has ", num_devices, " devices, but the layout has ", num_ranks,
                               num_ranks == 1 ? " rank" : " ranks", " (at most ", num_ranks, ")"));
  }
  config.devices = std::move(devices);
}

Config read(const JsonValue& value) {
  const ConfigReader root(&value, "",
                          {"model",  "data",      "batch",     "layout",    "pipeline", "shard",  "offload",
                           "update", "precision", "optimizer", "recompute", "memory",   "comm",   "checkpoint",
                           "eval",   "world",     "seed",      "threads",   "backend",  "devices"});
  Config config;
  config.model = read_model_source(*root.required("model", R"({"kind": "gpt2", ...} or {"load": "DIR"})"));
  config.data  = read_data(root);
  config.batch = read_batch(root, config.batch);
  read_memory(root, config);
  read_layout(root, config.plan.layout);
  read_pipeline(root, config.plan.pipeline);
  check_limit(root, config);
  read_shard(root, config.plan.shard);
  read_offload(root, value.find("offload"), config.plan.offload);
  read_update(root, config.plan.update);
  read_precision(root, value.find("precision"), config.plan.precision);
  read_optimizer(root, value.find("optimizer"), config.plan.optimizer);
  config.plan.recompute = read_enum(root, "recompute", config.plan.recompute, Recompute::automatic);
  read_comm(root, config);
  config.checkpoint = read_checkpoint(root);
  config.eval       = read_eval(root, config.data);
  root.integer("seed", config.seed, 0, max_seed);
  root.integer("threads", config.threads, 0, 1024);
  const Names backends{"loopback", "cuda", "gloo", "mpi", "nccl"};
  config.backend = backends[root.choice("backend", 0, backends)];
  check_nccl(root, config);
  check_machine(root, config);
  if (config.plan.update.mode == UpdateWhen::asynchronous && config.backend != "loopback")
    root.refuse("update.mode", str("asynchronous with backend ", config.backend,
                                   ": ranks share versions of the weights in the memory of one process (loopback, or "
                                   "mode synchronous or stale)"));
  check_fit(config);
  read_world(root, config);
  read_devices(root, config);
  return config;
}

std::string read_text(const std::string& path) {
  constexpr std::size_t max_bytes = std::size_t{1} << 20;
  const auto refuse = [&](const std::string& why) { throw Error(ErrorKind::config, str(path, ": ", why)); };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (!file) refuse(str("cannot be read: ", system_reason(errno), " (a config in JSON)"));
  std::string text;
  char block[1 << 14];
  while (const std::size_t read = std::fread(block, 1, sizeof block, file.get())) {
    text.append(block, read);
    if (text.size() > max_bytes) refuse("is larger than 1 MiB (a config in JSON)");
  }
  if (std::ferror(file.get())) refuse(str("cannot be read: ", system_reason(errno), " (a config in JSON)"));
  return text;
}

Config parse(std::string_view text, std::span<const std::string> overrides, const std::string& file) {
  JsonValue value;
  try {
    value = parse_json(text);
  } catch (const Error& error) {
    throw Error(error.kind(), file.empty() ? error.what() : str(file, ": ", error.what()));
  }
  // The line of type "config" that `train --json` prints is a config.
  if (const JsonValue* type = value.find("type"); type && *type == "config") value.erase("type");
  for (const std::string& assignment : overrides) apply_override(value, assignment);
  return read(value);
}

}  // namespace

bool has_processes(std::string_view backend) noexcept {
  return backend == "gloo" || backend == "mpi" || backend == "nccl";
}

Config parse_config(std::string_view text, std::span<const std::string> overrides) {
  return parse(text, overrides, {});
}

Config read_config(const std::string& path, std::span<const std::string> overrides) {
  return parse(read_text(path), overrides, path);
}

}  // namespace stepgraph
