#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "engine/base/error.hpp"

namespace stepgraph {
class StepRun;
}

namespace stepgraph::cli {

// How a training run has ended. An error of one thing does not stop the others.
struct TrainEnd {
  std::int64_t steps            = 0;   // that are completed
  std::int64_t num_steps        = 0;   // in all
  std::optional<Error> failure  = {};  // of a step, the data or an evaluation
  int signal                    = 0;   // that has ended the run early; 0: none
  bool output_closed            = false;
  std::string saved             = {};  // for messages: where the model is, or why it was not saved
  std::string checkpoint        = {};  // the last one; empty: none
  std::optional<Error> no_model = {}, no_checkpoint = {}, no_output = {}, no_gradients = {}, no_trace = {},
                       no_records = {};
};

// --save: the model, if it was trained. Sets `saved` and `no_model`. Collective.
void save_trained(const StepRun& run, const std::string& folder, TrainEnd& end);

// Throws unless all is well: one Error with the text of all, Interrupted, or OutputClosed.
void throw_if_flawed(const TrainEnd& end);

}  // namespace stepgraph::cli
