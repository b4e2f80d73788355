#include "tests/support/oracle/oracle.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "engine/base/error.hpp"
#include "tests/support/oracle/oracle_parts.hpp"

namespace stepgraph::testing {
namespace {

using Mask = std::uint32_t;  // a set of nodes, of node instances or of events

constexpr std::size_t max_nodes_on_rank = 12;
constexpr std::size_t max_nodes         = 24;

constexpr Mask bit(std::size_t i) { return Mask{1} << i; }

// The bytes that a node accesses, one by one, sorted.
struct Touched {
  std::vector<Byte> read, written;
};

Touched touched(const Graph& graph, Node node) {
  Touched bytes;
  for (std::size_t i = 0; i < graph.num_accesses(node); ++i) {
    const auto [buffer, mode, region] = graph.access(node, i);
    for (std::int64_t range = 0; range < region.count; ++range) {
      for (std::int64_t k = 0; k < region.length; ++k) {
        const Byte byte{buffer.id, region.offset + range * region.stride + k};
        if (mode != AccessMode::write) bytes.read.push_back(byte);
        if (mode != AccessMode::read) bytes.written.push_back(byte);
      }
    }
  }
  std::sort(bytes.read.begin(), bytes.read.end());
  std::sort(bytes.written.begin(), bytes.written.end());
  return bytes;
}

bool share(const std::vector<Byte>& a, const std::vector<Byte>& b) {
  return std::any_of(a.begin(), a.end(),
                     [&](const Byte& byte) { return std::binary_search(b.begin(), b.end(), byte); });
}

bool conflict(const Touched& a, const Touched& b) {
  return share(a.written, b.written) || share(a.written, b.read) || share(a.read, b.written);
}

// One rank's nodes in two runs: instance i < n is a node of the first run, instance n + i the same node of the next.
struct TwoRuns {
  std::vector<Node> nodes;     // in program order
  std::vector<Touched> bytes;  // of each node
  std::vector<Mask> preds;     // of each instance
  [[nodiscard]] std::size_t num_instances() const { return 2 * nodes.size(); }
};

TwoRuns two_runs(const Graph& graph, const Edges& edges, Rank rank) {
  TwoRuns runs;
  std::map<std::uint32_t, std::size_t> place;
  for (std::uint32_t id = 0; id < graph.num_nodes(); ++id) {
    if (graph.rank({id}) != rank) continue;
    place[id] = runs.nodes.size();
    runs.nodes.push_back({id});
    runs.bytes.push_back(touched(graph, {id}));
  }
  const std::size_t n = runs.nodes.size();
  if (n > max_nodes_on_rank) throw Error(ErrorKind::config, str("oracle: ", n, " nodes on rank ", rank));
  runs.preds.assign(2 * n, 0);
  const auto place_of = [&](std::uint32_t pred) {
    const auto found = place.find(pred);
    if (found == place.end())
      throw Error(ErrorKind::config, str("oracle: an edge from node ", pred, " leaves its rank"));
    return found->second;
  };
  for (std::size_t i = 0; i < n; ++i) {
    for (auto k = edges.pred_begin[runs.nodes[i].id]; k < edges.pred_begin[runs.nodes[i].id + 1]; ++k) {
      runs.preds[i] |= bit(place_of(edges.preds[k]));
      runs.preds[n + i] |= bit(n + place_of(edges.preds[k]));
    }
    for (auto k = edges.loop_begin[runs.nodes[i].id]; k < edges.loop_begin[runs.nodes[i].id + 1]; ++k) {
      runs.preds[n + i] |= bit(place_of(edges.loop_preds[k]));
    }
  }
  return runs;
}

// Calls `starts(i, finished)` for every reachable set of finished instances and every instance i that can run next.
template <class Starts>
void explore(const std::vector<Mask>& preds, Starts&& starts) {
  std::vector<bool> seen(std::size_t{1} << preds.size());
  std::vector<Mask> todo{0};
  seen[0] = true;
  while (!todo.empty()) {
    const Mask finished = todo.back();
    todo.pop_back();
    for (std::size_t i = 0; i < preds.size(); ++i) {
      if ((finished & bit(i)) != 0 || (preds[i] & ~finished) != 0) continue;
      starts(i, finished);
      const Mask next = finished | bit(i);
      if (!seen[next]) todo.push_back(next);
      seen[next] = true;
    }
  }
}

void find_disorder(const Graph& graph, const TwoRuns& runs, Harm& harm) {
  const std::size_t n = runs.nodes.size();
  // For each instance, the earlier instances in program order (the first run is before the second) that must stay
  // before it.
  std::vector<Mask> conflicting(2 * n), same_lane(2 * n);
  for (std::size_t later = 0; later < 2 * n; ++later) {
    for (std::size_t earlier = 0; earlier < later; ++earlier) {
      const std::size_t a = earlier % n, b = later % n;
      if (conflict(runs.bytes[a], runs.bytes[b])) conflicting[later] |= bit(earlier);
      const auto lane = graph.lane(runs.nodes[a]);
      if (lane && lane == graph.lane(runs.nodes[b])) same_lane[later] |= bit(earlier);
    }
  }
  const Mask first_run = bit(n) - 1;
  explore(runs.preds, [&](std::size_t i, Mask finished) {
    const Mask same_run = i < n ? first_run : ~first_run;
    const Mask raced = conflicting[i] & ~finished, overtaken = same_lane[i] & ~finished;
    harm.race |= (raced & same_run) != 0;
    harm.loop_race |= (raced & ~same_run) != 0;
    harm.broken_lane |= (overtaken & same_run) != 0;
    harm.loop_lane |= (overtaken & ~same_run) != 0;
  });
}

bool reads_unwritten(const Graph& graph, const TwoRuns& runs) {
  std::set<Byte> written;
  for (const Touched& bytes : runs.bytes) {
    for (const Byte& byte : bytes.read) {
      const BufferSpec& buffer = graph.spec(Buffer{byte.first});
      if (buffer.lifetime == Lifetime::step && !buffer.token && !written.contains(byte)) return true;
    }
    written.insert(bytes.written.begin(), bytes.written.end());
  }
  return false;
}

// Pairs the k-th entries of all queues.
void pair_up(const std::vector<std::vector<Part>>& queues, std::vector<Match>& matches, Harm& harm) {
  std::size_t longest = 0;
  for (const auto& queue : queues) longest = std::max(longest, queue.size());
  for (std::size_t k = 0; k < longest; ++k) {
    Match match;
    for (const auto& queue : queues) {
      if (k < queue.size()) match.push_back(queue[k]);
    }
    harm.unmatched |= match.size() < queues.size();
    if (match.size() == queues.size()) matches.push_back(match);
  }
}

std::vector<Match> match_parts(const Graph& graph, const std::vector<Part>& parts, Harm& harm) {
  std::vector<Match> matches;
  for (std::uint32_t group = 0; group < graph.num_groups(); ++group) {
    const auto select = [&](Rank rank, auto&& wanted) {
      std::vector<Part> queue;
      for (const Part& part : parts) {
        if (part.view.group.id == group && graph.rank(part.node) == rank && wanted(part.view)) queue.push_back(part);
      }
      return queue;
    };
    const RankList& members = graph.spec(Group{group}).ranks;
    std::vector<std::vector<Part>> collectives;
    for (const Rank rank : members) {
      collectives.push_back(select(rank, [](const auto& view) { return !point_to_point(view.op); }));
    }
    pair_up(collectives, matches, harm);
    for (const Rank from : members) {
      for (const Rank to : members) {
        const auto sends    = [&](const auto& view) { return view.op == PartOp::send && view.peer == to; };
        const auto receives = [&](const auto& view) { return view.op == PartOp::recv && view.peer == from; };
        pair_up({select(from, sends), select(to, receives)}, matches, harm);
      }
    }
  }
  for (const Match& match : matches) harm.mismatched |= !fit(graph, match);
  return matches;
}

// Simulates the whole system. Every node is one event, but matched parts, and parts of a rank that share an issue
// position, are a single event. An event can happen when all predecessors of its nodes and, on each of its ranks, all
// parts with a lower issue position are done. (So a member's operations on a group also complete in order.)
bool can_hang(const Graph& graph, const Edges& edges, const std::vector<Part>& parts,
              const std::vector<Match>& matches) {
  const std::size_t n = graph.num_nodes();
  std::vector<std::size_t> event(n);
  std::iota(event.begin(), event.end(), std::size_t{0});
  const auto join = [&](Node a, Node b) {
    const std::size_t into = event[a.id], from = event[b.id];
    std::replace(event.begin(), event.end(), from, into);
  };
  for (const Match& match : matches) {
    for (const Part& part : match) join(match.front().node, part.node);
  }
  for (const Part& a : parts) {
    for (const Part& b : parts) {
      if (graph.rank(a.node) == graph.rank(b.node) && a.view.issue == b.view.issue) join(a.node, b.node);
    }
  }

  std::vector<Mask> needs(n), members(n);  // by event; unused numbers stay empty
  for (std::uint32_t id = 0; id < n; ++id) {
    members[event[id]] |= bit(id);
    for (auto k = edges.pred_begin[id]; k < edges.pred_begin[id + 1]; ++k) needs[event[id]] |= bit(edges.preds[k]);
  }
  for (const Part& a : parts) {
    for (const Part& b : parts) {
      if (graph.rank(a.node) == graph.rank(b.node) && a.view.issue < b.view.issue) {
        needs[event[b.node.id]] |= bit(a.node.id);
      }
    }
  }

  const Mask everything = static_cast<Mask>((std::uint64_t{1} << n) - 1);
  std::set<Mask> seen{0};
  std::vector<Mask> todo{0};
  while (!todo.empty()) {
    const Mask done = todo.back();
    todo.pop_back();
    bool stuck = done != everything;
    for (std::size_t e = 0; e < n; ++e) {
      if (members[e] == 0 || (members[e] & done) != 0 || (needs[e] & ~done) != 0) continue;
      stuck = false;
      if (seen.insert(done | members[e]).second) todo.push_back(done | members[e]);
    }
    if (stuck) return true;
  }
  return false;
}

// A mixing step of splitmix64: distinct inputs give distinct-looking values.
std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t z = a * 0x9e3779b97f4a7c15u + b + 0x7f4a7c15u;
  z               = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z               = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

using Memory = std::map<Byte, std::uint64_t>;

// Runs one instance on symbolic bytes and returns a hash of its input.
std::uint64_t run_instance(const TwoRuns& runs, std::size_t i, Memory& memory) {
  const Touched& bytes = runs.bytes[i % runs.nodes.size()];
  std::uint64_t fed    = mix(i, 1);
  for (const Byte& byte : bytes.read) fed = mix(fed, memory.at(byte));
  for (const Byte& byte : bytes.written) {
    memory[byte] = mix(fed, mix(byte.first, static_cast<std::uint64_t>(byte.second)));
  }
  return fed;
}

// Whether some continuation from `finished` differs from program order, in which each instance gets the input `fed` and
// memory ends as `end`.
bool strays(const TwoRuns& runs, Mask finished, const Memory& memory, const std::vector<std::uint64_t>& fed,
            const Memory& end) {
  bool last = true;
  for (std::size_t i = 0; i < runs.num_instances(); ++i) {
    if ((finished & bit(i)) != 0 || (runs.preds[i] & ~finished) != 0) continue;
    last        = false;
    Memory next = memory;
    if (run_instance(runs, i, next) != fed[i]) return true;
    if (strays(runs, finished | bit(i), next, fed, end)) return true;
  }
  const bool complete = finished == static_cast<Mask>((std::uint64_t{1} << runs.num_instances()) - 1);
  return last && complete && memory != end;
}

}  // namespace

std::string to_string(const Harm& harm) {
  std::string text;
  for (const auto& [set, name] : {std::pair{harm.race, "race"}, std::pair{harm.broken_lane, "broken_lane"},
                                  std::pair{harm.loop_race, "loop_race"}, std::pair{harm.loop_lane, "loop_lane"},
                                  std::pair{harm.unwritten_read, "unwritten_read"},
                                  std::pair{harm.mismatched, "mismatched"}, std::pair{harm.unmatched, "unmatched"},
                                  std::pair{harm.bad_overlap, "bad_overlap"}, std::pair{harm.deadlock, "deadlock"}}) {
    if (set) text += str(text.empty() ? "" : " + ", name);
  }
  return text.empty() ? "none" : text;
}

Harm find_harm(const Graph& graph, const Edges& edges) {
  if (graph.num_nodes() > max_nodes) throw Error(ErrorKind::config, str("oracle: ", graph.num_nodes(), " nodes"));
  Harm harm;
  for (int rank = 0; rank < graph.num_ranks(); ++rank) {
    const TwoRuns runs = two_runs(graph, edges, Rank{rank});
    find_disorder(graph, runs, harm);
    harm.unwritten_read |= reads_unwritten(graph, runs);
  }
  const std::vector<Part> parts    = all_parts(graph);
  const std::vector<Match> matches = match_parts(graph, parts, harm);
  for (const Part& part : parts) harm.bad_overlap |= overlaps_badly(graph, part);
  if (!harm.unmatched && !harm.mismatched) harm.deadlock = can_hang(graph, edges, parts, matches);
  return harm;
}

bool changes_values(const Graph& graph, const Edges& edges) {
  for (int rank = 0; rank < graph.num_ranks(); ++rank) {
    const TwoRuns runs = two_runs(graph, edges, Rank{rank});
    Memory start;
    for (const Touched& bytes : runs.bytes) {
      for (const auto* list : {&bytes.read, &bytes.written}) {
        for (const Byte& byte : *list) start[byte] = mix(byte.first, static_cast<std::uint64_t>(byte.second));
      }
    }
    Memory end = start;
    std::vector<std::uint64_t> fed;
    for (std::size_t i = 0; i < runs.num_instances(); ++i) fed.push_back(run_instance(runs, i, end));
    if (strays(runs, 0, start, fed, end)) return true;
  }
  return false;
}

}  // namespace stepgraph::testing
