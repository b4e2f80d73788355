#include "engine/verify/verify.hpp"

#include <array>

#include "engine/base/error.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/program/device_bodies.hpp"
#include "engine/run/threads/waiting_lanes.hpp"
#include "engine/verify/findings.hpp"

namespace stepgraph {
namespace {

void check_edges_fit(const Graph& graph, const Edges& edges) {
  const std::size_t rows = std::size_t{graph.num_nodes()} + 1;
  const auto check       = [&](const std::vector<std::uint32_t>& begin, const std::vector<std::uint32_t>& preds) {
    bool fits = begin.size() == rows && begin.front() == 0 && begin.back() == preds.size();
    for (std::size_t i = 0; fits && i + 1 < rows; ++i) fits = begin[i] <= begin[i + 1];
    for (std::uint32_t node = 0; fits && node + 1 < rows; ++node) {
      for (std::uint32_t i = begin[node]; fits && i < begin[node + 1]; ++i) {
        fits = preds[i] < graph.num_nodes() && graph.rank({preds[i]}) == graph.rank({node});
      }
    }
    if (!fits)
      throw Error(ErrorKind::config, "verify: the edges do not belong to this graph (rows, nodes or ranks do not fit)");
  };
  check(edges.pred_begin, edges.preds);
  check(edges.loop_begin, edges.loop_preds);
}

void check_workers(const Graph& graph, const VerifyOptions& options, verifier::Findings& findings) {
  if (!options.world) return;
  const std::vector<Lane> waiting = waiting_lanes(graph, *options.world);
  if (std::ssize(waiting) <= options.waiting_lanes) return;
  findings.add(Flaw::too_few_workers,
               str(waiting.size(), " lanes wait (", lane_names(waiting), "), but waiting_lanes is ",
                   options.waiting_lanes, " (at least ", waiting.size(), ")"));
}

void check_bodies(const Graph& graph, const World* world, verifier::Findings& findings) {
  if (!world || !world->device()) return;
  for (std::uint32_t node = 0; node < graph.num_nodes() && !findings.full(); ++node) {
    const std::string flaw = device_flaw(graph, Node{node}, *world);
    if (!flaw.empty()) findings.add(Flaw::not_on_device, flaw);
  }
}

}  // namespace

std::string_view to_string(Flaw flaw) noexcept {
  constexpr std::array<std::string_view, 11> names{"race",           "broken lane",           "mismatched parts",
                                                   "unmatched part", "input overlaps output", "deadlock",
                                                   "unwritten read", "race around the loop",  "too few workers",
                                                   "bad place",      "not on the device"};
  return names[static_cast<std::size_t>(flaw)];
}

std::vector<Finding> find_flaws(const OrderedGraph& ordered, const VerifyOptions& options) {
  const Graph& graph = ordered.graph;
  const Edges& edges = ordered.edges;
  if (options.max_findings == 0)
    throw Error(ErrorKind::config, "verify: max_findings = 0 would find nothing (at least 1)");
  if (ordered.memory && ordered.memory->offsets.size() != graph.num_buffers()) {
    throw Error(ErrorKind::config, str("verify: the plan is for ", ordered.memory->offsets.size(),
                                       " buffers, the graph has ", graph.num_buffers(), " (plan the graph that runs)"));
  }
  check_edges_fit(graph, edges);
  verifier::Findings findings(options.max_findings);
  check_workers(graph, options, findings);
  check_bodies(graph, options.world, findings);
  const bool acyclic = verifier::check_ranks(graph, edges, ordered.memory, findings);
  const bool matched = verifier::check_parts(graph, findings);
  verifier::check_overlaps(graph, findings);
  if (acyclic && matched) verifier::check_deadlock(graph, edges, findings);
  return findings.take();
}

void verify(const OrderedGraph& graph, const VerifyOptions& options) {
  const std::vector<Finding> findings = find_flaws(graph, options);
  if (findings.empty()) return;
  std::string message = str("verify: ", findings.size(),
                            findings.size() >= options.max_findings ? " or more flaws"
                            : findings.size() == 1                  ? " flaw"
                                                                    : " flaws");
  for (const Finding& finding : findings) message += str("\n  ", to_string(finding.flaw), ": ", finding.message);
  throw Error(ErrorKind::graph, message);
}

}  // namespace stepgraph
