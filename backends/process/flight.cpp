#include "backends/process/flight.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/base/json_text.hpp"
#include "engine/base/partial.hpp"
#include "engine/base/text.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;

void write_whole(const std::string& path, const std::string& text) {
  Partial partial{.descriptor = make_unnamed(path)};
  if (!partial.descriptor.is_open()) partial = make_partial(path, false);
  std::string_view rest = text;
  bool good             = partial.descriptor.is_open();
  while (good && !rest.empty()) {
    const ssize_t done = ::write(partial.descriptor.get(), rest.data(), rest.size());
    if (done < 0 && errno == EINTR) continue;
    good = done > 0;
    rest.remove_prefix(good ? static_cast<std::size_t>(done) : 0);
  }
  if (good && partial.name.empty() && name_file(partial.descriptor, path)) return;
  if (good && !partial.name.empty() && ::rename(partial.name.c_str(), path.c_str()) == 0) return;
  const std::string reason = system_reason(errno);
  if (!partial.name.empty()) ::unlink(partial.name.c_str());
  throw Error(ErrorKind::backend, str(path, ": cannot be written: ", reason));
}

std::string json_of(const Flight& flight) {
  std::ostringstream out;
  JsonText json(out);
  const Progress& progress = flight.progress;
  json.open('{');
  json.field("type", std::string_view("flight"));
  json.field("rank", std::int64_t{flight.rank});
  json.field("size", std::int64_t{flight.size});
  json.field("job", std::string_view(flight.job));
  json.field("line", std::string_view(flight.line));
  json.field("phase", std::string_view(progress.phase == Phase::run ? "run" : "outside"));
  json.field("run", static_cast<std::int64_t>(progress.run));
  json.field("nodes_done", static_cast<std::int64_t>(progress.nodes_done));
  json.field("num_computing", std::int64_t{progress.num_computing});
  json.field("last_node", std::string_view(progress.last_node));
  json.key("waits");
  json.open('[');
  for (const Wait& wait : progress.waits) {
    json.next();
    json.open('{');
    json.field("rank", std::int64_t{wait.rank});
    json.field("node", std::string_view(wait.node));
    json.close('}');
  }
  json.close(']');
  json.key("lanes");
  json.open('[');
  for (const FlightLane& lane : flight.lanes) {
    json.next();
    json.open('{');
    json.field("lane", std::string_view(lane.lane));
    json.field("running", std::string_view(lane.running));
    json.key("last");
    json.open('[');
    for (const FlightNode& node : lane.last) {
      json.next();
      json.open('{');
      json.field("node", std::string_view(node.node));
      json.field("ago_s", node.ago_s);
      json.close('}');
    }
    json.close(']');
    json.close('}');
  }
  json.close(']');
  json.close('}');
  json.flush();
  return std::move(out).str() + "\n";
}

std::string state_of(const Progress& progress) {
  std::string text = progress.phase == Phase::run ? str("run ", progress.run, ", ", progress.nodes_done, " nodes done")
                                                  : std::string("outside a run");
  if (!progress.last_node.empty()) text += str(", last '", progress.last_node, "'");
  if (progress.num_computing > 0) text += str("; computes ", progress.num_computing);
  for (const Wait& wait : progress.waits) text += str("; waits for rank ", wait.rank, " in '", wait.node, "'");
  return text;
}

std::string table_of(const Flight& flight) {
  std::string text =
      str("rank ", flight.rank, " of ", flight.size, ": ", flight.line, "\n", state_of(flight.progress), "\n");
  for (const FlightLane& lane : flight.lanes) {
    text += str("\n", lane.lane, "\n");
    for (const FlightNode& node : lane.last) {
      std::string time = str(seconds_text(node.ago_s), " ago");
      time.insert(0, time.size() < 16 ? 16 - time.size() : 0, ' ');
      text += str(time, "  ", node.node, "\n");
    }
    if (!lane.running.empty()) text += str("         running  ", lane.running, "\n");
  }
  return text;
}

Flight flight_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(ErrorKind::backend, "cannot be read");
  const nlohmann::json json = nlohmann::json::parse(file);
  if (json.at("type") != "flight") throw Error(ErrorKind::config, "another type");
  Flight flight;
  flight.rank                   = json.at("rank").get<int>();
  flight.size                   = json.at("size").get<int>();
  flight.job                    = json.value("job", "");
  flight.line                   = json.at("line").get<std::string>();
  flight.progress.phase         = json.at("phase") == "run" ? Phase::run : Phase::outside;
  flight.progress.run           = json.at("run").get<std::uint64_t>();
  flight.progress.nodes_done    = json.at("nodes_done").get<std::uint64_t>();
  flight.progress.num_computing = json.at("num_computing").get<int>();
  flight.progress.last_node     = json.at("last_node").get<std::string>();
  for (const nlohmann::json& wait : json.at("waits"))
    flight.progress.waits.push_back({wait.at("rank").get<int>(), wait.at("node").get<std::string>()});
  if (flight.size < 1 || flight.rank < 0 || flight.rank >= flight.size) throw Error(ErrorKind::config, "a wrong rank");
  if (path.filename() != str("rank-", flight.rank, ".json"))
    throw Error(ErrorKind::config, "the report of another rank");
  return flight;
}

// The ranks that wait, and those they wait for.
class Waits {
 public:
  explicit Waits(FlightReport& report) : report_(report) {
    for (const Flight& flight : report.flights) by_rank_.emplace(flight.rank, &flight.progress.waits);
  }

  void find() {
    std::set<int> awaited, waits_for_none, in_operation;
    for (const auto& [rank, waits] : by_rank_) {
      if (report_.absent.empty() && !state_.contains(rank)) follow(rank);
      for (const Wait& wait : *waits) awaited.insert(wait.rank);
    }
    for (const int rank : awaited) {
      const auto at = by_rank_.find(rank);
      if (at == by_rank_.end() || at->second->empty()) {
        waits_for_none.insert(rank);
      } else if (std::all_of(at->second->begin(), at->second->end(),
                             [&](const Wait& wait) { return is_shared(rank, wait); })) {
        in_operation.insert(rank);
      }
    }
    for (const int rank : report_.absent)
      if (awaited.contains(rank)) report_.awaited.push_back(rank);
    if (!report_.awaited.empty() || awaited.empty()) return;
    if (!report_.absent.empty()) {
      report_.awaited = report_.absent;
    } else {
      const std::set<int>& ends = waits_for_none.empty() ? in_operation : waits_for_none;
      report_.awaited.assign(ends.begin(), ends.end());
    }
  }

 private:
  enum class State { open, done };

  [[nodiscard]] bool is_shared(int rank, const Wait& wait) const {
    const auto at = by_rank_.find(wait.rank);
    return at != by_rank_.end() && is_in_one_operation({rank, wait}, *at->second);
  }

  // Depth first, without recursion: a chain can be as long as the job has ranks.
  void follow(int first) {
    std::vector<std::pair<int, std::size_t>> path{{first, 0}};  // a rank, and the wait of it that is followed
    state_[first] = State::open;
    while (!path.empty()) {
      auto& [rank, next] = path.back();
      const auto at      = by_rank_.find(rank);
      if (at == by_rank_.end() || next == at->second->size()) {
        state_[rank] = State::done;
        path.pop_back();
        continue;
      }
      const Wait& wait  = (*at->second)[next++];
      const int awaited = wait.rank;
      if (is_shared(rank, wait)) continue;
      if (!state_.contains(awaited)) {
        state_[awaited] = State::open;
        path.emplace_back(awaited, 0);
      } else if (state_[awaited] == State::open) {
        add_cycle(path, awaited);
      }
    }
  }

  void add_cycle(const std::vector<std::pair<int, std::size_t>>& path, int back_at) {
    std::vector<Verdict::Link> cycle;
    for (const auto& [rank, next] : path) {
      if (cycle.empty() && rank != back_at) continue;
      cycle.push_back({rank, (*by_rank_.at(rank))[next - 1]});
    }
    report_.cycles.push_back(std::move(cycle));
  }

  FlightReport& report_;
  std::map<int, const std::vector<Wait>*> by_rank_;
  std::map<int, State> state_;
};

// The rank that is gone or silent by a line of line_of().
std::optional<int> absent_by(std::string_view line) {
  if (!line.starts_with("rank ")) return std::nullopt;
  line.remove_prefix(5);
  const std::size_t end         = line.find(' ');
  const std::optional<int> rank = to_number<int>(line.substr(0, end));
  if (!rank || end == line.npos) return std::nullopt;
  line.remove_prefix(end);
  for (const std::string_view state : {" is gone", " is silent", " has not joined"})
    if (line.starts_with(state)) return rank;
  return std::nullopt;
}

std::string ranks_text(const std::vector<int>& ranks) {
  return str(ranks.size() == 1 ? "rank " : "ranks ", join_text(ranks, ", ", [](int rank) { return str(rank); }));
}

// Why waits end at a rank.
std::string_view end_text(const FlightReport& report, int rank) {
  const auto has = [&](const std::vector<int>& ranks) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  };
  if (has(report.missing)) return "is missing";
  if (has(report.absent)) return "is gone or silent";
  const auto own = std::find_if(report.flights.begin(), report.flights.end(),
                                [&](const Flight& flight) { return flight.rank == rank; });
  if (own == report.flights.end() || own->progress.waits.empty()) return "waits for none";
  return "is in one operation with those that it waits for";
}

}  // namespace

void write_flight(const std::string& folder, const Flight& flight) {
  std::error_code failed;
  fs::create_directories(folder, failed);
  if (failed) throw Error(ErrorKind::backend, str(folder, ": cannot be made: ", failed.message()));
  const std::string name = str(folder, "/rank-", flight.rank);
  write_whole(name + ".json", json_of(flight));
  write_whole(name + ".txt", table_of(flight));
}

FlightReport read_flights(const std::string& folder) {
  FlightReport report;
  std::error_code failed;
  std::optional<fs::file_time_type> newest;
  std::string job;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, failed)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("rank-") || !name.ends_with(".json")) continue;
    try {
      report.flights.push_back(flight_of(entry.path()));
      const fs::file_time_type written = entry.last_write_time();
      if (newest && written <= *newest) continue;
      newest = written;
      job    = report.flights.back().job;
    } catch (const std::exception& error) {
      report.unread.push_back(str(name, ": ", error.what()));
    }
  }
  if (failed) throw Error(ErrorKind::config, str(folder, ": ", failed.message(), " (a folder with rank-R.json)"));
  std::sort(report.unread.begin(), report.unread.end());
  if (report.flights.empty()) {
    throw Error(ErrorKind::config,
                str(folder, ": has no report", report.unread.empty() ? "" : ": ",
                    join_text(report.unread, "; ", [](const std::string& text) { return text; }), " (rank-R.json)"));
  }
  std::sort(report.flights.begin(), report.flights.end(),
            [](const Flight& a, const Flight& b) { return a.rank < b.rank; });
  for (const Flight& flight : report.flights)
    if (flight.job != job) report.older.push_back(flight.rank);
  std::erase_if(report.flights, [&](const Flight& flight) { return flight.job != job; });
  report.size = report.flights.front().size;
  for (const Flight& flight : report.flights) {
    if (flight.size == report.size) continue;
    throw Error(ErrorKind::config,
                str(folder, ": has reports of different jobs: rank ", report.flights.front().rank, " of ", report.size,
                    ", rank ", flight.rank, " of ", flight.size, " (one folder for each job)"));
  }
  std::vector<bool> present(static_cast<std::size_t>(report.size));
  for (const Flight& flight : report.flights) present[static_cast<std::size_t>(flight.rank)] = true;
  for (int rank = 0; rank < report.size; ++rank)
    if (!present[static_cast<std::size_t>(rank)]) report.missing.push_back(rank);
  std::set<int> absent(report.missing.begin(), report.missing.end());
  for (const Flight& flight : report.flights)
    if (const std::optional<int> rank = absent_by(flight.line); rank && *rank >= 0 && *rank < report.size)
      absent.insert(*rank);
  report.absent.assign(absent.begin(), absent.end());
  Waits(report).find();
  return report;
}

std::string to_text(const FlightReport& report) {
  std::string text = str(report.flights.size(), " of ", report.size, " ranks have reported\n");
  if (!report.missing.empty()) text += str("missing: ", ranks_text(report.missing), "\n");
  if (!report.older.empty()) text += str("not used, of another job: ", ranks_text(report.older), "\n");
  for (const std::string& file : report.unread) text += str("not a report: ", file, "\n");
  std::map<std::string, std::vector<int>> lines;
  for (const Flight& flight : report.flights) lines[flight.line].push_back(flight.rank);
  for (const auto& [line, ranks] : lines)
    text += str(ranks_text(ranks), ranks.size() == 1 ? " says: " : " say: ", line.empty() ? "nothing" : line, "\n");
  for (const Flight& flight : report.flights) text += str("rank ", flight.rank, ": ", state_of(flight.progress), "\n");
  for (const std::vector<Verdict::Link>& cycle : report.cycles) {
    text += str("cycle: ",
                join_text(cycle, ", ",
                          [](const Verdict::Link& link) {
                            return str("rank ", link.rank, " waits for rank ", link.wait.rank, " in '", link.wait.node,
                                       "'");
                          }),
                "\n");
  }
  for (const int rank : report.awaited)
    text += str("waits end at rank ", rank, ", which ", end_text(report, rank), "\n");
  return text;
}

}  // namespace stepgraph
