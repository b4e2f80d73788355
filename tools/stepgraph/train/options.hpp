#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "tools/stepgraph/session/config_options.hpp"

namespace stepgraph::cli {

// The arguments of `stepgraph train`.
struct TrainOptions {
  ConfigOptions config;
  std::optional<std::int64_t> steps, log_every;
  std::optional<std::string> save, dump_grads, trace, flight, log, tensorboard;
  std::optional<std::string> resume;  // empty: from the newest checkpoint of checkpoint.folder
  bool restarted   = false;           // by launch, after a failure
  bool restartable = false;           // launch will start it again after a failure
  bool force       = false;

  [[nodiscard]] bool resumes() const noexcept { return resume || restarted; }
};

}  // namespace stepgraph::cli
