#pragma once
#include <string>
#include <vector>

#include "backends/process/verdict.hpp"

// The flight recorder: what each process of a job did last, written when the job has failed.
namespace stepgraph {

struct FlightNode {
  std::string node = {};
  double ago_s     = 0;  // how long before the report it ended
};

struct FlightLane {
  std::string lane             = {};  // "rank 0 compute"
  std::string running          = {};  // the node that runs; empty: none
  std::vector<FlightNode> last = {};  // the oldest first
};

// The report of one process.
struct Flight {
  int rank                      = 0;
  int size                      = 1;
  std::string job               = {};  // its id (Job::id); empty: not all processes had joined
  std::string line              = {};  // of the verdict
  Progress progress             = {};
  std::vector<FlightLane> lanes = {};
};

// Writes rank-R.json and the same as a table, rank-R.txt, into a folder, which is made. Each appears when it is
// complete. It does not wait for the disk: the process is about to end. Throws Error(backend).
void write_flight(const std::string& folder, const Flight& flight);

// What the reports of a job say together.
struct FlightReport {
  int size                        = 0;
  std::vector<Flight> flights     = {};  // by rank; without their lanes
  std::vector<int> missing        = {};  // ranks without a report
  std::vector<std::string> unread = {};  // files that are not reports, and why
  std::vector<int> older          = {};  // ranks whose file is of another job, and was not used
  std::vector<int> absent         = {};  // missing, or gone or silent by a line of another rank
  // Where the waits end: the absent ranks that others wait for, else all that are absent. If none is: ranks that others
  // wait for and that wait for none, else those that are in one operation with all ranks that they wait for.
  std::vector<int> awaited                       = {};
  std::vector<std::vector<Verdict::Link>> cycles = {};  // none if a rank is absent
};

// Reads the rank-R.json of a folder: those of the job that has written last. Error(config): there is none, or their
// sizes differ.
[[nodiscard]] FlightReport read_flights(const std::string& folder);

// For people: which rank waits for which, which are missing, and the verdicts.
[[nodiscard]] std::string to_text(const FlightReport& report);

}  // namespace stepgraph
