#include "graphs/step/recompute.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "engine/base/error.hpp"
#include "engine/graph/atoms.hpp"
#include "engine/graph/graph_data.hpp"

namespace stepgraph {
namespace {

using Role = RecomputePlace::Role;

constexpr std::string_view again = "recompute";

// Who wrote what an access reads.
struct Source {
  std::vector<std::uint32_t> region = {};  // nodes of the region
  bool reader                       = false;
  bool outside                      = false;  // others, or an earlier step
  bool stale                        = false;  // of a region's node: not there any more when it would run again
};

struct RegionUse {
  std::vector<std::uint32_t> nodes;    // before the first reader
  std::vector<std::uint32_t> readers;  // in their order; the first is where nodes run again
  std::set<std::uint32_t> written;     // buffers that the nodes write
  std::set<std::uint32_t> shared;      // of those, what somebody but a reader touches after the first reader
  std::set<std::uint32_t> changed;     // what readers write
};

class Recomputation {
 public:
  Recomputation(const Graph& graph, const RecomputePlaces& places)
      : graph_(graph),
        data_(graph.data()),
        region_of_(graph.num_nodes(), none),
        role_(graph.num_nodes()),
        redirected_(data_.accesses.size(), 0) {
    find_regions(places);
    find_sources();
    for (std::uint32_t i = 0; i < regions_.size(); ++i) decide(regions_[i]);
  }

  [[nodiscard]] Graph emit() {
    if (again_before_.empty()) return graph_;
    Graph out = graph_.only_rank() ? Graph(graph_.num_ranks(), *graph_.only_rank()) : Graph(graph_.num_ranks());
    for (const BufferSpec& buffer : data_.buffers) (void)out.buffer(buffer);
    for (const GroupSpec& group : data_.groups) (void)out.group(group);
    issue_again();
    for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      if (const auto found = again_before_.find(node); found != again_before_.end()) {
        for (const std::uint32_t first : found->second) add_again(out, first);
      }
      add(out, node);
    }
    return out;
  }

 private:
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  // Tokens hold nothing: whoever runs again takes its place in their order once more.
  [[nodiscard]] bool is_token(std::uint32_t access) const {
    return data_.buffers[data_.accesses[access].buffer()].token;
  }

  void find_regions(const RecomputePlaces& places) {
    std::map<std::pair<int, std::int64_t>, std::uint32_t> numbers;
    for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      const RecomputePlace place = places(Node{node});
      const NodeRecord& record   = data_.nodes[node];
      const bool message = record.part >= 0 && point_to_point(data_.parts[static_cast<std::size_t>(record.part)].op);
      if (place.role == Role::outside || (message && place.role == Role::region)) continue;
      const auto [at, first] =
          numbers.try_emplace({record.rank, place.region}, static_cast<std::uint32_t>(regions_.size()));
      if (first) regions_.emplace_back();
      RegionUse& region = regions_[at->second];
      if (place.role == Role::region && !region.readers.empty()) continue;  // too late for what was read before it
      region_of_[node] = at->second;
      role_[node]      = place.role;
      (place.role == Role::region ? region.nodes : region.readers).push_back(node);
    }
  }

  // One walk in the order of nodes, with the last writer of every byte.
  void find_sources() {
    const Atoms atoms(data_);
    std::vector<std::uint32_t> writer(atoms.size(), none);
    std::vector<std::vector<std::uint32_t>> written_in(data_.buffers.size());  // regions whose first reader is past
    const auto for_atoms = [&](std::uint32_t access, const auto& visit) {
      atoms.of(data_.accesses[access], [&](std::uint32_t first, std::uint32_t count) {
        for (std::uint32_t atom = first; atom < first + count; ++atom) visit(atom);
      });
    };
    const auto for_accesses = [&](std::uint32_t node, const auto& visit) {
      for (std::uint32_t i = data_.nodes[node].access_begin; i < data_.access_end(node); ++i) {
        if (!is_token(i)) visit(i);
      }
    };
    for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      const std::uint32_t number = region_of_[node];
      if (number != none && role_[node] == Role::reader && regions_[number].readers.front() == node) {
        for (const std::uint32_t first : regions_[number].nodes) {
          for_accesses(first, [&](std::uint32_t access) {
            const auto found = sources_.find(access);
            if (found == sources_.end() || !found->second.outside) return;
            for_atoms(access, [&](std::uint32_t atom) {
              found->second.stale |= writer[atom] != none && writer[atom] >= first;
            });
          });
        }
        for (const std::uint32_t buffer : regions_[number].written) written_in[buffer].push_back(number);
      }
      for_accesses(node, [&](std::uint32_t access) {
        const AccessRecord& record = data_.accesses[access];
        for (const std::uint32_t other : written_in[record.buffer()]) {
          if (other != number || role_[node] != Role::reader) regions_[other].shared.insert(record.buffer());
        }
        if (number == none || !reads(record.mode())) return;
        Source& source = sources_[access];
        const bool old = data_.buffers[record.buffer()].lifetime == Lifetime::persistent;
        for_atoms(access, [&](std::uint32_t atom) {
          const std::uint32_t from = writer[atom];
          if (from == none) {
            source.outside |= old || role_[node] == Role::region;
          } else if (region_of_[from] != number) {
            source.outside = true;
          } else if (role_[from] == Role::reader) {
            source.reader = true;
          } else if (std::find(source.region.begin(), source.region.end(), from) == source.region.end()) {
            source.region.push_back(from);
          }
        });
      });
      for_accesses(node, [&](std::uint32_t access) {
        const AccessRecord& record = data_.accesses[access];
        if (!writes(record.mode())) return;
        for_atoms(access, [&](std::uint32_t atom) { writer[atom] = node; });
        if (number == none) return;
        (role_[node] == Role::region ? regions_[number].written : regions_[number].changed).insert(record.buffer());
      });
    }
  }

  // Which accesses of readers go to new buffers, and which nodes have to run again for that.
  void decide(RegionUse& region) {
    std::set<std::uint32_t> needed, kept;  // kept: buffers that readers cannot take over as a whole
    const auto for_reader_accesses = [&](const auto& visit) {
      for (const std::uint32_t reader : region.readers) {
        for (std::uint32_t i = data_.nodes[reader].access_begin; i < data_.access_end(reader); ++i) {
          if (region.written.contains(data_.accesses[i].buffer())) visit(i, data_.accesses[i]);
        }
      }
    };
    for_reader_accesses([&](std::uint32_t access, const AccessRecord& record) {
      const bool persistent = data_.buffers[record.buffer()].lifetime == Lifetime::persistent;
      if (region.shared.contains(record.buffer()) || persistent || (reads(record.mode()) && sources_[access].outside)) {
        kept.insert(record.buffer());
      }
    });
    std::set<std::uint32_t> read;  // buffers of which readers get what was computed again
    for_reader_accesses([&](std::uint32_t access, const AccessRecord& record) {
      if (!reads(record.mode())) return;
      const Source& source = sources_[access];
      if (source.region.empty()) return;
      const bool whole = !kept.contains(record.buffer());
      if (!whole && (source.outside || source.reader || writes(record.mode()))) return;
      needed.insert(source.region.begin(), source.region.end());
      read.insert(record.buffer());
    });
    if (needed.empty()) return;
    for_reader_accesses([&](std::uint32_t access, const AccessRecord& record) {
      if (!read.contains(record.buffer())) return;
      if (!kept.contains(record.buffer())) {
        redirected_[access] = 1;
      } else if (record.mode() == AccessMode::read) {
        const Source& source = sources_[access];
        if (!source.region.empty() && !source.outside && !source.reader) redirected_[access] = 1;
      }
    });
    std::vector<std::uint32_t>& nodes = again_before_[region.readers.front()];
    for (auto node = region.nodes.rbegin(); node != region.nodes.rend(); ++node) {
      if (!needed.contains(*node)) continue;
      nodes.push_back(*node);
      for (std::uint32_t i = data_.nodes[*node].access_begin; i < data_.access_end(*node); ++i) {
        if (!reads(data_.accesses[i].mode()) || is_token(i)) continue;
        const Source& source = sources_[i];
        check(source, *node, i, region.readers.front());
        needed.insert(source.region.begin(), source.region.end());
      }
    }
    std::reverse(nodes.begin(), nodes.end());
  }

  void check(const Source& source, std::uint32_t node, std::uint32_t access, std::uint32_t reader) const {
    if (!source.outside) return;
    const auto refuse = [&](const std::string& why) {
      throw Error(
          ErrorKind::graph,
          str("recompute: ", graph_.describe(Node{node}), " cannot run again before ", graph_.describe(Node{reader}),
              ": ", graph_.describe(Buffer{data_.accesses[access].buffer()}), ", which it reads, ", why));
    };
    if (!source.region.empty()) refuse("was written in part by its region (by the region, or outside of it)");
    if (source.stale) refuse("has been written over since (what a region reads from outside must stay as it is)");
  }

  // --- the new graph -------------------------------------------------------------------------------------------------

  // Parts that run again are issued after the latest of the parts that come before them in the order of nodes; what was
  // issued after that one makes room.
  void issue_again() {
    std::vector<std::int32_t> latest(static_cast<std::size_t>(graph_.num_ranks()), -1);
    added_.resize(latest.size());
    for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      const auto rank = static_cast<std::size_t>(data_.nodes[node].rank);
      if (const auto found = again_before_.find(node); found != again_before_.end()) {
        for (const std::uint32_t first : found->second) {
          if (data_.nodes[first].part >= 0) added_[rank].push_back(latest[rank]);
        }
      }
      if (data_.nodes[node].part >= 0) {
        latest[rank] = std::max(latest[rank], data_.parts[static_cast<std::size_t>(data_.nodes[node].part)].issue);
      }
    }
    next_added_.assign(latest.size(), 0);
  }

  [[nodiscard]] std::int32_t moved(std::int32_t issue, std::size_t rank) const {  // by those that were added before it
    const auto& added = added_[rank];
    return issue + static_cast<std::int32_t>(std::lower_bound(added.begin(), added.end(), issue) - added.begin());
  }

  void add(Graph& out, std::uint32_t node) {
    NodeSpec spec = graph_.spec(Node{node});
    if (spec.part) spec.part->issue = moved(spec.part->issue, static_cast<std::size_t>(index(graph_.rank(Node{node}))));
    if (region_of_[node] != none && role_[node] == Role::reader) {
      redirect(out, spec, node, [&](std::uint32_t access) { return redirected_[access] != 0; });
    }
    out.add(spec, graph_.body(Node{node}));
  }

  void add_again(Graph& out, std::uint32_t node) {
    NodeSpec spec     = graph_.spec(Node{node});
    spec.name         = str(again, " ", spec.name);
    spec.labels.phase = again;
    if (spec.part) {
      const auto rank        = static_cast<std::size_t>(index(graph_.rank(Node{node})));
      const std::size_t turn = next_added_[rank]++;
      spec.part->message     = str(again, " ", spec.part->message);
      spec.part->issue       = added_[rank][turn] + 1 + static_cast<std::int32_t>(turn);
    }
    redirect(out, spec, node, [&](std::uint32_t access) {
      return !is_token(access) && (writes(data_.accesses[access].mode()) || !sources_[access].region.empty());
    });
    out.add(spec, graph_.body(Node{node}));
  }

  // The accesses that `chosen` names go to the region's new buffers; all keep their places in the lists.
  template <class Chosen>
  void redirect(Graph& out, NodeSpec& spec, std::uint32_t node, const Chosen& chosen) {
    spec.reads = spec.writes = spec.accumulates = {};
    for (std::size_t i = 0; i < graph_.num_accesses(Node{node}); ++i) {
      Graph::AccessView view = graph_.access(Node{node}, i);
      if (chosen(data_.nodes[node].access_begin + static_cast<std::uint32_t>(i))) {
        view.buffer = second_buffer(out, region_of_[node], view.buffer);
      }
      AccessList& list = view.mode == AccessMode::read    ? spec.reads
                         : view.mode == AccessMode::write ? spec.writes
                                                          : spec.accumulates;
      list.push_back({view.buffer, view.region});
    }
  }

  Buffer second_buffer(Graph& out, std::uint32_t region, Buffer buffer) {
    const auto [at, first] = second_buffers_.try_emplace({region, buffer.id});
    if (first) {
      BufferSpec spec = graph_.spec(buffer);
      spec.name       = str(again, " ", spec.name);
      spec.lifetime   = Lifetime::step;
      at->second      = out.buffer(spec);
    }
    return at->second;
  }

  const Graph& graph_;
  const GraphData& data_;
  std::vector<std::uint32_t> region_of_;  // by node
  std::vector<Role> role_;
  std::vector<RegionUse> regions_;
  std::unordered_map<std::uint32_t, Source> sources_;                         // by access, of what regions read
  std::vector<char> redirected_;                                              // accesses of readers
  std::map<std::uint32_t, std::vector<std::uint32_t>> again_before_;          // by reader: the nodes
  std::map<std::pair<std::uint32_t, std::uint32_t>, Buffer> second_buffers_;  // by region and buffer
  std::vector<std::vector<std::int32_t>> added_;  // by rank: after which place each added part is issued
  std::vector<std::size_t> next_added_;
};

}  // namespace

Graph recompute(const Graph& graph, const RecomputePlaces& places) { return Recomputation(graph, places).emit(); }

Graph recompute(const Graph& graph, Recompute kind) {
  if (kind == Recompute::none) return graph;
  std::vector<char> attended(graph.num_buffers(), 0);
  const auto place_of = [&](Node node) -> RecomputePlace {
    const Labels labels = graph.labels(node);
    if (labels.microbatch < 0 || labels.layer < 0 || labels.phase.empty() || labels.phase == again) return {};
    const std::int64_t region = (std::int64_t{labels.microbatch} << 32) + labels.layer;
    if (labels.phase == "forward") {
      const bool within = kind == Recompute::full || graph.op(node) == "attention";
      return {within ? Role::region : Role::outside, region};
    }
    bool reader = kind == Recompute::full;
    for (std::size_t i = 0; i < graph.num_accesses(node) && !reader; ++i) {
      reader = reads(graph.access(node, i).mode) && attended[graph.access(node, i).buffer.id] != 0;
    }
    return {reader ? Role::reader : Role::outside, region};
  };
  for (std::uint32_t i = 0; i < graph.num_nodes() && kind == Recompute::selective; ++i) {
    if (place_of(Node{i}).role != Role::region) continue;
    for (std::size_t a = 0; a < graph.num_accesses(Node{i}); ++a) {
      const auto access = graph.access(Node{i}, a);
      if (writes(access.mode)) attended[access.buffer.id] = 1;
    }
  }
  return recompute(graph, place_of);
}

}  // namespace stepgraph
