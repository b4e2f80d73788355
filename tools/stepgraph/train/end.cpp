#include "tools/stepgraph/train/end.hpp"

#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/terminal/interrupt.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {

void save_trained(const StepRun& run, const std::string& folder, TrainEnd& end) {
  if (end.steps == 0 && end.num_steps > 0) {
    end.saved = "; not saved: no step was completed";
    return;
  }
  try {
    save_model(run, folder);
  } catch (const Error& error) {
    end.no_model = error;
    return;
  }
  end.saved = str("; model saved in ", folder,
                  end.failure ? str(": the weights after ", end.steps, end.steps == 1 ? " step" : " steps") : "");
}

void throw_if_flawed(const TrainEnd& end) {
  std::string more;
  std::optional<Error> first = end.failure;
  const auto add             = [&](const std::optional<Error>& error) {
    if (!error) return;
    if (first) {
      more += str("; ", error->what());
    } else {
      first = error;
    }
  };
  add(end.no_model);
  add(end.no_checkpoint);
  if (!first && end.signal != 0) {
    if (!end.checkpoint.empty()) more = str("; checkpoint ", end.checkpoint);
    for (const std::optional<Error>* error : {&end.no_gradients, &end.no_trace, &end.no_records})
      if (*error) more += str("; ", (*error)->what());
    throw Interrupted(end.signal,
                      str("interrupted after ", end.steps, " of ", end.num_steps, " steps", end.saved, more));
  }
  add(end.no_output);
  add(end.no_gradients);
  add(end.no_trace);
  add(end.no_records);
  if (first) throw Error(first->kind(), str(first->what(), end.saved, more));
  if (end.output_closed) throw OutputClosed{};
}

}  // namespace stepgraph::cli
