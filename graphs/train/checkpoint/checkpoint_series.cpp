#include "graphs/train/checkpoint/checkpoint_series.hpp"

#include <filesystem>
#include <system_error>
#include <utility>

#include "graphs/train/checkpoint.hpp"
#include "graphs/train/checkpoint/checkpoint_folder.hpp"

namespace stepgraph {

CheckpointSeries::CheckpointSeries(const CheckpointOptions& options, std::int64_t steps)
    : folder_(options.folder),
      keep_(static_cast<std::size_t>(options.keep)),
      steps_at_start_(steps),
      continues_(is_in_folder(options.loaded, options.folder)) {
  remove_all_leftovers(folder_);
}

void CheckpointSeries::remove_leftovers() {
  if (removing_.joinable()) removing_.join();
  remove_all_leftovers(folder_);
}

void CheckpointSeries::put_others_aside(std::vector<std::string>& names) {
  if (committed_) {
    names.clear();
    return;
  }
  own_.clear();
  for (const CheckpointEntry& entry : list_checkpoints(folder_)) {
    if (!continues_ || entry.steps > steps_at_start_) {
      names.push_back(put_aside_checkpoint(entry.path));
    } else if (entry.problem.empty()) {
      own_.insert(entry.steps);
    }
  }
}

void CheckpointSeries::put_in_place(const std::string& partial, const std::string& path) {
  stepgraph::put_in_place(partial, path);
  committed_ = true;
}

void CheckpointSeries::add(std::int64_t steps) {
  own_.insert(steps);
  if (keep_ == 0 || own_.size() < keep_) return;
  while (own_.size() > keep_) own_.erase(own_.begin());
  std::vector<std::string> gone = detach_older(folder_, *own_.begin());  // those of other runs have been put aside
  if (gone.empty()) return;
  if (removing_.joinable()) removing_.join();
  removing_ = std::jthread([gone = std::move(gone)] {
    std::error_code failed;
    for (const std::string& each : gone) std::filesystem::remove_all(each, failed);
  });
}

}  // namespace stepgraph
