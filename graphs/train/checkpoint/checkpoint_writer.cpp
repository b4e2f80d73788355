#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/partial.hpp"
#include "engine/run/packed.hpp"
#include "graphs/train/checkpoint.hpp"
#include "graphs/train/checkpoint/checkpoint_files.hpp"
#include "graphs/train/checkpoint/checkpoint_folder.hpp"
#include "graphs/train/checkpoint/checkpoint_series.hpp"
#include "graphs/train/waiting_gradients.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;
using Clock  = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The most bytes that can be allocated, as far as the system tells.
std::int64_t available_bytes() {
  std::int64_t available = INT64_MAX;
  std::ifstream memory("/proc/meminfo");
  for (std::string word; memory >> word;) {
    if (std::int64_t kib = 0; word == "MemAvailable:" && memory >> kib) available = kib * 1024;
  }
  std::int64_t most = 0, current = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> most && std::ifstream("/sys/fs/cgroup/memory.current") >> current)
    available = std::min(available, most - current);
  return available;
}

Error as_error(std::string_view subject) {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return {ErrorKind::run, str(subject, ": ", error.what())};
  }
}

}  // namespace

std::int64_t CheckpointFigures::num_bytes() const noexcept {
  std::int64_t sum = 0;
  for (const std::int64_t bytes : rank_bytes) sum += bytes;
  return sum;
}

struct CheckpointWriter::Impl {
  Trainer& trainer;
  CheckpointOptions options;
  TensorNumbers numbers;
  std::unique_ptr<CheckpointFiles> files = {};  // of this process
  int num_replaced                       = 0;   // Trainer::num_replaced when the files were planned
  CheckpointFigures figures              = {};
  int num_processes_here                 = 1;   // processes on this machine, which share its memory
  std::optional<CheckpointSeries> series = {};  // in process 0

  // Of the save that is under way.
  bool under_way             = false;
  std::optional<Run> run     = {};
  std::optional<Error> error = {};  // of this process
  Partial folder             = {};  // process 0: the temporary folder
  std::string folder_name    = {};  // its name, in all processes
  std::string path           = {};
  CheckpointState state      = {};

  Impl(Trainer& of, CheckpointOptions wanted)
      : trainer(of), options(std::move(wanted)), numbers(of.run().step().model) {
    plan_files();
    if (peers() != nullptr) num_processes_here = num_on_machine(*peers());
    if (trainer.run().is_first()) series.emplace(options, trainer.num_steps());
  }

  ~Impl() { remove_folder(); }

  // The files of this process: other ones when the trainer has another run.
  void plan_files() {
    figures            = {};
    num_replaced       = trainer.num_replaced();
    files              = std::make_unique<CheckpointFiles>(trainer.run(), numbers);
    figures.ranks      = files->ranks();
    figures.rank_bytes = files->rank_bytes();
  }

  // The temporary folder of a checkpoint that did not get its name.
  void remove_folder() noexcept {
    std::error_code ignored;
    if (!folder.name.empty()) fs::remove_all(folder.name, ignored);
    folder = {};
  }

  [[nodiscard]] Peers* peers() const { return trainer.run().peers(); }

  void prepare() {
    if (files->is_built()) return;
    // A copy that does not fit would end the process: it is better to wait for the disk.
    figures.async = options.async && figures.num_bytes() < available_bytes() / num_processes_here / 10 * 9;
    try {
      files->build(figures.async);
    } catch (const std::exception&) {  // such as no memory for the copy
      if (!std::exchange(figures.async, false)) throw;
      files->build(false);
    }
  }

  // Process 0 makes the temporary folder, and tells its name.
  void make_folder() {
    in_first(peers(), "the folder of a checkpoint", [&] {
      create_folder(options.folder);
      series->remove_leftovers();
      if (!options.replace && is_whole_checkpoint(path))
        throw Error(ErrorKind::config, str(path, ": a checkpoint of this step exists (another folder, or resume)"));
      folder = make_partial(path, true);
      if (const int reason = errno; !folder.descriptor.is_open())
        throw Error(ErrorKind::backend, str(path, ": cannot be created: ", system_reason(reason)));
    });
    folder_name = folder.name;
    if (peers() != nullptr)
      folder_name = to_text(peers()->broadcast("the folder of a checkpoint", to_bytes(folder_name)));
  }

  [[nodiscard]] CheckpointState state_of_trainer(std::int64_t position, std::string config) const {
    const StepRun& step_run = trainer.run();
    const StepRank& rank    = step_run.step().ranks.front();
    CheckpointState made{.steps    = trainer.num_steps(),
                         .updates  = trainer.num_updates(),
                         .position = position,
                         .seq      = step_run.step().batch.seq,
                         .seed     = trainer.seed(),
                         .config   = std::move(config)};
    const Memory& memory = step_run.memory();
    if (rank.loss_scale != Buffer{})
      made.loss_scale = {.scale      = memory.first<double>(rank.loss_scale),
                         .good_steps = rank.good_steps == Buffer{} ? 0 : memory.first<std::int64_t>(rank.good_steps)};
    made.waiting = waiting_state(trainer, step_run);
    return made;
  }

  void save(std::int64_t position, std::string config) {
    const auto start = Clock::now();
    if (!trainer.run().has_weights()) set_fresh_weights(trainer.run(), trainer.seed());
    trainer.flush();
    if (num_replaced != trainer.num_replaced()) plan_files();
    state = state_of_trainer(position, std::move(config));
    path  = (fs::path(options.folder) / checkpoint_folder_name(state.steps)).string();
    make_folder();
    under_way = true;
    try {
      prepare();
      if (figures.async) files->stage();
      run = files->start(folder_name);
      if (!figures.async) run->get(), run.reset();
    } catch (...) {
      run.reset();
      error = as_error("checkpoint");
    }
    figures.staged_s = seconds_since(start);
  }

  void wait() {
    if (!run) return;
    try {
      run->get();
    } catch (...) {
      error = as_error("checkpoint");
    }
    run.reset();
  }

  // Gives the files of all processes to process 0. In it, `manifest` then has all files.
  void collect(CheckpointManifest& manifest) {
    Packer mine;
    pack(mine, error);
    if (!error) {
      for (const CheckpointFile& file : files->entries()) pack(mine, file);
    }
    std::vector<Bytes> all;
    if (peers() != nullptr) {
      all = peers()->gather("the files of a checkpoint", mine.take());
    } else {
      all.push_back(mine.take());
    }
    for (std::size_t process = 0; process < all.size(); ++process) {
      Unpacker received(all[process]);
      if (received.get<bool>()) {
        const auto kind = received.get<ErrorKind>();
        throw Error(kind, str(peers() == nullptr ? "" : str("process ", process, ": "), received.get_text()));
      }
      while (!received.empty()) manifest.files.push_back(unpack_checkpoint_file(received));
    }
  }

  void commit(CheckpointManifest& manifest) {
    const Model& model    = trainer.run().step().model;
    manifest.state        = state;
    manifest.optimizer    = to_string(trainer.run().step().optimizer);
    manifest.model_config = model.config.empty() ? str("{\"model_type\": \"", model.kind, "\"}") : model.config;
    manifest.tensors      = numbers.tensors();
    std::ranges::sort(manifest.files, {}, &CheckpointFile::name);
    check_coverage(manifest, path);
    for (const CheckpointFile& file : manifest.files) {
      std::error_code missing;
      const fs::path there = fs::path(folder.name) / file.name;
      if (const auto size = fs::file_size(there, missing); missing || std::cmp_not_equal(size, file.num_bytes))
        throw Error(ErrorKind::config,
                    str(there.string(), ": is missing or has another size than the process that wrote it says (",
                        "a folder that all processes share)"));
    }
    write_text((fs::path(folder.name) / "manifest.json").string(), to_json(manifest));
    sync_folder(folder.name);
    series->put_others_aside(figures.put_aside);
    series->put_in_place(folder.name, path);
    folder = {};
    sync_folder(options.folder);
    series->add(state.steps);
  }

  std::optional<std::string> finish() {
    if (!under_way) return std::nullopt;
    wait();
    files->close();
    under_way         = false;
    figures.written_s = files->written_s();
    std::optional<Error> failed;
    try {
      // The folder of process 0 may be on another machine.
      if (!error && !trainer.run().is_first()) sync_folder(folder_name);
    } catch (...) {
      error = as_error(path);
    }
    try {
      CheckpointManifest manifest;
      collect(manifest);
      if (trainer.run().is_first()) commit(manifest);
    } catch (...) {
      failed = as_error(path);
    }
    remove_folder();
    error.reset();
    if (peers() != nullptr) peers()->require_success("a checkpoint", failed);
    if (failed) throw *failed;
    return path;
  }
};

CheckpointWriter::CheckpointWriter(Trainer& trainer, CheckpointOptions options) {
  if (options.folder.empty()) throw Error(ErrorKind::config, "checkpoint: the folder is empty (a folder name)");
  if (options.keep < 0) throw Error(ErrorKind::config, str("checkpoint: keep ", options.keep, " (0 or more)"));
  if (trainer.run().step().ranks.front().grad_norm == Buffer{})
    throw Error(ErrorKind::config, "checkpoint: the step does not train");
  impl_ = std::make_unique<Impl>(trainer, std::move(options));
}

CheckpointWriter::~CheckpointWriter() {
  if (!impl_->run) return;
  impl_->run->cancel("the checkpoint was not finished");
  impl_->wait();
}

void CheckpointWriter::save(std::int64_t position, std::string config) {
  finish();
  impl_->save(position, std::move(config));
}

bool CheckpointWriter::is_written() const noexcept {
  try {
    return !impl_->run || impl_->run->done();
  } catch (...) {  // finish() reports it
    return true;
  }
}

std::optional<std::string> CheckpointWriter::finish() { return impl_->finish(); }
const CheckpointFigures& CheckpointWriter::figures() const noexcept { return impl_->figures; }

}  // namespace stepgraph
