#include "engine/draw/groups.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <unordered_map>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/graph/matching.hpp"
#include "engine/plan/memory_plan.hpp"

namespace stepgraph::drawing {
namespace {

constexpr std::size_t max_boxes    = max_drawn_boxes - 24;  // the rest is for the legend and the caption
constexpr std::size_t line_letters = 15;                    // length at which titles wrap
constexpr std::size_t max_lines    = 3;

Shade shade_of(const GraphData& data, std::uint32_t node) {
  const NodeRecord& record = data.nodes[node];
  if (record.part >= 0) {
    switch (data.parts[static_cast<std::size_t>(record.part)].op) {
      case PartOp::all_reduce:
        return Shade::all_reduce;
      case PartOp::reduce:
        return Shade::reduce;
      case PartOp::scatter:
        return Shade::scatter;
      case PartOp::gather:
        return Shade::gather;
      case PartOp::all_to_all:
        return Shade::all_to_all;
      case PartOp::permute:
        return Shade::permute;
      case PartOp::all_gather:
        return Shade::all_gather;
      case PartOp::reduce_scatter:
        return Shade::reduce_scatter;
      case PartOp::broadcast:
        return Shade::broadcast;
      case PartOp::barrier:
        return Shade::barrier;
      case PartOp::send:
        return Shade::send;
      case PartOp::recv:
        return Shade::recv;
    }
  }
  switch (record.kind) {
    case NodeKind::compute:
      return Shade::compute;
    case NodeKind::communicate:
      return Shade::communicate;
    case NodeKind::copy:
      return Shade::copy;
    case NodeKind::host:
      return Shade::host;
  }
  return Shade::compute;
}

// --- which parts are one communication ---------------------------------------------------------------------------

// The matched parts. Drawings also support graphs that do not verify: unmatched parts stay alone, and nothing is
// compared.
std::vector<std::vector<std::uint32_t>> matches_of(const Graph& graph) {
  const Matching matching = match_parts(graph);
  std::vector<std::vector<std::uint32_t>> matches;
  for (std::size_t i = 0; i < matching.size(); ++i)
    matches.emplace_back(matching.meeting(i).begin(), matching.meeting(i).end());
  return matches;
}

// --- the earliest start of a node, in unit steps ----------------------------------------------------------------

// The length of the longest path to each node. The parts of one communication start together. Empty if that makes a
// cycle.
std::vector<std::uint32_t> levels_of(const Edges& edges, std::size_t num_nodes,
                                     const std::vector<std::vector<std::uint32_t>>& matches) {
  std::vector<std::uint32_t> unit(num_nodes), waiting(num_nodes, 0), level(num_nodes, 0);
  std::iota(unit.begin(), unit.end(), 0u);
  for (const auto& match : matches) {
    for (const std::uint32_t node : match) unit[node] = match.front();
  }
  std::vector<std::uint32_t> begin(num_nodes + 1, 0), succs(edges.preds.size());
  const auto for_each_edge = [&](auto&& visit) {
    for (std::uint32_t node = 0; node < num_nodes; ++node) {
      for (const std::uint32_t before : edges.before({node})) visit(unit[before], unit[node]);
    }
  };
  for_each_edge([&](std::uint32_t from, std::uint32_t to) { ++begin[from + 1], ++waiting[to]; });
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::vector<std::uint32_t> next(begin.begin(), begin.end() - 1), ready;
  for_each_edge([&](std::uint32_t from, std::uint32_t to) { succs[next[from]++] = to; });
  std::size_t num_units = 0;
  for (std::uint32_t node = 0; node < num_nodes; ++node) {
    if (unit[node] != node) continue;
    ++num_units;
    if (waiting[node] == 0) ready.push_back(node);
  }
  for (std::size_t i = 0; i < ready.size(); ++i) {
    for (std::uint32_t j = begin[ready[i]]; j < begin[ready[i] + 1]; ++j) {
      level[succs[j]] = std::max(level[succs[j]], level[ready[i]] + 1);
      if (--waiting[succs[j]] == 0) ready.push_back(succs[j]);
    }
  }
  if (ready.size() < num_units) return {};
  for (std::uint32_t node = 0; node < num_nodes; ++node) level[node] = level[unit[node]];
  return level;
}

// --- which nodes share a box -------------------------------------------------------------------------------------

// Identifies a box within a rank. The rank is not part of it, so that ranks can be compared.
struct Key {
  int lane = -1, stage = -1, microbatch = -1, layer = -1;
  std::uint32_t phase = 0, op = 0, shade = 0, node = 0;
  friend auto operator<=>(const Key&, const Key&) = default;
};

struct Grain {
  bool node = false, layer = false, microbatch = true, phase = true, stage = true, op = true;
  std::vector<bool> joined = {};  // by rank: drawn together with the previous rank
  int range                = 1;   // this many consecutive ranks are drawn together, even if they differ
};

Key key_of(const GraphData& data, std::uint32_t node, const Grain& grain) {
  const NodeRecord& record = data.nodes[node];
  Key key;
  key.lane = record.lane;
  if (grain.node) {
    key.node = node;
    return key;
  }
  if (grain.stage) key.stage = record.stage;
  if (grain.microbatch) key.microbatch = record.microbatch;
  if (grain.layer) key.layer = record.layer;
  if (grain.phase) key.phase = record.phase;
  const bool labelled = record.stage >= 0 || record.microbatch >= 0 || record.layer >= 0 || record.phase != 0;
  if (grain.op && !labelled) {
    key.op    = record.op;
    key.shade = 1 + static_cast<std::uint32_t>(shade_of(data, node));
  }
  return key;
}

struct Grouping {
  std::vector<Cluster> clusters;
  std::vector<std::uint32_t> box_of_node;  // no_node: not drawn
  std::size_t num_boxes = 0;
};

using Keys = std::vector<std::map<Key, std::uint32_t>>;  // by rank

Keys keys_of(const GraphData& data, const std::vector<std::uint32_t>& nodes, const Grain& grain) {
  Keys keys(static_cast<std::size_t>(data.num_ranks));
  for (const std::uint32_t node : nodes)
    keys[static_cast<std::size_t>(data.nodes[node].rank)].try_emplace(key_of(data, node, grain));
  return keys;
}

Grouping assign(const GraphData& data, const std::vector<std::uint32_t>& nodes, const Grain& grain) {
  Keys keys = keys_of(data, nodes, grain);
  Grouping out;
  const auto range = static_cast<std::size_t>(grain.range);
  std::vector<std::size_t> home(keys.size());  // the rank whose boxes also represent this rank
  std::size_t last = keys.size();
  for (std::size_t rank = 0; rank < keys.size(); ++rank) {
    home[rank] = rank;
    if (keys[rank].empty()) continue;
    const bool joined = !grain.joined.empty() && grain.joined[rank];
    if (last < keys.size() && (joined || rank / range == last / range)) {
      home[rank]                    = last;
      out.clusters.back().last_rank = static_cast<int>(rank);
      keys[last].merge(keys[rank]);
    } else {
      last = rank;
      out.clusters.push_back({static_cast<int>(rank), static_cast<int>(rank)});
    }
  }
  for (std::size_t rank = 0; rank < keys.size(); ++rank) {
    if (home[rank] != rank) continue;
    for (auto& [key, id] : keys[rank]) id = static_cast<std::uint32_t>(out.num_boxes++);
  }
  out.box_of_node.assign(data.nodes.size(), no_node);
  for (const std::uint32_t node : nodes) {
    const std::size_t rank = home[static_cast<std::size_t>(data.nodes[node].rank)];
    out.box_of_node[node]  = keys[rank].at(key_of(data, node, grain));
  }
  return out;
}

// Whether each rank has the same boxes as the previous rank.
std::vector<bool> alike(const Keys& keys) {
  std::vector<bool> out(keys.size(), false);
  const auto same = [](const auto& a, const auto& b) { return a.first == b.first; };
  for (std::size_t rank = 1; rank < keys.size(); ++rank) {
    const auto &a = keys[rank - 1], &b = keys[rank];
    out[rank] = a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), same);
  }
  return out;
}

// Coarsens until the boxes fit. Ranks that do the same are merged first: that loses only repetition. Lanes are kept: a
// rank has few of them, and merging ranges of ranks always suffices.
Grouping coarsen(const GraphData& data, const std::vector<std::uint32_t>& nodes, std::string& merged) {
  Grain grain;
  Grouping out       = assign(data, nodes, grain);
  const auto attempt = [&](auto&& change, const std::string& what) {
    if (out.num_boxes <= max_boxes) return;
    const std::size_t before = out.num_boxes;
    change();
    out = assign(data, nodes, grain);
    if (out.num_boxes < before) merged += str(merged.empty() ? "" : ", ", what);
  };
  attempt([&] { grain.joined = alike(keys_of(data, nodes, grain)); }, "neighbouring ranks that do the same");
  attempt([&] { grain.microbatch = false; }, "microbatches");
  attempt([&] { grain.phase = grain.op = false; }, "phases");
  attempt([&] { grain.stage = false; }, "stages");
  while (out.num_boxes > max_boxes) {
    grain.range *= 2;
    out = assign(data, nodes, grain);
  }
  if (grain.range > 1) merged += str(merged.empty() ? "" : ", ", "ranges of ", grain.range, " ranks");
  return out;
}

// --- the text of a box -------------------------------------------------------------------------------------------

std::size_t num_letters(std::string_view text) {  // of UTF-8: bytes that are not continuation bytes
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}
std::size_t bytes_of_letters(std::string_view text, std::size_t letters) {
  std::size_t i = 0;
  for (; i < text.size(); ++i) {
    if ((text[i] & 0xC0) != 0x80 && letters-- == 0) break;
  }
  return i;
}

// Breaks a name at spaces, else after '.', '_', '/' or ':', else anywhere. The last line is cut with an ellipsis if
// needed.
std::vector<std::string> wrap(std::string_view text) {
  std::vector<std::string> lines;
  while (num_letters(text) > line_letters) {
    if (lines.size() + 1 == max_lines) {
      lines.push_back(str(text.substr(0, bytes_of_letters(text, line_letters - 1)), "\u2026"));
      return lines;
    }
    std::size_t end = text.rfind(' ', bytes_of_letters(text, line_letters));
    if (end == std::string_view::npos || end == 0) {
      end = text.find_last_of("._/:", bytes_of_letters(text, line_letters) - 1);
      end = end == std::string_view::npos ? bytes_of_letters(text, line_letters) : end + 1;
    }
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(end);
    if (text.starts_with(' ')) text.remove_prefix(1);
  }
  if (!text.empty() || lines.empty()) lines.emplace_back(text);
  return lines;
}

// Properties that all nodes of a box share.
struct Common {
  struct Range {
    int first = 0, last = -2;
    void add(int value) {
      if (last == -2) first = last = value;
      first = std::min(first, value), last = std::max(last, value);
    }
    [[nodiscard]] bool known() const { return last >= 0 && first >= 0; }
    [[nodiscard]] std::string text() const { return first == last ? str(first) : str(first, "-", last); }
  };
  Range stage, microbatch, layer;
  std::uint32_t phase = 0, op = 0;
  bool same_phase = true, same_op = true;
};

// "pinned to device", "in pinned", "device, pinned to pinned"; empty where all is on the device.
std::string spaces_text(const Box& box) {
  const auto names = [](const std::array<bool, 3>& used) {
    std::string text;
    for (const Space space : {Space::device, Space::pinned, Space::disk})
      if (used[static_cast<std::size_t>(space)]) text += str(text.empty() ? "" : ", ", to_string(space));
    return text;
  };
  const std::string from = names(box.reads), to = names(box.writes);
  const std::string_view device = to_string(Space::device);
  if ((from.empty() || from == device) && (to.empty() || to == device)) return {};
  if (from.empty() || from == to) return str("in ", to);
  return to.empty() ? str("from ", from) : str(from, " to ", to);
}

void describe(Box& box, const Common& common, const GraphData& data, Detail detail, const Cluster& cluster) {
  std::string name(data.name(box.first_node));
  const auto num_shades_used = std::count_if(box.shades.begin(), box.shades.end(), [](auto n) { return n > 0; });
  const auto shade = static_cast<Shade>(std::max_element(box.shades.begin(), box.shades.end()) - box.shades.begin());
  if (detail != Detail::op && (box.num_nodes > 1 || name.empty())) {
    name.clear();
    const auto say = [&](std::string_view word) { name += str(name.empty() ? "" : " ", word); };
    if (num_shades_used == 1 && shade >= Shade::all_gather) say(to_string(shade));
    if (common.same_phase && common.phase != 0) say(data.strings[common.phase]);
    if (name.empty() && common.same_op && common.op != 0) say(data.strings[common.op]);
    if (name.empty()) say(num_shades_used == 1 ? to_string(shade) : "all");
    if (common.microbatch.known()) say(str("mb", common.microbatch.text()));
    std::string where;
    const auto place = [&](const char* what, const Common::Range& range) {
      if (!range.known()) return;
      where += str(where.empty() ? "" : ", ", what, range.first == range.last ? " " : "s ", range.text());
    };
    if (cluster.stage < 0) place("stage", common.stage);
    place("layer", common.layer);
    if (!where.empty()) box.facts.push_back(where);
    box.tooltip = str(name, where.empty() ? "" : ", ", where);
  } else {
    if (name.empty()) name = str("node ", box.first_node);
    box.tooltip = name;
  }
  box.title = wrap(name);
  std::vector<std::string> facts;
  if (detail != Detail::op && box.num_nodes > 1) facts.push_back(str(box.num_nodes, " nodes"));
  if (std::string spaces = spaces_text(box); !spaces.empty()) facts.push_back(std::move(spaces));
  if (box.bytes > 0) facts.push_back(bytes_text(box.bytes));
  if (box.flops > 0) facts.push_back(flops_text(box.flops));
  for (std::size_t i = 0; i < facts.size(); ++i) {
    box.tooltip += str(i == 0 ? ": " : ", ", facts[i]);
    const bool fits = i > 0 && num_letters(box.facts.back()) + num_letters(facts[i]) < line_letters;
    if (fits) {
      box.facts.back() += str(", ", facts[i]);
    } else {
      box.facts.push_back(facts[i]);
    }
  }
}

// --- boxes and links ---------------------------------------------------------------------------------------------

bool conflict(const Graph& graph, Node a, Node b) {
  for (std::size_t i = 0; i < graph.num_accesses(a); ++i) {
    const auto x = graph.access(a, i);
    for (std::size_t j = 0; j < graph.num_accesses(b); ++j) {
      const auto y = graph.access(b, j);
      if (x.buffer == y.buffer && (writes(x.mode) || writes(y.mode)) && x.region.begin() < y.region.end() &&
          y.region.begin() < x.region.end()) {
        return true;
      }
    }
  }
  return false;
}

// Whether both nodes are parts of one rank, which issues the first before the second.
bool issued_before(const GraphData& data, const NodeRecord& a, const NodeRecord& b) {
  if (a.part < 0 || b.part < 0 || a.rank != b.rank) return false;
  return data.parts[static_cast<std::size_t>(a.part)].issue < data.parts[static_cast<std::size_t>(b.part)].issue;
}

bool same_lane(const NodeRecord& a, const NodeRecord& b) { return a.lane >= 0 && a.lane == b.lane && a.rank == b.rank; }

std::vector<Box> make_boxes(const Graph& graph, const std::vector<std::uint32_t>& nodes, Detail detail,
                            const std::vector<std::uint32_t>& levels, Grouping& grouping) {
  const GraphData& data = graph.data();
  std::vector<Box> boxes(grouping.num_boxes);
  std::vector<Common> commons(grouping.num_boxes);
  std::vector<int> cluster_of_rank(static_cast<std::size_t>(data.num_ranks), 0);
  for (std::size_t i = 0; i < grouping.clusters.size(); ++i) {
    for (int rank = grouping.clusters[i].first_rank; rank <= grouping.clusters[i].last_rank; ++rank)
      cluster_of_rank[static_cast<std::size_t>(rank)] = static_cast<int>(i);
  }
  std::vector<Common::Range> stages(grouping.clusters.size());
  for (const std::uint32_t node : nodes) {
    const NodeRecord& record = data.nodes[node];
    if (record.stage >= 0)
      stages[static_cast<std::size_t>(cluster_of_rank[static_cast<std::size_t>(record.rank)])].add(record.stage);
    Box& box       = boxes[grouping.box_of_node[node]];
    Common& common = commons[grouping.box_of_node[node]];
    if (box.num_nodes++ == 0) {
      box.cluster    = cluster_of_rank[static_cast<std::size_t>(record.rank)];
      box.lane       = record.lane;
      box.level      = levels[node];
      box.first_node = node;
      common.phase   = record.phase;
      common.op      = record.op;
    }
    box.level         = std::min(box.level, levels[node]);
    const Shade shade = shade_of(data, node);
    ++box.shades[static_cast<std::size_t>(shade)];
    common.same_phase &= common.phase == record.phase;
    common.same_op &= common.op == record.op;
    common.stage.add(record.stage), common.microbatch.add(record.microbatch), common.layer.add(record.layer);
    box.flops += record.cost.flops;
    for (std::size_t i = 0; i < graph.num_accesses({node}); ++i) {
      const auto access = graph.access({node}, i);
      const bool counts = shade == Shade::send ? reads(access.mode) : writes(access.mode);  // a send only reads
      if (graph.spec(access.buffer).token) continue;
      if (counts) box.bytes += static_cast<double>(access.region.num_bytes());
      const auto space = static_cast<std::size_t>(graph.spec(access.buffer).space);
      box.reads[space] |= reads(access.mode);
      box.writes[space] |= writes(access.mode);
    }
  }
  for (std::size_t i = 0; i < stages.size(); ++i) {
    if (stages[i].known() && stages[i].first == stages[i].last) grouping.clusters[i].stage = stages[i].first;
  }
  std::vector<std::uint32_t> order(boxes.size()), place(boxes.size());
  for (std::uint32_t i = 0; i < boxes.size(); ++i) {
    describe(boxes[i], commons[i], data, detail, grouping.clusters[static_cast<std::size_t>(boxes[i].cluster)]);
    order[i] = i;
  }
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::tuple(boxes[a].level, boxes[a].first_node) < std::tuple(boxes[b].level, boxes[b].first_node);
  });
  std::vector<Box> sorted;
  for (std::uint32_t i = 0; i < order.size(); ++i) {
    place[order[i]] = i;
    sorted.push_back(std::move(boxes[order[i]]));
  }
  for (const std::uint32_t node : nodes) grouping.box_of_node[node] = place[grouping.box_of_node[node]];
  return sorted;
}

std::vector<Link> make_links(const OrderedGraph& ordered, const std::vector<std::uint32_t>& nodes,
                             const Grouping& grouping, const std::vector<std::vector<std::uint32_t>>& matches,
                             const DotOptions& options) {
  const Graph& graph    = ordered.graph;
  const GraphData& data = graph.data();
  const Edges &edges = ordered.edges, &derived = graph.edges();
  std::set<std::pair<std::uint32_t, std::uint32_t>> reuse;
  if (ordered.memory) {
    for (const ReuseEdge& edge : ordered.memory->reuse_edges) {
      if (!edge.loop) reuse.emplace(edge.before.id, edge.after.id);
    }
  }
  std::map<std::tuple<std::uint32_t, std::uint32_t, LinkKind, Shade>, std::uint32_t> counts;
  const auto add = [&](std::uint32_t from, std::uint32_t to, LinkKind kind, Shade shade) {
    const std::uint32_t a = grouping.box_of_node[from], b = grouping.box_of_node[to];
    if (a != b && a != no_node && b != no_node) ++counts[{a, b, kind, shade}];
  };
  for (const std::uint32_t node : nodes) {
    for (const std::uint32_t before : edges.before({node})) {
      if (reuse.contains({before, node})) {
        add(before, node, LinkKind::reuse, Shade::compute);
        continue;
      }
      const auto own = derived.before({node});
      if (&edges != &derived && !std::binary_search(own.begin(), own.end(), before)) {
        const bool issue = issued_before(data, data.nodes[before], data.nodes[node]);
        add(before, node, issue ? LinkKind::issue : LinkKind::added, Shade::compute);
        continue;
      }
      const bool ordered_only = same_lane(data.nodes[before], data.nodes[node]) && !conflict(graph, {before}, {node});
      add(before, node, ordered_only ? LinkKind::lane : LinkKind::data, Shade::compute);
    }
    if (!options.loop_edges) continue;
    for (const std::uint32_t before : edges.before_loop({node})) add(before, node, LinkKind::loop, Shade::compute);
  }
  for (const auto& match : matches) {
    const Shade shade = shade_of(data, match.front());
    for (std::size_t i = 1; i < match.size(); ++i) {
      const bool swap = shade_of(data, match[i - 1]) == Shade::recv;  // a message is drawn from its sender
      add(match[swap ? i : i - 1], match[swap ? i - 1 : i], LinkKind::match,
          shade == Shade::recv ? Shade::send : shade);
    }
  }
  // Edges in both directions between two boxes become one line with two heads. Data edges hide lane edges.
  std::vector<Link> links;
  for (const auto& [key, count] : counts) {
    const auto [from, to, kind, shade] = key;
    Link link{.from = from, .to = to, .kind = kind, .shade = shade, .count = count};
    if (kind == LinkKind::data || kind == LinkKind::lane) {
      const auto find = [&](std::uint32_t a, std::uint32_t b, LinkKind k) {
        const auto at = counts.find({a, b, k, shade});
        return at == counts.end() ? 0 : at->second;
      };
      const std::uint32_t back = find(to, from, LinkKind::data) + find(to, from, LinkKind::lane);
      if (from > to && back > 0) continue;
      const std::uint32_t data_count = find(from, to, LinkKind::data) + find(to, from, LinkKind::data);
      const std::uint32_t lane_count = find(from, to, LinkKind::lane) + find(to, from, LinkKind::lane);
      if (kind == LinkKind::lane && find(from, to, LinkKind::data) > 0) continue;
      link.both  = back > 0;
      link.kind  = data_count > 0 ? LinkKind::data : LinkKind::lane;
      link.count = data_count > 0 ? data_count : lane_count;
    }
    links.push_back(link);
  }
  return links;
}

}  // namespace

std::string_view to_string(Shade shade) noexcept {
  static constexpr std::array<std::string_view, num_shades> names = {
      "compute", "host",   "copy",       "all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast",
      "scatter", "gather", "all_to_all", "permute",    "barrier",        "send",       "recv",   "communicate"};
  return names[static_cast<std::size_t>(shade)];
}

bool Box::only_parts() const noexcept {
  std::uint32_t others = 0;
  for (const Shade shade : {Shade::compute, Shade::host, Shade::copy, Shade::communicate})
    others += shades[static_cast<std::size_t>(shade)];
  return others == 0;
}

Drawing group(const OrderedGraph& ordered, const DotOptions& options) {
  const Graph& graph    = ordered.graph;
  const GraphData& data = graph.data();
  if (ordered.memory && ordered.memory->turns.size() != graph.num_nodes()) {
    throw Error(ErrorKind::config, str("dot: the plan is for ", ordered.memory->turns.size(), " nodes, the graph has ",
                                       graph.num_nodes()));
  }
  if (options.rank) {
    const int rank = index(*options.rank);
    if (rank < 0 || rank >= graph.num_ranks()) {
      throw Error(ErrorKind::config,
                  str("dot: rank ", rank, " is not in the graph (0 to ", graph.num_ranks() - 1, ")"));
    }
    if (!graph.holds(*options.rank)) {
      throw Error(ErrorKind::config,
                  str("dot: rank ", rank, " is not in this graph (it holds only ", to_string(graph.ranks()), ")"));
    }
  }
  std::vector<std::uint32_t> nodes;
  for (std::uint32_t node = 0; node < data.nodes.size(); ++node) {
    if (!options.rank || data.nodes[node].rank == index(*options.rank)) nodes.push_back(node);
  }
  const auto matches                = matches_of(graph);
  std::vector<std::uint32_t> levels = levels_of(ordered.edges, data.nodes.size(), matches);
  if (levels.empty()) levels = levels_of(ordered.edges, data.nodes.size(), {});

  std::string merged;
  Grouping grouping = options.detail == Detail::stage   ? coarsen(data, nodes, merged)
                      : options.detail == Detail::layer ? assign(data, nodes, {.layer = true})
                                                        : assign(data, nodes, {.node = true});
  Drawing out;
  out.boxes       = make_boxes(graph, nodes, options.detail, levels, grouping);
  out.links       = make_links(ordered, nodes, grouping, matches, options);
  out.clusters    = grouping.clusters;
  out.keep_levels = options.detail == Detail::op || options.rank;
  out.caption     = str(nodes.size(), nodes.size() == 1 ? " node" : " nodes");
  if (options.detail != Detail::op) {
    out.caption += str(" in ", out.boxes.size(), out.boxes.size() == 1 ? " box" : " boxes", ", by ",
                       stepgraph::to_string(options.detail), "; a wider line stands for more edges");
  }
  if (!merged.empty()) out.caption += str("; drawn as one: ", merged);
  return out;
}

}  // namespace stepgraph::drawing
