#include "tools/stepgraph/train/resume.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/stepgraph/processes/together.hpp"

namespace stepgraph::cli {
namespace {

namespace fs = std::filesystem;

void say(std::string_view line) { std::cerr << str("stepgraph train: ", line, "\n") << std::flush; }

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorKind::config, what); }

std::string count_text(std::size_t number) { return str(number, number == 1 ? " checkpoint" : " checkpoints"); }

// A checkpoint itself, whole or not, in contrast to a folder of checkpoints.
bool is_checkpoint(const fs::path& path) {
  const fs::path clean = path.has_filename() ? path : path.parent_path();
  std::error_code error;
  return fs::exists(path / "manifest.json", error) || steps_of_checkpoint(clean.filename().string()).has_value();
}

// "; run/step-000000100 is whole", of the checkpoints beside one that was refused.
std::string whole_one_beside(const fs::path& path) {
  const fs::path clean  = path.has_filename() ? path : path.parent_path();
  const fs::path folder = clean.has_parent_path() ? clean.parent_path() : fs::path(".");
  try {
    for (const CheckpointEntry& entry : list_checkpoints(folder.string()))
      if (entry.problem.empty() && fs::path(entry.path).filename() != clean.filename())
        return str("; the newest whole one beside it is ", entry.path);
  } catch (const Error&) {  // that folder cannot be read
  }
  return "; there is no whole one beside it";
}

// A value of the config that a checkpoint keeps, as "batch.seq". Null if it has none.
JsonValue kept_value(const CheckpointState& state, std::string_view section, std::string_view key,
                     std::string_view more = {}) {
  if (state.config.empty()) return {};
  const JsonValue config = parse_json(state.config, "the config of the checkpoint");
  const JsonValue* value = config.find(section);
  for (const std::string_view name : {key, more})
    if (value != nullptr && !name.empty()) value = value->is_object() ? value->find(name) : nullptr;
  return value != nullptr ? *value : JsonValue();
}

void check_kept(const CheckpointState& state, const TrainOptions& options, const Config& config,
                const std::string& path) {
  if (state.seed != config.seed)
    refuse(str("seed: is ", config.seed, ", but ", path, " is of a run with seed ", state.seed,
               " (--set seed=", state.seed, ")"));
  const JsonValue seq = kept_value(state, "batch", "seq");
  if (config.data.shuffle && seq.is_number() && seq.as_integer() != config.batch.seq && !options.force)
    refuse(str("batch.seq: is ", config.batch.seq, ", but ", path, " was trained with ", seq.as_integer(),
               ": shuffled data of another length has another order, so sequences would be repeated (",
               seq.as_integer(), ", or --force)"));
}

// The state of the checkpoint that will be loaded, unless it proves to be damaged. None: it cannot be read, which
// loading reports.
struct KeptState {
  std::string path;
  CheckpointState state;
};
std::optional<KeptState> kept_state(const ResumeFrom& from) {
  try {
    std::string path = from.path;
    if (from.newest) {
      const auto entries = list_checkpoints(from.path);
      const auto whole   = std::ranges::find_if(entries, [](const auto& entry) { return entry.problem.empty(); });
      if (whole == entries.end()) return std::nullopt;
      path = whole->path;
    }
    return KeptState{path, CheckpointReader(path).manifest().state};
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::string data_text(std::int64_t tokens, std::int64_t sequences) {
  return str(tokens, " tokens (", sequences, " sequences for training)");
}

// Data that has changed since.
void compare_data(const KeptState& kept, const TrainOptions& options, const Config& config, const Batches& batches) {
  const JsonValue tokens    = kept_value(kept.state, "run", "tokens");
  const JsonValue sequences = kept_value(kept.state, "run", "sequences");
  if (!tokens.is_number() || !sequences.is_number() || !batches.num_sequences()) return;
  const std::int64_t tokens_now = *batches.data().num_tokens(), sequences_now = *batches.num_sequences();
  const std::string both = str("has ", data_text(tokens_now, sequences_now), ", but ", kept.path, " is of a run with ",
                               data_text(tokens.as_integer(), sequences.as_integer()));
  if (config.data.shuffle && sequences.as_integer() != sequences_now && !options.force)
    refuse(str(batches.data().subject(), ": ", both,
               ": shuffled data of another length has another order, so sequences would be repeated (the same data, or "
               "--force)"));
  if (tokens.as_integer() != tokens_now) say(str(batches.data().subject(), ": ", both));
}

std::string start_path(const std::string& folder) { return (fs::path(folder) / ".start").string(); }

// Where the job began that launch has started again: a path, or empty for step 0. None: the newest in the folder is its
// own.
std::optional<std::string> noted_start(const std::string& folder) {
  std::ifstream file(start_path(folder));
  std::string path;
  if (!file) return std::nullopt;
  std::getline(file, path);
  std::error_code error;
  if (!path.empty() && !fs::exists(path, error)) return std::nullopt;  // newer ones have replaced it
  return path;
}

}  // namespace

void forget_start(const std::string& folder) {
  std::error_code ignored;
  fs::remove(start_path(folder), ignored);
}

void put_aside(const std::vector<CheckpointEntry>& entries) {
  for (const CheckpointEntry& entry : entries) {
    const std::string aside = put_aside_checkpoint(entry.path);
    say(str(entry.path, ": put aside as ", aside, " (remove it if it is not needed)"));
  }
}

CheckpointLock::CheckpointLock(const std::string& folder, std::chrono::milliseconds patience) {
  constexpr std::chrono::milliseconds pause{20};
  const auto refuse_folder = [&](const std::string& why) {
    refuse(str("checkpoint.folder '", folder, "': cannot be written: ", why, " (another folder)"));
  };
  try {
    create_folder(folder);
  } catch (const Error& error) {
    refuse_folder(error.what());
  }
  const std::string path = (fs::path(folder) / ".lock").string();
  file_                  = Descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (const int reason = errno; !file_.is_open()) refuse_folder(system_reason(reason));
  const auto until = std::chrono::steady_clock::now() + patience;
  while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return;  // a file system without locks
    if (std::chrono::steady_clock::now() > until)
      refuse(str("checkpoint.folder '", folder, "': another run is writing to it (another folder, or end that run)"));
    std::this_thread::sleep_for(pause);
  }
}

ResumeFrom prepare_resume(const TrainOptions& options, const Config& config) {
  const std::string& folder = config.checkpoint.folder;
  if (options.restartable && folder.empty())
    refuse(
        "checkpoint.folder: is not set, so a restart would begin at step 0 (a folder, or launch without --restarts)");
  if (folder.empty() && (options.restarted || options.resume == ""))
    refuse("--resume: checkpoint.folder is not set (a folder with checkpoints, or --resume PATH)");
  const auto there = folder.empty() ? std::vector<CheckpointEntry>() : list_checkpoints(folder);
  if (!options.resumes()) {
    if (!there.empty() && !options.force)
      refuse(str("checkpoint.folder '", folder, "': has ", count_text(there.size()), ", the newest after ",
                 there.front().steps, " steps (--resume to continue, another folder, or --force to put them aside)"));
    if (options.restartable) write_text(start_path(folder), "\n");
    return {.aside = there};
  }
  std::optional<std::string> start;  // empty: step 0; none: the newest in the folder
  if (options.restarted) start = noted_start(folder);
  if (options.resume && !options.resume->empty() && (!options.restarted || there.empty())) start = options.resume;
  if (options.restartable && start) write_text(start_path(folder), str(*start, "\n"));
  if (options.restartable && !start) forget_start(folder);
  if (start == "" || (!start && there.empty())) {
    say(str(folder, there.empty() ? ": has no checkpoint" : ": has no checkpoint of this job",
            "; the run begins at step 0"));
    return {.aside = there};
  }
  const ResumeFrom from{.path = start.value_or(folder), .newest = !start || !is_checkpoint(*start)};
  if (const auto kept = kept_state(from)) check_kept(kept->state, options, config, kept->path);
  return from;
}

Resumed load_resumed(Trainer& trainer, const ResumeFrom& from, const TrainOptions& options, const Config& config,
                     const Batches& batches, World& world) {
  Resumed resumed;
  in_first(world, "data of the checkpoint", [&] {
    if (const auto kept = kept_state(from)) compare_data(*kept, options, config, batches);
  });
  if (from.newest) {
    std::optional<Resumed> found = resume_newest(trainer, from.path);
    if (!found) refuse(str("--resume ", from.path, ": has no checkpoint (a folder with checkpoints, or one of them)"));
    resumed = std::move(*found);
  } else {
    try {
      resumed = {.path = from.path, .state = load_checkpoint(trainer, from.path), .refused = {}};
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::config) throw;
      // Process 0 looks, so that all processes have one text.
      refuse(str("--resume: ", error.what(),
                 from_first(world, "checkpoints", [&] { return whole_one_beside(from.path); })));
    }
  }
  if (is_first(world)) {
    for (const std::string& why : resumed.refused) say(str("refused: ", why));
    if (!resumed.refused.empty()) say(str("continues from ", resumed.path));
  }
  check_kept(resumed.state, options, config, resumed.path);
  return resumed;
}

std::string config_to_keep(const Config& config, const Batches& batches, std::int64_t num_steps) {
  Config kept            = config;
  RateSchedule& schedule = kept.plan.optimizer.schedule;
  if (schedule.kind != RateKind::constant) schedule = with_total_steps(schedule, num_steps);
  JsonValue json = parse_json(to_json(kept), "config");
  if (batches.num_sequences())
    json.set("run", {{"tokens", *batches.data().num_tokens()}, {"sequences", *batches.num_sequences()}});
  return json_line(json);
}

void compare_schedules(const CheckpointState& state, const Config& config, std::int64_t num_steps) {
  const RateSchedule& schedule = config.plan.optimizer.schedule;
  if (schedule.kind == RateKind::constant) return;
  const std::int64_t steps = with_total_steps(schedule, num_steps).steps;
  const JsonValue kept     = kept_value(state, "optimizer", "schedule", "steps");
  if (!kept.is_number() || kept.as_integer() == steps || kept.as_integer() == 0) return;
  say(str("optimizer.schedule: the checkpoint's has ", kept.as_integer(), " steps, this run's ", steps,
          ": the rates are not those of one run (--set optimizer.schedule.steps=", steps, " in both)"));
}

}  // namespace stepgraph::cli
