#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "tools/stepgraph/logs/record_file.hpp"
#include "tools/stepgraph/logs/train_log.hpp"

namespace stepgraph::cli {

// An event file for TensorBoard, in a folder that may hold those of earlier runs. Tags: train/loss, train/rate,
// train/grad_norm, train/tokens_per_s and eval/loss. It begins with a start mark at `first_step`: TensorBoard then
// ignores values of earlier files from that step on. A value is in the file when add() returns. Throws Error(backend)
// with the system's reason; another record can be tried afterwards.
//
// Format: records (length, checksum of the length, bytes, checksum of the bytes;
// tensorflow/core/lib/io/record_writer.h) of messages `Event` in protobuf's wire format
// (tensorboard/compat/proto/event.proto). Values are floats there.
class TensorboardFile {
 public:
  TensorboardFile(const std::string& folder, std::int64_t first_step);  // makes the folder
  void add(const StepRecord& record);
  void add(const EvalRecord& record);

 private:
  void add_event(std::int64_t step, std::string_view content);
  RecordFile file_;
};

}  // namespace stepgraph::cli
