#include "graphs/schedule/validate.hpp"

#include <algorithm>
#include <array>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

using Kind = ActionKind;
constexpr std::uint16_t bit(Kind kind) { return static_cast<std::uint16_t>(1u << static_cast<unsigned>(kind)); }

class Checker {
 public:
  explicit Checker(const PipelineSchedule& schedule)
      : schedule_(schedule), num_stages_(schedule.num_stages()), num_microbatches_(schedule.num_microbatches) {}

  std::optional<ScheduleFlaw> find() {
    if (check_size() && check_cells() && check_complete() && check_messages() && check_shards()) run();
    return std::move(flaw_);
  }

 private:
  template <class... Parts>
  bool flaw(std::vector<Cell> cells, const Parts&... parts) {
    flaw_ = ScheduleFlaw{str(parts...), std::move(cells)};
    return false;
  }

  [[nodiscard]] std::size_t at(Stage stage, Microbatch microbatch) const {
    return static_cast<std::size_t>(index(stage)) * static_cast<std::size_t>(num_microbatches_) +
           static_cast<std::size_t>(index(microbatch));
  }
  [[nodiscard]] static std::size_t at_stage(const Action& action) {
    return static_cast<std::size_t>(index(action.stage));
  }
  [[nodiscard]] int rank_of(int stage) const { return index(schedule_.rank_of_stage[static_cast<std::size_t>(stage)]); }
  // Whether what the stage makes goes to another rank, in the direction of the forward pass or the other.
  [[nodiscard]] bool crosses(int stage, int next) const {
    return next >= 0 && next < num_stages_ && rank_of(stage) != rank_of(next);
  }

  // Before tables of stages x microbatches are made: there must be actions to fill them.
  bool check_size() {
    if (schedule_.rows.empty()) return flaw({}, "no ranks (at least 1)");
    if (num_stages_ < 1) return flaw({}, "no stages (at least 1)");
    if (num_microbatches_ < 1) return flaw({}, num_microbatches_, " microbatches (at least 1)");
    for (int stage = 0; stage < num_stages_; ++stage) {
      if (rank_of(stage) == -1)
        return flaw(first_above(stage), "no rank has stage ", stage, " of ", num_stages_,
                    " (stages are numbered from 0, without a gap)");
      if (rank_of(stage) < 0 || rank_of(stage) >= schedule_.num_ranks()) {
        return flaw({}, "stage ", stage, " is on rank ", rank_of(stage), " (0 to ", schedule_.num_ranks() - 1, ")");
      }
    }
    for (std::size_t row = 0; row < schedule_.rows.size(); ++row) {
      if (schedule_.rows[row].empty()) return flaw({{row, 0}}, "rank ", row, " does nothing (every rank has a stage)");
    }
    const auto actions = static_cast<std::int64_t>(schedule_.num_actions());
    if (num_stages_ > actions / num_microbatches_) {
      return flaw({}, num_stages_, " stages and ", num_microbatches_, " microbatches, but only ", actions,
                  " actions (at least F and B of each)");
    }
    if (std::int64_t{num_stages_} * num_microbatches_ > max_stage_microbatches)
      return flaw({}, num_stages_, " stages x ", num_microbatches_, " microbatches are too many (at most 2^21 in all)");
    return true;
  }

  // The first cell of a stage beyond one that is not there.
  [[nodiscard]] std::vector<Cell> first_above(int stage) const {
    for (std::size_t row = 0; row < schedule_.rows.size(); ++row) {
      for (std::size_t i = 0; i < schedule_.rows[row].size(); ++i) {
        if (index(schedule_.rows[row][i].stage) > stage) return {{row, i}};
      }
    }
    return {};
  }

  bool check_cells() {
    const auto size = static_cast<std::size_t>(num_stages_) * static_cast<std::size_t>(num_microbatches_);
    seen_.assign(size, 0);
    std::vector<std::uint16_t> seen_of_stage(static_cast<std::size_t>(num_stages_));
    for (std::size_t row = 0; row < schedule_.rows.size(); ++row) {
      for (std::size_t i = 0; i < schedule_.rows[row].size(); ++i) {
        const Action& action = schedule_.rows[row][i];
        const int stage      = index(action.stage);
        if (stage < 0 || stage >= num_stages_)
          return flaw({{row, i}}, action, ": stage ", stage, " (0 to ", num_stages_ - 1, ")");
        if (rank_of(stage) != static_cast<int>(row))
          return flaw({{row, i}}, action, " on rank ", row, ": stage ", stage, " is on rank ", rank_of(stage));
        all_kinds_ |= bit(action.kind);
        if (!has_microbatch(action.kind)) {
          if (action.kind == Kind::reduce_grad && (seen_of_stage[at_stage(action)] & bit(action.kind)))
            return flaw({{row, i}}, action, " a second time (once, after the last W or B)");
          seen_of_stage[at_stage(action)] |= bit(action.kind);
          continue;
        }
        if (index(action.microbatch) < 0 || index(action.microbatch) >= num_microbatches_)
          return flaw({{row, i}}, action, ": microbatch ", action.microbatch, " (0 to ", num_microbatches_ - 1, ")");
        std::uint16_t& seen = seen_[at(action.stage, action.microbatch)];
        if (seen & bit(action.kind)) return flaw({{row, i}}, action, " a second time (once)");
        seen |= bit(action.kind);
        const std::uint16_t split = bit(Kind::input_gradient) | bit(Kind::weight_gradient);
        if ((seen & bit(Kind::backward)) && (seen & split))
          return flaw({{row, i}}, action, ": stage ", stage, " has both B and I or W of microbatch ", action.microbatch,
                      " (either B, or I and W)");
        if (is_transfer(action.kind) && !needs_transfer(action.kind, stage))
          return flaw(
              {{row, i}}, action,
              ": there is no neighbouring stage on another rank (messages only between stages on different ranks)");
      }
    }
    return true;
  }

  [[nodiscard]] bool needs_transfer(Kind kind, int stage) const {
    return crosses(stage, kind == Kind::send_forward || kind == Kind::recv_backward ? stage + 1 : stage - 1);
  }

  [[nodiscard]] bool has_transfers() const {
    return all_kinds_ &
           (bit(Kind::send_forward) | bit(Kind::recv_forward) | bit(Kind::send_backward) | bit(Kind::recv_backward));
  }

  bool check_complete() {
    for (int stage = 0; stage < num_stages_; ++stage) {
      std::uint16_t wanted = bit(Kind::forward);
      for (const Kind kind : {Kind::send_forward, Kind::recv_forward, Kind::send_backward, Kind::recv_backward}) {
        if (has_transfers() && needs_transfer(kind, stage)) wanted |= bit(kind);
      }
      for (int microbatch = 0; microbatch < num_microbatches_; ++microbatch) {
        const std::uint16_t seen = seen_[at(Stage{stage}, Microbatch{microbatch})];
        std::uint16_t missing    = wanted & static_cast<std::uint16_t>(~seen);
        if (seen & bit(Kind::input_gradient)) {
          missing |= bit(Kind::weight_gradient) & static_cast<std::uint16_t>(~seen);
        } else if (!(seen & bit(Kind::backward))) {
          missing |= seen & bit(Kind::weight_gradient) ? bit(Kind::input_gradient) : bit(Kind::backward);
        }
        if (missing == 0) continue;
        unsigned first = 0;
        while (!(missing >> first & 1u)) ++first;
        const Action action{Stage{stage}, static_cast<Kind>(first), Microbatch{microbatch}};
        const auto row = static_cast<std::size_t>(rank_of(stage));
        return flaw({{row, schedule_.rows[row].size()}}, action, " is missing on rank ", row,
                    " (every stage does every microbatch once)");
      }
    }
    return true;
  }

  // As the network pairs them: the k-th message that a stage sends to a neighbour with the k-th that is received.
  bool check_messages() {
    if (!has_transfers()) return true;
    std::vector<std::vector<Microbatch>> sent(2 * static_cast<std::size_t>(num_stages_));  // [2 x stage + backward]
    std::vector<std::size_t> received(sent.size());
    for (const auto& row : schedule_.rows) {
      for (const Action& action : row) {
        if (action.kind == Kind::send_forward) sent[2 * at_stage(action)].push_back(action.microbatch);
        if (action.kind == Kind::send_backward) sent[2 * at_stage(action) + 1].push_back(action.microbatch);
      }
    }
    for (std::size_t row = 0; row < schedule_.rows.size(); ++row) {
      for (std::size_t i = 0; i < schedule_.rows[row].size(); ++i) {
        const Action& action = schedule_.rows[row][i];
        if (action.kind != Kind::recv_forward && action.kind != Kind::recv_backward) continue;
        const bool forward       = action.kind == Kind::recv_forward;
        const auto from          = forward ? 2 * (at_stage(action) - 1) : 2 * (at_stage(action) + 1) + 1;
        const Microbatch message = sent[from][received[from]++];
        if (message == action.microbatch) continue;
        return flaw({{row, i}}, action, " is received when microbatch ", message,
                    " is sent (messages between two stages are received in the order in which they are sent)");
      }
    }
    return true;
  }

  bool check_shards() {
    const bool sharded = all_kinds_ & (bit(Kind::unshard) | bit(Kind::reshard));
    if (!sharded && !(all_kinds_ & bit(Kind::reduce_grad))) return true;
    std::vector<bool> here(static_cast<std::size_t>(num_stages_));
    std::vector<int> summed(static_cast<std::size_t>(num_stages_));
    for (std::size_t row = 0; row < schedule_.rows.size(); ++row) {
      for (std::size_t i = 0; i < schedule_.rows[row].size(); ++i) {
        const Action& action    = schedule_.rows[row][i];
        const std::size_t stage = at_stage(action);
        if (sharded && (is_compute(action.kind) || action.kind == Kind::reshard) && !here[stage])
          return flaw({{row, i}}, action, " needs the gathered weights of stage ", stage, " (after ", stage,
                      "UNSHARD)");
        if (action.kind == Kind::unshard && here[stage])
          return flaw({{row, i}}, action, ": the weights are already gathered");
        if (action.kind == Kind::unshard || action.kind == Kind::reshard) here[stage] = action.kind == Kind::unshard;
        if (action.kind == Kind::weight_gradient || action.kind == Kind::backward) ++summed[stage];
        if (action.kind == Kind::reduce_grad && summed[stage] < num_microbatches_)
          return flaw({{row, i}}, action, " after ", summed[stage], " of ", num_microbatches_,
                      " microbatches (after the last W or B of the stage)");
      }
    }
    return true;
  }

  // Up to two actions that must be done before this one can be; I stands for B, too. Fewer: no_need.
  static constexpr Action no_need{Stage{-1}, Kind::forward, no_microbatch};
  [[nodiscard]] std::array<Action, 2> needs_of(const Action& action) const {
    const auto of = [&](int stage, Kind kind) { return Action{Stage{stage}, kind, action.microbatch}; };
    const int s   = index(action.stage);
    switch (action.kind) {
      case Kind::forward:
        if (s == 0) return {no_need, no_need};
        return {has_transfers() && crosses(s, s - 1) ? of(s, Kind::recv_forward) : of(s - 1, Kind::forward), no_need};
      case Kind::input_gradient:
      case Kind::backward:
        if (s == num_stages_ - 1) return {of(s, Kind::forward), no_need};
        return {of(s, Kind::forward),
                has_transfers() && crosses(s, s + 1) ? of(s, Kind::recv_backward) : of(s + 1, Kind::input_gradient)};
      case Kind::weight_gradient:
      case Kind::send_backward:
        return {of(s, Kind::input_gradient), no_need};
      case Kind::send_forward:
        return {of(s, Kind::forward), no_need};
      case Kind::recv_forward:
        return {of(s - 1, Kind::send_forward), no_need};
      case Kind::recv_backward:
        return {of(s + 1, Kind::send_backward), no_need};
      case Kind::unshard:
      case Kind::reshard:
      case Kind::reduce_grad:
        break;
    }
    return {no_need, no_need};
  }

  // What keeps an action from being done now, or no_need.
  [[nodiscard]] Action waits_for(const Action& action) const {
    for (const Action& need : needs_of(action)) {
      if (need != no_need && !(done_[at(need.stage, need.microbatch)] & bit(need.kind))) return need;
    }
    return no_need;
  }

  // Every rank runs its row until it has to wait. The result does not depend on the order in which ranks are visited.
  bool run() {
    done_.assign(seen_.size(), 0);
    next_.assign(schedule_.rows.size(), 0);
    for (bool progress = true; progress;) {
      progress = false;
      for (std::size_t row = 0; row < schedule_.rows.size(); ++row) {
        const auto& actions = schedule_.rows[row];
        for (; next_[row] < actions.size() && waits_for(actions[next_[row]]) == no_need; ++next_[row]) {
          const Action& action = actions[next_[row]];
          progress             = true;
          if (!has_microbatch(action.kind)) continue;
          done_[at(action.stage, action.microbatch)] |=
              bit(action.kind == Kind::backward ? Kind::input_gradient : action.kind);
        }
      }
    }
    for (std::size_t row = 0; row < schedule_.rows.size(); ++row) {
      if (next_[row] < schedule_.rows[row].size()) return explain_wait(row);
    }
    return true;
  }

  // Goes from rank to rank, each waiting for the next, until one waits for itself or was seen before.
  bool explain_wait(std::size_t row) {
    std::vector<std::size_t> path;
    while (std::find(path.begin(), path.end(), row) == path.end()) {
      path.push_back(row);
      row = static_cast<std::size_t>(rank_of(index(waits_for(head(row)).stage)));
    }
    path.erase(path.begin(), std::find(path.begin(), path.end(), row));
    if (path.size() == 1) {
      return flaw({{row, next_[row]}}, head(row), " comes before ", named(waits_for(head(row))), ", which it needs");
    }
    std::vector<Cell> cells;
    std::string text = "ranks wait for each other:";
    for (const std::size_t each : path) {
      cells.push_back({each, next_[each]});
      text += str(each == path.front() ? " " : "; ", "rank ", each, " at ", head(each), " for ",
                  named(waits_for(head(each))));
    }
    return flaw(std::move(cells), text);
  }

  [[nodiscard]] const Action& head(std::size_t row) const { return schedule_.rows[row][next_[row]]; }
  // An action that is needed, as the schedule writes it.
  [[nodiscard]] Action named(Action need) const {
    if (seen_[at(need.stage, need.microbatch)] & bit(Kind::backward) && need.kind == Kind::input_gradient)
      need.kind = Kind::backward;
    return need;
  }

  const PipelineSchedule& schedule_;
  int num_stages_, num_microbatches_;
  std::vector<std::uint16_t> seen_, done_;  // [stage x microbatch]: kinds
  std::uint16_t all_kinds_ = 0;
  std::vector<std::size_t> next_;  // [rank]: its first action that is not done
  std::optional<ScheduleFlaw> flaw_;
};

}  // namespace

std::optional<ScheduleFlaw> find_flaw(const PipelineSchedule& schedule) { return Checker(schedule).find(); }

ScheduleFacts validate(const PipelineSchedule& schedule) {
  if (const auto flaw = find_flaw(schedule)) {
    throw Error(ErrorKind::config,
                str("schedule: ", flaw->message, flaw->cells.empty() ? "" : "\n", grid_text(schedule, flaw->cells)));
  }
  ScheduleFacts facts;
  std::vector<int> latest(static_cast<std::size_t>(schedule.num_stages()), -1);
  for (const auto& row : schedule.rows) {
    for (const Action& action : row) {
      facts.has_transfers |= is_transfer(action.kind);
      if (action.kind != Kind::weight_gradient && action.kind != Kind::backward) continue;
      int& last = latest[static_cast<std::size_t>(index(action.stage))];
      facts.weights_in_order &= index(action.microbatch) > last;
      last = index(action.microbatch);
    }
  }
  return facts;
}

}  // namespace stepgraph
