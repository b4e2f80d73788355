#include "tools/stepgraph/train/checkpoints.hpp"

#include <filesystem>
#include <utility>

#include "tools/stepgraph/train/resume.hpp"

namespace stepgraph::cli {
namespace {

std::int64_t bytes_in(const std::string& folder) {
  std::int64_t bytes = 0;
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(folder, failed)) {
    const auto size = entry.file_size(failed);
    if (!failed) bytes += static_cast<std::int64_t>(size);
  }
  return bytes;
}

}  // namespace

TrainCheckpoints::TrainCheckpoints(Trainer& trainer, const Config& config, TrainOutput& output, std::int64_t steps,
                                   const std::string& loaded)
    : plan_(config.checkpoint), output_(output), last_steps_(steps) {
  if (plan_.folder.empty()) return;
  writer_.emplace(
      trainer,
      CheckpointOptions{
          .folder = plan_.folder, .loaded = loaded, .keep = plan_.keep, .async = plan_.async, .replace = true});
}

bool TrainCheckpoints::is_due_by_time() const {
  return writer_ && plan_.every_s > 0 &&
         std::chrono::duration<double>(Clock::now() - last_save_).count() >= plan_.every_s;
}

bool TrainCheckpoints::is_due_after(std::int64_t steps) const {
  return writer_ && plan_.every > 0 && steps % plan_.every == 0;
}

bool TrainCheckpoints::is_written() const { return under_way_ && writer_->is_written(); }

void TrainCheckpoints::save(std::int64_t steps, std::int64_t position, const std::string& config) {
  if (!writer_) return;
  finish();
  if (steps == last_steps_ && !failure_) return;
  last_save_  = Clock::now();
  last_steps_ = steps;
  try {
    writer_->save(position, config);
    under_way_ = true;
  } catch (const Error& error) {
    fail(error);
  }
}

void TrainCheckpoints::finish() {
  if (!under_way_) return;
  under_way_ = false;
  try {
    path_ = writer_->finish().value_or("");
    failure_.reset();
    if (!std::exchange(has_written_, true)) forget_start(plan_.folder);
    const CheckpointFigures& figures = writer_->figures();
    for (const std::string& aside : figures.put_aside)
      output_.print_note(str(aside, ": a checkpoint of another run, put aside (remove it if it is not needed)"));
    if (plan_.async && !figures.async && !std::exchange(said_no_copy_, true))
      output_.print_note("checkpoint.async: there is too little memory for a copy; steps wait for checkpoints");
    output_.print_checkpoint({.step    = last_steps_,
                              .path    = path_,
                              .bytes   = bytes_in(path_),
                              .seconds = std::chrono::duration<double>(Clock::now() - last_save_).count(),
                              .stage_s = figures.staged_s,
                              .write_s = figures.written_s});
  } catch (const Error& error) {
    fail(error);
  }
}

void TrainCheckpoints::fail(const Error& error) {
  failure_.emplace(ErrorKind::run,
                   str("checkpoint after ", last_steps_, last_steps_ == 1 ? " step: " : " steps: ", error.what()));
  output_.print_failed_checkpoint(last_steps_, *failure_);
}

}  // namespace stepgraph::cli
