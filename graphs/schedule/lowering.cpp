#include "graphs/schedule/lowering.hpp"

#include <algorithm>
#include <limits>

#include "engine/base/error.hpp"
#include "graphs/schedule/validate.hpp"

namespace stepgraph {
namespace {

using Kind = ActionKind;

template <class IsThere>
void refuse_again(const PipelineSchedule& schedule, std::string_view pass, const IsThere& is_there) {
  for (const auto& row : schedule.rows) {
    const auto found = std::find_if(row.begin(), row.end(), [&](const Action& a) { return is_there(a.kind); });
    if (found != row.end())
      throw Error(ErrorKind::config, str(pass, ": the schedule has ", *found, " already (a pass is applied once)"));
  }
}

class Transfers {
 public:
  explicit Transfers(const PipelineSchedule& schedule) : in_(schedule), out_(schedule) {
    const auto size = static_cast<std::size_t>(schedule.num_stages()) * microbatches();
    input_.assign(size, false);
    gradient_.assign(size, false);
    next_.assign(schedule.rows.size(), 0);
    left_.assign(schedule.rows.size(), 0);
    for (std::size_t row = 0; row < schedule.rows.size(); ++row) {
      out_.rows[row].clear();
      out_.rows[row].reserve(3 * schedule.rows[row].size());
    }
  }

  // Messages are passed on at the end of a unit of time, so they are in an order of time on all ranks together. It is
  // the order of a run where F, I and W take equally long.
  PipelineSchedule lower() {
    for (bool busy = true; busy;) {
      busy = false;
      for (std::size_t row = 0; row < in_.rows.size(); ++row) busy |= left_[row] > 0 || start(row);
      for (std::size_t row = 0; row < in_.rows.size(); ++row) {
        if (left_[row] > 0 && --left_[row] == 0) end(in_.rows[row][next_[row] - 1]);
      }
    }
    return std::move(out_);
  }

 private:
  // Up to the next compute action, which takes time; the others take none. Returns whether there is one.
  bool start(std::size_t row) {
    while (next_[row] < in_.rows[row].size() && is_ready(in_.rows[row][next_[row]])) {
      const Action& action = in_.rows[row][next_[row]++];
      out_.rows[row].push_back(action);
      if (!is_compute(action.kind)) continue;
      left_[row] = action.kind == Kind::backward ? 2 : 1;
      return true;
    }
    return false;
  }

  void end(const Action& action) {
    if (action.kind == Kind::forward) {
      pass_on(action, index(action.stage) + 1, Kind::send_forward, Kind::recv_forward, input_);
    } else if (action.kind == Kind::input_gradient || action.kind == Kind::backward) {
      pass_on(action, index(action.stage) - 1, Kind::send_backward, Kind::recv_backward, gradient_);
    }
  }

  [[nodiscard]] std::size_t microbatches() const { return static_cast<std::size_t>(in_.num_microbatches); }
  [[nodiscard]] std::size_t at(int stage, Microbatch microbatch) const {
    return static_cast<std::size_t>(stage) * microbatches() + static_cast<std::size_t>(index(microbatch));
  }
  [[nodiscard]] Rank rank_of(int stage) const { return in_.rank_of_stage[static_cast<std::size_t>(stage)]; }

  // What an action needs of its own rank comes before it in its row.
  [[nodiscard]] bool is_ready(const Action& action) const {
    const int stage = index(action.stage);
    if (action.kind == Kind::forward) return stage == 0 || input_[at(stage, action.microbatch)];
    if (action.kind == Kind::input_gradient || action.kind == Kind::backward)
      return stage == in_.num_stages() - 1 || gradient_[at(stage, action.microbatch)];
    return true;
  }

  void pass_on(const Action& action, int to, Kind send, Kind recv, std::vector<bool>& there) {
    if (to < 0 || to >= in_.num_stages()) return;
    there[at(to, action.microbatch)] = true;
    const Rank from                  = rank_of(index(action.stage));
    if (from == rank_of(to)) return;
    out_.rows[static_cast<std::size_t>(index(from))].push_back({action.stage, send, action.microbatch});
    out_.rows[static_cast<std::size_t>(index(rank_of(to)))].push_back({Stage{to}, recv, action.microbatch});
  }

  const PipelineSchedule& in_;
  PipelineSchedule out_;
  std::vector<std::size_t> next_;       // [rank]: its first action that is not lowered yet
  std::vector<int> left_;               // [rank]: units of time until its last action ends
  std::vector<bool> input_, gradient_;  // [stage x microbatch]: what F and I wait for is there
};

// The stages that a row uses next, nearest first.
class NextUses {
 public:
  NextUses(const std::vector<Action>& row, int num_stages) : uses_(static_cast<std::size_t>(num_stages)) {
    for (std::size_t i = row.size(); i-- > 0;) {
      if (!is_compute(row[i].kind)) continue;
      auto& uses = uses_[static_cast<std::size_t>(index(row[i].stage))];
      if (uses.empty()) stages_.push_back(row[i].stage);
      uses.push_back(i);
    }
  }

  // From position i on, which does not go back from call to call.
  std::vector<Stage> from(std::size_t i, std::size_t count) {
    const auto uses = [&](Stage stage) -> std::vector<std::size_t>& {
      return uses_[static_cast<std::size_t>(index(stage))];
    };
    std::vector<Stage> next;
    for (const Stage stage : stages_) {
      while (!uses(stage).empty() && uses(stage).back() < i) uses(stage).pop_back();
      if (!uses(stage).empty()) next.push_back(stage);
    }
    std::sort(next.begin(), next.end(), [&](Stage a, Stage b) { return uses(a).back() < uses(b).back(); });
    if (next.size() > count) next.resize(count);
    return next;
  }

 private:
  std::vector<std::vector<std::size_t>> uses_;  // [stage]: positions, the next one last
  std::vector<Stage> stages_;                   // those of this row
};

bool contains(const std::vector<Stage>& stages, Stage stage) {
  return std::find(stages.begin(), stages.end(), stage) != stages.end();
}

}  // namespace

PipelineSchedule with_send_recv(const PipelineSchedule& schedule) {
  refuse_again(schedule, "with_send_recv", is_transfer);
  validate(schedule);
  return Transfers(schedule).lower();
}

PipelineSchedule with_unshard(const PipelineSchedule& schedule, int max_active) {
  if (max_active < 1) throw Error(ErrorKind::config, str("with_unshard: max_active ", max_active, " (at least 1)"));
  refuse_again(schedule, "with_unshard", [](Kind kind) { return kind == Kind::unshard || kind == Kind::reshard; });
  validate(schedule);
  PipelineSchedule out = schedule;
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    const auto& in = schedule.rows[rank];
    auto& row      = out.rows[rank];
    row.clear();
    NextUses uses(in, schedule.num_stages());
    std::vector<Stage> here;
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (is_compute(in[i].kind)) {
        const std::vector<Stage> next = uses.from(i, static_cast<std::size_t>(max_active));
        for (const Stage stage : here) {
          if (!contains(next, stage)) row.push_back({stage, Kind::reshard});
        }
        std::erase_if(here, [&](Stage stage) { return !contains(next, stage); });
        for (const Stage stage : next) {
          if (contains(here, stage)) continue;
          row.push_back({stage, Kind::unshard});
          here.push_back(stage);
        }
      }
      row.push_back(in[i]);
    }
    for (const Stage stage : here) row.push_back({stage, Kind::reshard});
  }
  return out;
}

PipelineSchedule with_reduce_grad(const PipelineSchedule& schedule) {
  refuse_again(schedule, "with_reduce_grad", [](Kind kind) { return kind == Kind::reduce_grad; });
  validate(schedule);
  PipelineSchedule out = schedule;
  std::vector<int> summed(static_cast<std::size_t>(schedule.num_stages()));
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    out.rows[rank].clear();
    for (const Action& action : schedule.rows[rank]) {
      out.rows[rank].push_back(action);
      if (action.kind != Kind::weight_gradient && action.kind != Kind::backward) continue;
      if (++summed[static_cast<std::size_t>(index(action.stage))] == schedule.num_microbatches)
        out.rows[rank].push_back({action.stage, Kind::reduce_grad});
    }
  }
  return out;
}

}  // namespace stepgraph
