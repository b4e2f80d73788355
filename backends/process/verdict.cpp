#include "backends/process/verdict.hpp"

#include <algorithm>

#include "backends/process/message.hpp"
#include "engine/base/error.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

constexpr std::size_t most_waits = 8;
constexpr std::size_t most_name  = 80;
constexpr std::size_t most_cycle = 64;
constexpr std::size_t most_text  = 4096;

std::string cut(const std::string& text, std::size_t most) {
  return text.size() <= most ? text : text.substr(0, most - 3) + "...";
}

bool is_alive(const ProcessRecord& row) { return row.joined && !row.left && !row.closed; }

// Rule 4.
class Stuck {
 public:
  Stuck(std::span<const ProcessRecord> table, Deadline now, std::chrono::milliseconds timeout)
      : table_(table), now_(now), timeout_(timeout) {
    for (std::size_t rank = 0; rank < table.size(); ++rank) stuck_.push_back(is_stuck(table[rank]));
  }

  [[nodiscard]] std::optional<Verdict> find() const {
    std::optional<Verdict> found;
    Deadline since = Deadline::max();
    for (std::size_t waiting = 0; waiting < table_.size(); ++waiting) {
      if (!is_alive(table_[waiting])) continue;
      for (const Wait& wait : table_[waiting].progress.waits) {
        std::optional<Verdict> one = on(static_cast<int>(waiting), wait);
        if (!one) continue;
        if (one->kind != VerdictKind::stuck) return one;
        // Of several, the one that has been stuck longest.
        if (at(wait.rank).advanced < since) {
          since = at(wait.rank).advanced;
          found = std::move(one);
        }
      }
    }
    return found ? found : deadlock();
  }

 private:
  [[nodiscard]] const ProcessRecord& at(int rank) const { return table_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] bool is_rank(int rank) const { return rank >= 0 && static_cast<std::size_t>(rank) < table_.size(); }

  // In a run, and without a finished node for that long.
  [[nodiscard]] bool is_stuck(const ProcessRecord& row) const {
    return is_alive(row) && row.progress.phase == Phase::run && now_ - row.advanced >= timeout_;
  }

  // Whether the rank that is waited for is to blame, and waits for none itself.
  [[nodiscard]] std::optional<Verdict> on(int waiting, const Wait& wait) const {
    if (!is_rank(wait.rank)) return std::nullopt;
    const ProcessRecord& row = at(wait.rank);
    Verdict verdict{};
    if (row.left && stuck_[static_cast<std::size_t>(waiting)]) {
      verdict = verdict_on(VerdictKind::gone, wait.rank, table_, "has left the job");
    } else if (!stuck_[static_cast<std::size_t>(wait.rank)]) {
      return std::nullopt;
    } else if (wait.rank != 0 && now_ - row.heard >= timeout_ / 2) {
      // What it said last is no longer true.
      const auto time = std::chrono::duration_cast<std::chrono::milliseconds>(now_ - row.heard).count();
      verdict         = verdict_on(VerdictKind::silent, wait.rank, table_, str("for ", time, " ms"));
    } else if (row.progress.num_computing > 0 || row.progress.waits.empty()) {
      verdict = verdict_on(VerdictKind::stuck, wait.rank, table_);
    } else {
      return std::nullopt;
    }
    verdict.waiting_rank = waiting;
    verdict.waiting_node = wait.node;
    return verdict;
  }

  // Ranks that are stuck and wait only for each other. A rank with one wait that may still end can go on.
  [[nodiscard]] std::optional<Verdict> deadlock() const {
    std::vector<bool> hopeless = stuck_;
    for (bool changed = true; changed;) {
      changed = false;
      for (std::size_t rank = 0; rank < table_.size(); ++rank) {
        const std::vector<Wait>& waits = table_[rank].progress.waits;
        if (!hopeless[rank] || (!waits.empty() && std::all_of(waits.begin(), waits.end(), [&](const Wait& wait) {
              return is_rank(wait.rank) && hopeless[static_cast<std::size_t>(wait.rank)];
            })))
          continue;
        hopeless[rank] = false;
        changed        = true;
      }
    }
    if (std::find(hopeless.begin(), hopeless.end(), true) == hopeless.end() || some_unheard()) return std::nullopt;
    // All waits stay among these ranks: a walk comes back to one of them, or ends in an operation.
    std::vector<bool> seen(table_.size());  // by rank, in any walk
    int end = -1;                           // of those in an operation, the one that has been stuck longest
    for (std::size_t first = 0; first < table_.size(); ++first) {
      if (!hopeless[first]) continue;
      std::vector<Verdict::Link> path;
      auto rank = static_cast<int>(first);
      while (!seen[static_cast<std::size_t>(rank)]) {
        seen[static_cast<std::size_t>(rank)] = true;
        const Wait* const wait               = wait_to_follow(rank);
        if (wait == nullptr) {
          if (end < 0 || at(rank).advanced < at(end).advanced) end = rank;
          break;
        }
        path.push_back({rank, *wait});
        rank = wait->rank;
      }
      const auto met = std::find_if(path.begin(), path.end(), [&](const auto& link) { return link.rank == rank; });
      if (met != path.end()) return deadlock_of({met, path.end()});
    }
    return verdict_on(VerdictKind::stuck, end, table_);
  }

  // A rank that has not been heard may be the cause: rule 3 tells soon.
  [[nodiscard]] bool some_unheard() const {
    return std::any_of(table_.begin() + 1, table_.end(),
                       [&](const ProcessRecord& row) { return is_alive(row) && now_ - row.heard >= timeout_ / 2; });
  }

  // The first wait that is not for a rank in the same operation. Null: there is none.
  [[nodiscard]] const Wait* wait_to_follow(int rank) const {
    for (const Wait& wait : at(rank).progress.waits)
      if (!is_in_one_operation({rank, wait}, at(wait.rank).progress.waits)) return &wait;
    return nullptr;
  }

  [[nodiscard]] Verdict deadlock_of(std::vector<Verdict::Link> cycle) const {
    const auto lowest =
        std::min_element(cycle.begin(), cycle.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
    std::rotate(cycle.begin(), lowest, cycle.end());
    Verdict verdict = verdict_on(VerdictKind::deadlock, cycle.front().rank, table_);
    verdict.cycle   = std::move(cycle);
    return verdict;
  }

  std::span<const ProcessRecord> table_;
  Deadline now_;
  std::chrono::milliseconds timeout_;
  std::vector<bool> stuck_;  // by rank
};

std::string node_text(const std::string& node) { return node.empty() ? "a node" : str("'", node, "'"); }

void write(MessageWriter& to, const Wait& wait) { to.number(wait.rank).text(cut(wait.node, most_name)); }

Wait read_wait(MessageReader& from) {
  Wait wait;
  wait.rank = from.number<int>();
  wait.node = from.text();
  return wait;
}

}  // namespace

std::string_view to_string(VerdictKind kind) noexcept {
  switch (kind) {
    case VerdictKind::gone:
      return "gone";
    case VerdictKind::failed:
      return "failed";
    case VerdictKind::silent:
      return "silent";
    case VerdictKind::stuck:
      return "stuck";
    case VerdictKind::deadlock:
      return "deadlock";
    case VerdictKind::missing:
      return "missing";
    case VerdictKind::misfit:
      return "misfit";
  }
  return "unknown";
}

Verdict verdict_on(VerdictKind kind, int rank, std::span<const ProcessRecord> table, const std::string& text) {
  Verdict verdict{.kind = kind, .rank = rank, .text = text};
  if (rank >= 0 && static_cast<std::size_t>(rank) < table.size()) {
    const Progress& known = table[static_cast<std::size_t>(rank)].progress;
    verdict.run           = known.run;
    verdict.nodes_done    = known.nodes_done;
    verdict.last_node     = known.last_node;
  }
  for (std::size_t other = 0; other < table.size() && verdict.waiting_rank < 0; ++other) {
    for (const Wait& wait : table[other].progress.waits) {
      if (wait.rank != rank || static_cast<int>(other) == rank) continue;
      verdict.waiting_rank = static_cast<int>(other);
      verdict.waiting_node = wait.node;
      break;
    }
  }
  return verdict;
}

bool is_in_one_operation(const Verdict::Link& link, std::span<const Wait> waits_of_awaited) {
  return link.rank != link.wait.rank && std::any_of(waits_of_awaited.begin(), waits_of_awaited.end(),
                                                    [&](const Wait& other) { return other.node == link.wait.node; });
}

std::optional<Verdict> judge(std::span<const ProcessRecord> table, Deadline now, std::chrono::milliseconds timeout) {
  for (std::size_t rank = 0; rank < table.size(); ++rank) {
    const ProcessRecord& row = table[rank];
    if (row.joined && row.closed && !row.left && row.failed.empty())
      return verdict_on(VerdictKind::gone, static_cast<int>(rank), table);
  }
  const ProcessRecord* first = nullptr;
  for (const ProcessRecord& row : table)
    if (!row.failed.empty() && (first == nullptr || row.failed_turn < first->failed_turn)) first = &row;
  if (first != nullptr && first->failed_by >= 0 && static_cast<std::size_t>(first->failed_by) < table.size()) {
    const std::string& own =
        table[static_cast<std::size_t>(first->failed_by)].failed;  // it may say more, or come later
    return verdict_on(VerdictKind::failed, first->failed_by, table, own.empty() ? first->failed : own);
  }
  if (first != nullptr)
    return verdict_on(VerdictKind::failed, static_cast<int>(first - table.data()), table, first->failed);
  for (std::size_t rank = 1; rank < table.size(); ++rank) {
    if (is_alive(table[rank]) && now - table[rank].heard >= timeout)
      return verdict_on(VerdictKind::silent, static_cast<int>(rank), table, str("for ", timeout.count(), " ms"));
  }
  return Stuck(table, now, timeout).find();
}

std::string line_of(const Verdict& verdict, int my_rank, const Progress& mine) {
  const auto extra = [&] { return verdict.text.empty() ? "" : str(" (", verdict.text, ")"); };
  std::string line = str("rank ", verdict.rank, verdict.rank == my_rank ? " (this process)" : "");
  switch (verdict.kind) {
    case VerdictKind::gone:
      line += str(" is gone", verdict.text.empty() ? " (its connection closed)" : extra());
      break;
    case VerdictKind::failed:
      line += str(" failed: ", verdict.text);
      break;
    case VerdictKind::silent:
      line += str(" is silent", extra());
      break;
    case VerdictKind::stuck:
      line += " is stuck (it finishes no node)";
      break;
    case VerdictKind::missing:
      line += str(" has not joined", extra());
      break;
    case VerdictKind::misfit:
      return verdict.text;
    case VerdictKind::deadlock:
      return str("deadlock: ", join_text(verdict.cycle, ", ", [](const Verdict::Link& link) {
                   return str("rank ", link.rank, " waits for rank ", link.wait.rank, " in ",
                              node_text(link.wait.node));
                 }));
  }
  // The node that waited: one of this process if there is one.
  int waiting      = verdict.waiting_rank;
  std::string node = verdict.waiting_node;
  int awaited      = verdict.rank;
  const auto own =
      std::find_if(mine.waits.begin(), mine.waits.end(), [&](const Wait& wait) { return wait.rank == verdict.rank; });
  if (own != mine.waits.end() || (waiting < 0 && !mine.waits.empty())) {
    const Wait& wait = own != mine.waits.end() ? *own : mine.waits.front();
    waiting          = my_rank;
    node             = wait.node;
    awaited          = wait.rank;
  }
  if (waiting >= 0) line += str("; ", node_text(node), " of rank ", waiting, " waited for rank ", awaited);
  // As the last heartbeat told it: the rank may have come further.
  if (!verdict.last_node.empty()) {
    line += str("; last known node of rank ", verdict.rank, ": '", verdict.last_node, "' (", verdict.nodes_done,
                " done in run ", verdict.run, ")");
  } else if (verdict.kind != VerdictKind::failed && verdict.kind != VerdictKind::missing) {
    line += str("; no node of rank ", verdict.rank, " is known");
  }
  return line;
}

void write(MessageWriter& to, const Progress& progress) {
  const std::size_t num_waits = std::min(progress.waits.size(), most_waits);
  to.number(static_cast<std::uint8_t>(progress.phase)).number(progress.run).number(progress.nodes_done);
  to.number(progress.num_computing).text(cut(progress.last_node, most_name));
  to.number(static_cast<std::uint8_t>(num_waits));
  for (std::size_t i = 0; i < num_waits; ++i) write(to, progress.waits[i]);
}

Progress read_progress(MessageReader& from) {
  Progress progress;
  progress.phase         = static_cast<Phase>(from.number<std::uint8_t>());
  progress.run           = from.number<std::uint64_t>();
  progress.nodes_done    = from.number<std::uint64_t>();
  progress.num_computing = from.number<int>();
  progress.last_node     = from.text();
  for (auto left = from.number<std::uint8_t>(); left > 0; --left) progress.waits.push_back(read_wait(from));
  return progress;
}

void write(MessageWriter& to, const Verdict& verdict) {
  const std::size_t num_links = std::min(verdict.cycle.size(), most_cycle);
  to.number(static_cast<std::uint8_t>(verdict.kind)).number(verdict.rank).text(cut(verdict.text, most_text));
  to.number(verdict.run).number(verdict.nodes_done).text(cut(verdict.last_node, most_name));
  to.number(verdict.waiting_rank).text(cut(verdict.waiting_node, most_name));
  to.number(static_cast<std::uint8_t>(num_links));
  for (std::size_t i = 0; i < num_links; ++i) {
    to.number(verdict.cycle[i].rank);
    write(to, verdict.cycle[i].wait);
  }
}

Verdict read_verdict(MessageReader& from) {
  Verdict verdict;
  verdict.kind         = static_cast<VerdictKind>(from.number<std::uint8_t>());
  verdict.rank         = from.number<int>();
  verdict.text         = from.text();
  verdict.run          = from.number<std::uint64_t>();
  verdict.nodes_done   = from.number<std::uint64_t>();
  verdict.last_node    = from.text();
  verdict.waiting_rank = from.number<int>();
  verdict.waiting_node = from.text();
  for (auto left = from.number<std::uint8_t>(); left > 0; --left) {
    const int rank = from.number<int>();
    verdict.cycle.push_back({rank, read_wait(from)});
  }
  return verdict;
}

}  // namespace stepgraph
