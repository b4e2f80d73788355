#include "graphs/schedule/search/timer.hpp"

#include <algorithm>
#include <cstring>

namespace stepgraph::search {

RowTimer::RowTimer(const Setting& setting) : setting_(setting) {
  const int last = setting.num_stages() - 1;
  uses_.resize(size(setting.ranks) * 3 * most_chunks);
  for (int rank = 0; rank < setting.ranks; ++rank) {
    const std::vector<int> stages = setting.stages_of(rank);
    for (int slot = 0; slot < setting.chunks; ++slot) {
      const int stage    = stages[size(slot)];
      Use* const of_slot = uses_.data() + size(rank) * 3 * most_chunks + size(3 * slot);
      of_slot[F]         = {.time = setting.cost(stage).F, .makes = 2 * stage + F};
      of_slot[I]         = {.time = setting.cost(stage).I, .makes = 2 * stage + I};
      of_slot[W]         = {.time = setting.cost(stage).W};
      if (stage > 0) {
        of_slot[F].needs    = 2 * (stage - 1) + F;
        of_slot[F].transfer = setting.transfer(stage - 1, stage);
        of_slot[I].wakes    = setting.rank_of(stage - 1);
      }
      if (stage < last) {
        of_slot[I].needs    = 2 * (stage + 1) + I;
        of_slot[I].transfer = setting.transfer(stage + 1, stage);
        of_slot[F].wakes    = setting.rank_of(stage + 1);
      }
    }
    works_.push_back(setting.work(rank));
  }
  const std::size_t ranks = size(setting.ranks);
  for (auto* const list : {&first_, &next_, &waits_, &waits_number_}) list->resize(ranks);
  for (auto* const list : {&spans_, &kept_spans_, &free_at_, &idle_, &allowed_idle_}) list->resize(ranks);
  done_.resize(2 * size(setting.num_stages()));
  ready_.resize(done_.size() * size(setting.microbatches));
  begins_.resize(ranks * size(setting.row_length()));
  counts_.resize(begins_.size());
}

bool RowTimer::set(const Rows& rows, double at_most) {
  rows_    = rows;
  is_kept_ = false;
  for (int rank = 0; rank < setting_.ranks; ++rank) count(rank, 0, rows_.length - 1);
  std::fill(first_.begin(), first_.end(), 0);
  return time_from(first_, at_most);
}

// Counts of positions low to high; those of `low` follow from the position before.
void RowTimer::count(int rank, int low, int high) {
  const Letter* const row = rows_.row(rank);
  LetterCounts counts{};
  if (low > 0) {
    counts = counts_[at(rank, low - 1)];
    ++counts[row[low - 1]];
  }
  for (int i = low; i <= high; ++i) {
    counts_[at(rank, i)] = counts;
    ++counts[row[i]];
  }
}

// Whether the row is in order and within the limit at positions low to high; the rest of it was so before.
bool RowTimer::may_move(int rank, int low, int high) const {
  const Letter* const row = rows_.row(rank);
  LetterCounts counts     = counts_[at(rank, low)];
  for (int i = low; i <= high; ++i) {
    const Letter letter = row[i];
    ++counts[letter];
    if (kind_of(letter) != F) {
      if (counts[letter] > counts[letter - 1u]) return false;
      continue;
    }
    int whole = 0, retained = 0;
    for (int first = 0; first < 3 * setting_.chunks; first += 3) {
      whole += counts[size(first)] - counts[size(first + I)];
      retained += counts[size(first + I)] - counts[size(first + W)];
    }
    if (setting_.activation(whole, retained) > setting_.limit) return false;
  }
  return true;
}

double RowTimer::move(int rank, int from, int to, double at_most) {
  begin_change();
  Letter* const row = rows_.row(rank);
  const auto shift  = [&](int a, int b) {
    a < b ? std::rotate(row + a, row + a + 1, row + b + 1) : std::rotate(row + b, row + a, row + a + 1);
  };
  const int low = std::min(from, to), high = std::max(from, to);
  shift(from, to);
  if (!may_move(rank, low, high)) {
    shift(to, from);
    return never;
  }
  changes_.push_back({rank, low, high});
  return time_change(at_most);
}

double RowTimer::replace(const Rows& rows, double at_most) {
  begin_change();
  for (int rank = 0; rank < setting_.ranks; ++rank) {
    Letter* const row          = rows_.row(rank);
    const Letter* const wanted = rows.row(rank);
    const auto low             = std::mismatch(row, row + rows_.length, wanted).first - row;
    if (low == rows_.length) continue;
    auto high = rows_.length - 1;
    while (row[high] == wanted[high]) --high;
    std::copy(wanted + low, wanted + high + 1, row + low);
    changes_.push_back({rank, static_cast<int>(low), high});
  }
  return time_change(at_most);
}

void RowTimer::begin_change() {
  changes_.clear();
  if (is_kept_) return;
  kept_rows_   = rows_;
  kept_begins_ = begins_;
  kept_ready_  = ready_;
  is_kept_     = true;
}

double RowTimer::time_change(double at_most) {
  // An action that a change can affect comes after an action of the changed part of a row, so it starts no earlier than
  // the action before that part ends.
  double since = never;
  for (const auto& [rank, low, high] : changes_) {
    count(rank, low, high);
    since = std::min(since, low == 0 ? 0 : end(rank, low - 1));
  }
  for (int rank = 0; rank < setting_.ranks; ++rank) {
    const double* const begins = begins_.data() + at(rank, 0);
    first_[size(rank)]         = static_cast<int>(std::lower_bound(begins, begins + rows_.length, since) - begins);
  }
  for (const auto& change : changes_) first_[size(change.rank)] = std::min(first_[size(change.rank)], change.low);
  kept_spans_   = spans_;
  kept_longest_ = longest_;
  if (time_from(first_, at_most)) return longest_;
  undo();
  return never;
}

void RowTimer::keep() {
  for (const auto& [rank, low, high] : changes_)
    std::copy(rows_.row(rank) + low, rows_.row(rank) + high + 1, kept_rows_.row(rank) + low);
  copy_tail(first_, false);
}

void RowTimer::undo() {
  for (const auto& [rank, low, high] : changes_) {
    std::copy(kept_rows_.row(rank) + low, kept_rows_.row(rank) + high + 1, rows_.row(rank) + low);
    count(rank, low, high);
  }
  copy_tail(first_, true);
  spans_   = kept_spans_;
  longest_ = kept_longest_;
}

// The times from position `first` of each row on: to what is kept, or back from there.
void RowTimer::copy_tail(const std::vector<int>& first, bool restore) {
  auto& from_begins = restore ? kept_begins_ : begins_;
  auto& to_begins   = restore ? begins_ : kept_begins_;
  auto& from_ready  = restore ? kept_ready_ : ready_;
  auto& to_ready    = restore ? ready_ : kept_ready_;
  const auto copy   = [](const std::vector<double>& from, std::vector<double>& to, std::size_t begin, std::size_t end) {
    if (begin < end) std::memcpy(to.data() + begin, from.data() + begin, (end - begin) * sizeof(double));
  };
  for (int rank = 0; rank < setting_.ranks; ++rank) {
    const int position = first[size(rank)];
    if (position == rows_.length) continue;
    copy(from_begins, to_begins, at(rank, position), at(rank, 0) + size(rows_.length));
    for (int first_letter = 0; first_letter < 3 * setting_.chunks; first_letter += 3) {
      for (const int kind : {F, I}) {
        const auto letter         = static_cast<Letter>(first_letter + kind);
        const std::size_t of_data = size(use(rank, letter).makes) * size(setting_.microbatches);
        copy(from_ready, to_ready, of_data + counts_[at(rank, position)][letter],
             of_data + size(setting_.microbatches));
      }
    }
  }
}

bool RowTimer::time_from(const std::vector<int>& first, double at_most) {
  stack_.clear();
  for (int rank = setting_.ranks - 1; rank >= 0; --rank) {
    const int position = next_[size(rank)] = first[size(rank)];
    waits_[size(rank)]                     = -1;
    free_at_[size(rank)]                   = position == 0 ? 0 : end(rank, position - 1);
    for (int first_letter = 0; first_letter < 3 * setting_.chunks; first_letter += 3) {
      for (const int kind : {F, I}) {
        const auto letter = static_cast<Letter>(first_letter + kind);
        done_[size(use(rank, letter).makes)] =
            position == rows_.length ? setting_.microbatches : counts_[at(rank, position)][letter];
      }
    }
    if (position == rows_.length) continue;
    stack_.push_back(rank);
    allowed_idle_[size(rank)] = at_most + 1e-9 * works_[size(rank)] - works_[size(rank)];
    idle_[size(rank)]         = 0;
    if (position == 0) {
      continue;
    }
    double busy = 0;
    for (Letter letter = 0; letter < 3 * setting_.chunks; ++letter)
      busy += counts_[at(rank, position)][letter] * use(rank, letter).time;
    idle_[size(rank)] = free_at_[size(rank)] - begin(rank, 0) - busy;
  }
  int unfinished = static_cast<int>(stack_.size());
  while (!stack_.empty()) {
    const int rank = stack_.back();
    stack_.pop_back();
    const Letter* const row          = rows_.row(rank);
    const Use* const uses            = uses_.data() + size(rank) * 3 * most_chunks;
    const LetterCounts* const counts = counts_.data() + at(rank, 0);
    double* const begins             = begins_.data() + at(rank, 0);
    const double allowed             = allowed_idle_[size(rank)];
    double time = free_at_[size(rank)], idle = idle_[size(rank)];
    int i = next_[size(rank)];
    for (; i < rows_.length; ++i) {
      const Letter letter = row[i];
      const Use& what     = uses[letter];
      const int number    = counts[i][letter];
      if (what.needs >= 0) {
        if (number >= done_[size(what.needs)]) {
          waits_[size(rank)]        = what.needs;
          waits_number_[size(rank)] = number;
          break;
        }
        const double here = ready(what.needs, number) + what.transfer;
        if (here > time) {
          if (i > 0) idle += here - time;  // the wait for a rank's first data is not in its span
          time = here;
          if (idle > allowed) return false;
        }
      }
      begins[i] = time;
      time += what.time;
      if (what.makes >= 0) {
        ready_[size(what.makes) * size(setting_.microbatches) + size(number)] = time;
        done_[size(what.makes)]                                               = number + 1;
        if (what.wakes >= 0 && waits_[size(what.wakes)] == what.makes && waits_number_[size(what.wakes)] == number) {
          waits_[size(what.wakes)] = -1;
          if (what.wakes != rank) stack_.push_back(what.wakes);
        }
      }
    }
    num_timed_ += i - next_[size(rank)];
    next_[size(rank)]    = i;
    free_at_[size(rank)] = time;
    idle_[size(rank)]    = idle;
    if (i == rows_.length) {
      --unfinished;
      if (time - begins[0] > at_most) return false;
    }
  }
  if (unfinished > 0) return false;
  longest_ = 0;
  for (int rank = 0; rank < setting_.ranks; ++rank) {
    spans_[size(rank)] = free_at_[size(rank)] - begin(rank, 0);
    longest_           = std::max(longest_, spans_[size(rank)]);
  }
  return true;
}

double RowTimer::makespan() const noexcept {
  double latest = 0;
  for (int rank = 0; rank < setting_.ranks; ++rank) latest = std::max(latest, end(rank, rows_.length - 1));
  return latest;
}

RowTimer::Place RowTimer::waited_for(int rank, int position) const {
  const Letter letter = rows_.row(rank)[position];
  const Use& what     = use(rank, letter);
  if (what.needs < 0) return {};
  const int number  = counts_[at(rank, position)][letter];
  const double here = ready(what.needs, number) + what.transfer;
  if (here < begin(rank, position) || (position > 0 && end(rank, position - 1) > here)) return {};
  // The action ends at ready(): find it in its row.
  const int stage = what.needs / 2, other = setting_.rank_of(stage);
  const double* const begins = begins_.data() + at(other, 0);
  int i = static_cast<int>(std::upper_bound(begins, begins + rows_.length, ready(what.needs, number)) - begins) - 1;
  while (i >= 0) {
    const Letter made = rows_.row(other)[i];
    if (use(other, made).makes == what.needs && counts_[at(other, i)][made] == number) return {other, i};
    --i;
  }
  return {};
}

}  // namespace stepgraph::search
