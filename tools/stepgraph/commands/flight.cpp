#include <memory>

#include "backends/process/flight.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

struct Options {
  std::string folder;
  bool json = false;
};

JsonValue to_json(const FlightReport& report) {
  JsonValue ranks = JsonValue::list(), cycles = JsonValue::list();
  for (const Flight& flight : report.flights) {
    JsonValue waits = JsonValue::list();
    for (const Wait& wait : flight.progress.waits) waits.items.push_back({{"rank", wait.rank}, {"node", wait.node}});
    ranks.items.push_back({{"rank", flight.rank},
                           {"line", flight.line},
                           {"run", flight.progress.run},
                           {"nodes_done", flight.progress.nodes_done},
                           {"last_node", flight.progress.last_node},
                           {"waits", waits}});
  }
  for (const auto& cycle : report.cycles) {
    JsonValue links = JsonValue::list();
    for (const Verdict::Link& link : cycle)
      links.items.push_back({{"rank", link.rank}, {"waits_for", link.wait.rank}, {"node", link.wait.node}});
    cycles.items.push_back(links);
  }
  return {{"type", "flight"},          {"size", report.size}, {"ranks", ranks},          {"missing", report.missing},
          {"awaited", report.awaited}, {"cycles", cycles},    {"unread", report.unread}, {"older", report.older}};
}

void run_flight(const Options& options) {
  const FlightReport report = read_flights(options.folder);
  if (options.json) return print_line(json_line(to_json(report)));
  std::string text = to_text(report);
  while (text.ends_with('\n')) text.pop_back();
  print_line(text);
}

}  // namespace

void add_flight(Command program) {
  Command command = program.subcommand(
      "flight",
      "After a failure over processes: read the files that the ranks have written, and say which rank waits for which, "
      "which are missing, and which rank the others wait for");
  auto options = std::make_shared<Options>();
  command.option("folder", options->folder, "The folder with the files rank-R.json").required();
  command.flag("--json", options->json, "Print a JSON line and nothing else");
  command.footer("Example: stepgraph flight stepgraph-flight");
  command.run([options] { run_flight(*options); });
}

}  // namespace stepgraph::cli
