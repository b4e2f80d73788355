#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/process/socket.hpp"

// Which process of a job has failed, from what all of them report. Pure functions; control.hpp applies them.
namespace stepgraph {

class MessageReader;
class MessageWriter;

// A node that waits for another rank. Outside a run: the subject of a call that waits (engine/run/peers.hpp).
struct Wait {
  int rank                                         = 0;  // that it waits for
  std::string node                                 = {};
  friend bool operator==(const Wait&, const Wait&) = default;
};

// What a process does. All other phases than a run count as progress: set-up, saving, evaluation.
enum class Phase : std::uint8_t { outside = 0, run = 1 };

// How far a process has come.
struct Progress {
  Phase phase                                              = Phase::outside;
  std::uint64_t run                                        = 0;  // the number of the run
  std::uint64_t nodes_done                                 = 0;  // of this run
  int num_computing                                        = 0;  // bodies that run and do not wait for another rank
  std::vector<Wait> waits                                  = {};
  std::string last_node                                    = {};  // the last one that has ended
  friend bool operator==(const Progress&, const Progress&) = default;
};

// One row of process 0's table.
struct ProcessRecord {
  bool joined        = false;
  bool left          = false;  // has said good-bye
  bool closed        = false;  // its connection has ended
  std::string failed = {};     // its own report
  int failed_turn    = 0;      // of all reports, which one it was
  int failed_by      = -1;     // the rank that has aborted the run that failed; -1: none, or this one
  Deadline heard     = {};     // when a message came last
  Deadline advanced  = {};     // when a node was finished last, or when it was outside a run
  Progress progress  = {};
};

enum class VerdictKind : std::uint8_t {
  gone = 1,  // its connection closed
  failed,    // it has said so
  silent,    // no heartbeat
  stuck,     // in a run, no node finished, and it waits for none
  deadlock,  // ranks that wait for each other
  missing,   // has never joined
  misfit,    // does not belong to this job: another size or version
};
[[nodiscard]] std::string_view to_string(VerdictKind kind) noexcept;

struct Verdict {
  VerdictKind kind = VerdictKind::gone;
  int rank         = 0;   // to blame; of a deadlock: the lowest in the cycle
  std::string text = {};  // of `failed` and `misfit`: the report; of the others: more about it, or nothing

  std::uint64_t run        = 0;  // what is known of that rank
  std::uint64_t nodes_done = 0;
  std::string last_node    = {};

  int waiting_rank         = -1;  // one that waits for it; -1: none
  std::string waiting_node = {};

  struct Link {  // of a deadlock
    int rank;
    Wait wait;
    friend bool operator==(const Link&, const Link&) = default;
  };
  std::vector<Link> cycle                                = {};
  friend bool operator==(const Verdict&, const Verdict&) = default;
};

// Whether both ranks of a wait are in one operation: the awaited one has a wait of the same name. Both have entered it,
// so neither waits for the other one to arrive, and this is no link of a deadlock.
[[nodiscard]] bool is_in_one_operation(const Verdict::Link& link, std::span<const Wait> waits_of_awaited);

// The first that applies:
// 1. closed without a good-bye: gone;
// 2. a report: failed;
// 3. not heard for `timeout`: silent;
// 4. some rank waits for r, which is in a run and has finished no node for `timeout`: silent if r has not been heard
// for half
//    of that time, stuck if it computes or waits for none. Of several the one that has been stuck longest. If there
//    is none, ranks that are stuck and wait only for each other: deadlock, or stuck if they all are in one operation;
//    not while a rank has not been heard for half of that time. A rank that has left, and that a stuck rank waits for:
//    gone.
// Row 0 is process 0, which is never silent to itself.
[[nodiscard]] std::optional<Verdict> judge(std::span<const ProcessRecord> table, Deadline now,
                                           std::chrono::milliseconds timeout);

// A verdict about one rank, with what the table knows of it.
[[nodiscard]] Verdict verdict_on(VerdictKind kind, int rank, std::span<const ProcessRecord> table,
                                 const std::string& text = {});

// The one line that a process prints. `mine` is the progress of the process that prints it.
[[nodiscard]] std::string line_of(const Verdict& verdict, int my_rank, const Progress& mine);

// As messages. Long names of nodes are cut.
void write(MessageWriter& to, const Progress& progress);
[[nodiscard]] Progress read_progress(MessageReader& from);
void write(MessageWriter& to, const Verdict& verdict);
[[nodiscard]] Verdict read_verdict(MessageReader& from);

}  // namespace stepgraph
