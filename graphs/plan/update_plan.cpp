#include "graphs/plan/update_plan.hpp"

#include "engine/base/error.hpp"

namespace stepgraph {

std::string_view to_string(UpdateWhen mode) noexcept {
  switch (mode) {
    case UpdateWhen::synchronous:
      return "synchronous";
    case UpdateWhen::stale:
      return "stale";
    case UpdateWhen::asynchronous:
      return "asynchronous";
  }
  return "?";
}

void check_update(const UpdatePlan& update) {
  if (update.max_staleness < 0 || update.max_staleness > most_staleness)
    throw Error(ErrorKind::config, str("update.max_staleness: ", update.max_staleness, " (0 to ", most_staleness, ")"));
  if (update.mode == UpdateWhen::synchronous && update.max_staleness != 0)
    throw Error(ErrorKind::config, str("update.max_staleness: ", update.max_staleness,
                                       " with update.mode synchronous (0, or mode stale or asynchronous)"));
}

}  // namespace stepgraph
