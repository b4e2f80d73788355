#include "graphs/schedule/v_kinds.hpp"

#include <algorithm>
#include <array>
#include <deque>

namespace stepgraph {
namespace {

using Rows = std::vector<std::vector<Action>>;

constexpr auto F = ActionKind::forward, I = ActionKind::input_gradient, W = ActionKind::weight_gradient,
               B = ActionKind::backward;

// One rank's row. Each chunk takes its microbatches in order, so an action needs no number. Microbatches from
// `microbatches` on are left out: an order without some of its microbatches is still an order that can run.
class VRow {
 public:
  VRow(int ranks, int rank, int microbatches)
      : stages_{Stage{rank}, Stage{2 * ranks - 1 - rank}}, microbatches_(microbatches) {}

  // B counts as I: a chunk has one or the other of a microbatch.
  void add(ActionKind kind, int chunk) {
    const auto at   = static_cast<std::size_t>(chunk);
    int& microbatch = (kind == F ? forwards_ : gradients_)[at];
    if (kind == I) waiting_.push_back({stages_[at], W, Microbatch{microbatch}});
    push({stages_[at], kind, Microbatch{microbatch++}});
  }
  // W of the oldest I that has none yet; nothing where all have one.
  void add_weights() {
    if (waiting_.empty()) return;
    push(waiting_.front());
    waiting_.pop_front();
  }
  // Likewise of one chunk.
  bool add_weights(int chunk) {
    const auto is_of = [&](const Action& action) { return action.stage == stages_[static_cast<std::size_t>(chunk)]; };
    const auto found = std::find_if(waiting_.begin(), waiting_.end(), is_of);
    if (found == waiting_.end()) return false;
    push(*found);
    waiting_.erase(found);
    return true;
  }
  [[nodiscard]] int num_forwards(int chunk) const { return forwards_[static_cast<std::size_t>(chunk)]; }
  std::vector<Action> take() { return std::move(actions_); }

 private:
  void push(const Action& action) {
    if (index(action.microbatch) < microbatches_) actions_.push_back(action);
  }

  std::array<Stage, 2> stages_;
  int microbatches_;
  std::array<int, 2> forwards_{}, gradients_{};  // by chunk: the next microbatch
  std::deque<Action> waiting_;
  std::vector<Action> actions_;
};

template <class Fill>
Rows rows_of(int ranks, int microbatches, const Fill& fill) {
  Rows rows;
  for (int rank = 0; rank < ranks; ++rank) {
    VRow row(ranks, rank, microbatches);
    fill(row, rank);
    rows.push_back(row.take());
  }
  return rows;
}

// Times of one microbatch on one rank where F, I and W of a chunk take 1. A microbatch starts every 6: a rank then does
// six actions. The times of F and I differ modulo 6, so actions of different microbatches do not collide.
struct BuildingBlock {
  int slope_down = 1;          // time from F of chunk 0 to that of the next rank; also of I of chunk 1
  int slope_up   = 1;          // likewise to the rank before: F of chunk 1, I of chunk 0
  int f1 = 0, i1 = 0, i0 = 0;  // on rank 0; F of chunk 0 is at 0
};

// F and I in the order of the block. W is done where a rank would wait, or where it holds `most_held` chunks. That is
// at least what the block holds if each W has its own place in the 6: then there is always a W to do, or an F fits.
Rows repeated(int ranks, int microbatches, const BuildingBlock& block, int most_held) {
  struct Timed {
    int time;
    Action action;
  };
  const auto at  = [](Stage stage) { return static_cast<std::size_t>(index(stage)); };
  const int last = 2 * ranks - 1;
  std::vector<std::vector<Timed>> order(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    auto& row = order[static_cast<std::size_t>(rank)];
    const Stage down{rank}, up{last - rank};
    const int later = rank * block.slope_down, earlier = rank * block.slope_up;
    for (int microbatch = 0; microbatch < microbatches; ++microbatch) {
      const Microbatch mb{microbatch};
      const int start = 6 * microbatch;
      row.insert(row.end(), {{start + later, {down, F, mb}},
                             {start + block.f1 - earlier, {up, F, mb}},
                             {start + block.i1 + later, {up, I, mb}},
                             {start + block.i0 - earlier, {down, I, mb}}});
    }
    std::sort(row.begin(), row.end(), [](const Timed& a, const Timed& b) { return a.time < b.time; });
  }
  std::vector<int> forwards(at(Stage{last}) + 1), gradients(forwards);  // [stage]: microbatches done
  const auto is_ready = [&](const Action& action) {
    const std::size_t stage = at(action.stage);
    const int microbatch    = index(action.microbatch);
    if (action.kind == F) return stage == 0 || forwards[stage - 1] > microbatch;
    return index(action.stage) == last || gradients[stage + 1] > microbatch;
  };
  Rows rows(order.size());
  std::vector<std::deque<Action>> waiting(order.size());  // [rank]: W that could be done
  std::vector<std::size_t> next(order.size());
  std::vector<int> held(order.size());
  for (bool busy = true; busy;) {  // one unit of time
    std::vector<Action> done;
    for (std::size_t rank = 0; rank < order.size(); ++rank) {
      const Action* action = next[rank] < order[rank].size() ? &order[rank][next[rank]].action : nullptr;
      if (action && is_ready(*action) && (action->kind == I || held[rank] < most_held)) {
        ++next[rank];
        done.push_back(*action);
        if (action->kind == I) waiting[rank].push_back({action->stage, W, action->microbatch});
        held[rank] += action->kind == F;
      } else if (!waiting[rank].empty()) {
        done.push_back(waiting[rank].front());
        waiting[rank].pop_front();
        --held[rank];
      } else {
        continue;
      }
      rows[rank].push_back(done.back());
    }
    for (const Action& action : done) {
      if (action.kind == F) ++forwards[at(action.stage)];
      if (action.kind == I) ++gradients[at(action.stage)];
    }
    busy = !done.empty();
  }
  return rows;
}

}  // namespace

// The order of torch.distributed.pipelining, ScheduleZBVZeroBubble. With fewer than 2p - 1 microbatches it is the order
// for 2p - 1 without those that are too many.
Rows zb_v(int ranks, int microbatches) {
  const int most = std::max(2 * ranks - 1, microbatches);
  return rows_of(ranks, microbatches, [&](VRow& row, int rank) {
    const auto I_and_W = [&](int chunk) {
      row.add(I, chunk);
      row.add_weights(chunk);
    };
    for (int k = 0; k < 2 * (ranks - rank) - 1; ++k) row.add(F, 0);
    for (int k = 0; k < rank; ++k) {
      row.add(F, 1);
      row.add(F, 0);
    }
    for (int k = 0; k < ranks - rank; ++k) {
      row.add(F, 1);
      I_and_W(1);
    }
    while (row.num_forwards(1) < most) {
      if (row.num_forwards(0) < most) row.add(F, 0);
      I_and_W(0);
      row.add(F, 1);
      I_and_W(1);
    }
    for (int k = 0; k < rank; ++k) {
      row.add(I, 0);
      row.add(I, 1);
    }
    for (int k = 0; k < ranks - rank; ++k) {
      row.add(I, 0);
      row.add_weights(0);
    }
    for (const int chunk : {1, 0}) {
      while (row.add_weights(chunk)) {
      }
    }
  });
}

// The order of torch.distributed.pipelining, ScheduleDualPipeV, with a pair of F and B that overlap written as F, then
// B. That needs 2p microbatches; with fewer, it is the order for 2p without those that are too many.
Rows dualpipe_v(int ranks, int microbatches) {
  const int most = std::max(2 * ranks, microbatches);
  return rows_of(ranks, microbatches, [&](VRow& row, int rank) {
    const int after = ranks - 1 - rank;  // ranks after this one
    for (int k = 0; k < 2 * after; ++k) row.add(F, 0);
    for (int k = 0; k <= rank; ++k) {
      row.add(F, 0);
      row.add(F, 1);
    }
    for (int k = 0; k < after; ++k) {
      row.add(I, 1);
      row.add_weights();
      row.add(F, 1);
    }
    for (int k = 0; k < most - 2 * ranks + rank + 1 + after; ++k) {
      if (row.num_forwards(0) < most) row.add(F, 0);
      row.add(B, 1);
      row.add(F, 1);
      row.add(B, 0);
    }
    // The second half of the last pairs is split, so that W fill the end.
    ActionKind kind = B;
    for (int k = 0; k <= rank; ++k) {
      if (k == (rank + 1) / 2 && rank % 2 == 1) kind = I;
      row.add(kind, 1);
      if (k == (rank + 1) / 2 && rank % 2 == 0) kind = I;
      row.add(kind, 0);
    }
    for (int k = 0; k < after; ++k) {
      row.add_weights();
      row.add(kind, 0);
    }
    for (int k = 0; k <= rank; ++k) row.add_weights();
  });
}

// The building blocks are those of Pipeline Parallelism with Controllable Memory (Qi et al. 2024): a block's chunks
// live for about 6p and 4p units together, of which 6 are one chunk. The constants are the least for which no two
// actions collide.
Rows v_half(int ranks, int microbatches) {
  const int f1 = 3 * (ranks - 1) + 1, i1 = f1 + (ranks % 2 == 0 ? 4 : 1), i0 = i1 + 3 * (ranks - 1) + 2;
  return repeated(ranks, microbatches, {.slope_down = 2, .f1 = f1, .i1 = i1, .i0 = i0}, ranks + 2);
}

Rows v_min(int ranks, int microbatches) {
  const int f1 = 2 * ranks - 1, i1 = f1 + (ranks % 3 == 0 ? 3 : 1), i0 = i1 + 2 * ranks - 1;
  return repeated(ranks, microbatches, {.f1 = f1, .i1 = i1, .i0 = i0}, (2 * (ranks + 4) + 1) / 3);
}

}  // namespace stepgraph
