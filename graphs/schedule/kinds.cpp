#include "graphs/schedule/kinds.hpp"

#include <algorithm>
#include <string>

#include "engine/base/error.hpp"
#include "engine/base/nearest.hpp"
#include "engine/base/words.hpp"
#include "graphs/schedule/v_kinds.hpp"

namespace stepgraph {
namespace {

constexpr std::array<std::string_view, all_schedule_kinds.size()> kind_names{
    "round-robin", "sequential", "gpipe",  "1f1b",  "interleaved", "zb-h1",
    "zb-h2",       "zb-v",       "v-half", "v-min", "dualpipe-v"};

// One rank's actions, as they are written down.
class Row {
 public:
  Row(const ScheduleSpec& spec, int rank) : spec_(spec), rank_(rank) {}

  void add(ActionKind kind, int chunk, int microbatch) {
    actions_.push_back({Stage{chunk * spec_.ranks + rank_}, kind, Microbatch{microbatch}});
  }
  void forward(int chunk, int microbatch) { add(ActionKind::forward, chunk, microbatch); }
  void backward(int chunk, int microbatch) { add(ActionKind::backward, chunk, microbatch); }
  std::vector<Action> take() { return std::move(actions_); }

 private:
  const ScheduleSpec& spec_;
  int rank_;
  std::vector<Action> actions_;
};

void round_robin(const ScheduleSpec& spec, Row& row) {
  for (int microbatch = 0; microbatch < spec.microbatches; ++microbatch) {
    for (int chunk = 0; chunk < spec.chunks; ++chunk) row.forward(chunk, microbatch);
    for (int chunk = spec.chunks - 1; chunk >= 0; --chunk) row.backward(chunk, microbatch);
  }
}

// All forwards, chunk by chunk, then all backwards.
void forwards_then_backwards(const ScheduleSpec& spec, Row& row, bool last_first) {
  const int m = spec.microbatches;
  for (int chunk = 0; chunk < spec.chunks; ++chunk) {
    for (int microbatch = 0; microbatch < m; ++microbatch) row.forward(chunk, microbatch);
  }
  for (int chunk = spec.chunks - 1; chunk >= 0; --chunk) {
    for (int k = 0; k < m; ++k) row.backward(chunk, last_first ? m - 1 - k : k);
  }
}

void one_f_one_b(const ScheduleSpec& spec, int rank, Row& row) {
  int next = 0;
  for (; next < std::min(spec.microbatches, spec.ranks - rank); ++next) row.forward(0, next);
  for (int microbatch = 0; microbatch < spec.microbatches; ++microbatch) {
    row.backward(0, microbatch);
    if (next < spec.microbatches) row.forward(0, next++);
  }
}

// `first` forwards; then I, a W once more than `late` are waiting, F; the remaining W at the end. For zb_h1 this is the
// order of one_f_one_b: the last warm-up forward and the forward of the first pair are neighbours there.
void zero_bubble(const ScheduleSpec& spec, int first, int late, Row& row) {
  int next = 0, weights = 0;
  for (; next < std::min(spec.microbatches, first); ++next) row.forward(0, next);
  for (int microbatch = 0; microbatch < spec.microbatches; ++microbatch) {
    row.add(ActionKind::input_gradient, 0, microbatch);
    if (microbatch + 1 - weights > late) row.add(ActionKind::weight_gradient, 0, weights++);
    if (next < spec.microbatches) row.forward(0, next++);
  }
  while (weights < spec.microbatches) row.add(ActionKind::weight_gradient, 0, weights++);
}

// Megatron-LM, forward_backward_pipelining_with_interleaving: the k-th forward of a rank goes through its chunks in
// turn, p microbatches of each; the k-th backward likewise from the last chunk.
void interleaved(const ScheduleSpec& spec, int rank, Row& row) {
  const int p = spec.ranks, v = spec.chunks, total = spec.microbatches * v;
  const auto chunk      = [&](int k) { return k % (p * v) / p; };
  const auto microbatch = [&](int k) { return k / (p * v) * p + k % p; };
  const int warm_up     = std::min(total, 2 * (p - 1 - rank) + (v - 1) * p);
  for (int k = 0; k < total + warm_up; ++k) {
    if (k < total) row.forward(chunk(k), microbatch(k));
    if (k >= warm_up) row.backward(v - 1 - chunk(k - warm_up), microbatch(k - warm_up));
  }
}

void fill(ScheduleKind kind, const ScheduleSpec& spec, int rank, Row& row) {
  switch (kind) {
    case ScheduleKind::round_robin:
      return round_robin(spec, row);
    case ScheduleKind::sequential:
      return forwards_then_backwards(spec, row, true);
    case ScheduleKind::gpipe:
      return forwards_then_backwards(spec, row, false);
    case ScheduleKind::one_f_one_b:
      return one_f_one_b(spec, rank, row);
    case ScheduleKind::interleaved:
      return spec.chunks == 1 ? one_f_one_b(spec, rank, row) : interleaved(spec, rank, row);
    case ScheduleKind::zb_h1:
      return zero_bubble(spec, spec.ranks - rank, rank, row);
    case ScheduleKind::zb_h2:
      return zero_bubble(spec, 2 * (spec.ranks - 1 - rank) + 1, 2 * rank, row);
    default:
      return;  // V-shaped kinds make all rows together
  }
}

std::vector<std::vector<Action>> v_rows(ScheduleKind kind, const ScheduleSpec& spec) {
  switch (kind) {
    case ScheduleKind::zb_v:
      return zb_v(spec.ranks, spec.microbatches);
    case ScheduleKind::v_half:
      return v_half(spec.ranks, spec.microbatches);
    case ScheduleKind::v_min:
      return v_min(spec.ranks, spec.microbatches);
    default:
      return dualpipe_v(spec.ranks, spec.microbatches);
  }
}

// With the number of chunks that 0 stands for.
ScheduleSpec with_chunks(ScheduleKind kind, ScheduleSpec spec) {
  if (spec.chunks == 0) spec.chunks = usual_chunks(kind);
  return spec;
}

}  // namespace

void check_schedule_spec(ScheduleKind kind, const ScheduleSpec& given) {
  const ScheduleSpec spec = with_chunks(kind, given);
  const auto refuse       = [&](const std::string& why) { throw Error(ErrorKind::config, str(kind, ": ", why)); };
  if (spec.ranks < 1) refuse(str(spec.ranks, " pipeline ranks (at least 1)"));
  if (spec.microbatches < 1) refuse(str(spec.microbatches, " microbatches (at least 1)"));
  if (spec.chunks < 1) refuse(str(spec.chunks, " chunks (at least 1)"));
  // Each factor is below 2^31, so that the first product fits in 64 bits; the second is only formed when it does.
  const std::int64_t stages = std::int64_t{spec.ranks} * spec.chunks;
  if (stages > max_stage_microbatches || stages * spec.microbatches > max_stage_microbatches) {
    refuse(str(spec.ranks, " ranks x ", spec.chunks, " chunks x ", spec.microbatches,
               " microbatches are too many (at most 2^21 in all, for which a graph takes 1.6 GiB)"));
  }
  const bool one_chunk =
      kind == ScheduleKind::one_f_one_b || kind == ScheduleKind::zb_h1 || kind == ScheduleKind::zb_h2;
  if (one_chunk && spec.chunks != 1) {
    refuse(str(spec.chunks, " chunks (1; round-robin, sequential, gpipe and interleaved can have more)"));
  }
  if (is_v_shaped(kind) && spec.chunks != 2) {
    refuse(
        str(spec.chunks, spec.chunks == 1 ? " chunk" : " chunks", " (2: rank r has stages r and 2 x ranks - 1 - r)"));
  }
  if (kind == ScheduleKind::interleaved && spec.chunks > 1 && spec.microbatches % spec.ranks != 0) {
    refuse(str(spec.microbatches, " microbatches with ", spec.chunks, " chunks on ", spec.ranks,
               " ranks (microbatches a multiple of ", spec.ranks, ")"));
  }
}

std::string_view to_string(ScheduleKind kind) noexcept { return kind_names[static_cast<std::size_t>(kind)]; }

ScheduleKind parse_schedule_kind(std::string_view name, std::span<const std::string_view> others) {
  std::vector<std::string_view> known;
  for (const ScheduleKind kind : all_schedule_kinds) {
    if (to_string(kind) == name) return kind;
    known.push_back(to_string(kind));
  }
  known.insert(known.end(), others.begin(), others.end());
  throw Error(ErrorKind::config, str("unknown kind '", name, "' (", did_you_mean(name, known), "known: ",
                                     join_text(known, ", ", [](std::string_view each) { return each; }), ")"));
}

std::vector<Rank> looped_placement(int ranks, int chunks) {
  std::vector<Rank> placement;
  for (int stage = 0; stage < ranks * chunks; ++stage) placement.push_back(Rank{stage % ranks});
  return placement;
}

std::vector<Rank> v_placement(int ranks) {
  std::vector<Rank> placement;
  for (int stage = 0; stage < 2 * ranks; ++stage) placement.push_back(Rank{std::min(stage, 2 * ranks - 1 - stage)});
  return placement;
}

std::vector<Rank> placement_of(ScheduleKind kind, int ranks, int chunks) {
  if (is_v_shaped(kind)) return v_placement(ranks);
  return looped_placement(ranks, chunks == 0 ? usual_chunks(kind) : chunks);
}

PipelineSchedule pipeline_schedule(ScheduleKind kind, const ScheduleSpec& given) {
  check_schedule_spec(kind, given);
  const ScheduleSpec spec = with_chunks(kind, given);
  PipelineSchedule schedule{.rank_of_stage    = placement_of(kind, spec.ranks, spec.chunks),
                            .num_microbatches = spec.microbatches};
  if (is_v_shaped(kind)) {
    schedule.rows = v_rows(kind, spec);
    return schedule;
  }
  for (int rank = 0; rank < spec.ranks; ++rank) {
    Row row(spec, rank);
    fill(kind, spec, rank, row);
    schedule.rows.push_back(row.take());
  }
  return schedule;
}

}  // namespace stepgraph
