#include "engine/graph/recompute.hpp"

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

constexpr std::string_view again = recompute_phase;

// The nodes that wrote the bytes that an access reads.
struct Source {
  std::vector<std::uint32_t> region = {};  // nodes of the region
  bool reader                       = false;
  bool outside                      = false;  // other nodes, or an earlier step
  bool stale                        = false;  // of a region's node: overwritten before the node would run again
};

struct RegionUse {
  std::vector<std::uint32_t> nodes;    // before the first reader
  std::vector<std::uint32_t> readers;  // in their order; nodes run again before the first
  std::set<std::uint32_t> written;     // buffers that the nodes write
  std::set<std::uint32_t> shared;      // of those, the ones that nodes other than readers use after the first reader
  std::set<std::uint32_t> changed;     // buffers that readers write
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
    Graph out(graph_.num_ranks(), graph_.ranks());
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

  [[nodiscard]] std::uint32_t buffer_of(std::uint32_t access) const { return data_.accesses[access].buffer(); }
  [[nodiscard]] AccessMode mode_of(std::uint32_t access) const { return data_.accesses[access].mode(); }

  // Tokens hold no data: a node that runs again only takes part in their order again.
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
      if (place.role == Role::region && !region.readers.empty()) continue;  // too late: a reader came before it
      region_of_[node] = at->second;
      role_[node]      = place.role;
      (place.role == Role::region ? region.nodes : region.readers).push_back(node);
    }
  }

  // Visits nodes in their order and keeps the last writer of every byte.
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

  // Decides which accesses of readers use new buffers, and which nodes must run again for that.
  void decide(const RegionUse& region) {
    const std::vector<std::uint32_t> accesses = reader_accesses(region);
    const std::set<std::uint32_t> kept        = kept_buffers(region, accesses);
    // A buffer that is not kept gets a new one, with all of its accesses. Of a kept buffer only accesses that read
    // nothing but the region's values are redirected.
    const auto takes = [&](std::uint32_t access) {
      if (!reads(mode_of(access))) return false;
      const Source& source = sources_[access];
      if (source.region.empty()) return false;
      return !kept.contains(buffer_of(access)) ||
             (mode_of(access) == AccessMode::read && !source.outside && !source.reader);
    };
    std::set<std::uint32_t> needed, recomputed;  // nodes; buffers whose recomputed values readers read
    for (const std::uint32_t access : accesses) {
      if (!takes(access)) continue;
      needed.insert(sources_[access].region.begin(), sources_[access].region.end());
      recomputed.insert(buffer_of(access));
    }
    if (needed.empty()) return;
    for (const std::uint32_t access : accesses) {
      const std::uint32_t buffer = buffer_of(access);
      if (recomputed.contains(buffer) && (!kept.contains(buffer) || takes(access))) redirected_[access] = 1;
    }
    again_before_[region.readers.front()] = nodes_to_repeat(region, std::move(needed));
  }

  // The accesses of the region's readers to buffers that the region writes.
  [[nodiscard]] std::vector<std::uint32_t> reader_accesses(const RegionUse& region) const {
    std::vector<std::uint32_t> found;
    for (const std::uint32_t reader : region.readers) {
      for (std::uint32_t i = data_.nodes[reader].access_begin; i < data_.access_end(reader); ++i) {
        if (region.written.contains(buffer_of(i))) found.push_back(i);
      }
    }
    return found;
  }

  // Buffers that a new buffer cannot replace as a whole: other nodes use them later, their values outlive the step, or
  // a reader also reads bytes that the region did not write.
  [[nodiscard]] std::set<std::uint32_t> kept_buffers(const RegionUse& region,
                                                     const std::vector<std::uint32_t>& accesses) {
    std::set<std::uint32_t> kept;
    for (const std::uint32_t access : accesses) {
      const std::uint32_t buffer = buffer_of(access);
      if (region.shared.contains(buffer) || data_.buffers[buffer].lifetime == Lifetime::persistent ||
          (reads(mode_of(access)) && sources_[access].outside)) {
        kept.insert(buffer);
      }
    }
    return kept;
  }

  // The needed nodes of a region and the nodes that those read from, in the order of nodes.
  [[nodiscard]] std::vector<std::uint32_t> nodes_to_repeat(const RegionUse& region, std::set<std::uint32_t> needed) {
    std::vector<std::uint32_t> nodes;
    for (auto node = region.nodes.rbegin(); node != region.nodes.rend(); ++node) {
      if (!needed.contains(*node)) continue;
      nodes.push_back(*node);
      for (std::uint32_t i = data_.nodes[*node].access_begin; i < data_.access_end(*node); ++i) {
        if (!reads(mode_of(i)) || is_token(i)) continue;
        const Source& source = sources_[i];
        check(source, *node, i, region.readers.front());
        needed.insert(source.region.begin(), source.region.end());
      }
    }
    std::reverse(nodes.begin(), nodes.end());
    return nodes;
  }

  void check(const Source& source, std::uint32_t node, std::uint32_t access, std::uint32_t reader) const {
    if (!source.outside) return;
    const auto refuse = [&](const std::string& why) {
      throw Error(
          ErrorKind::graph,
          str("recompute: ", graph_.describe(Node{node}), " cannot run again before ", graph_.describe(Node{reader}),
              ": ", graph_.describe(Buffer{data_.accesses[access].buffer()}), ", which it reads, ", why));
    };
    if (!source.region.empty())
      refuse("was written partly by its region and partly outside (only inside, or only outside)");
    if (source.stale) refuse("has been overwritten since (inputs of a region from outside must not change)");
  }

  // --- the new graph -------------------------------------------------------------------------------------------------

  // A part that runs again is issued after all parts that come before it in the order of nodes. Parts that are issued
  // later get higher positions.
  void issue_again() {
    std::vector<std::int32_t> latest(graph_.ranks().size(), -1);  // by place, as all below
    added_.resize(latest.size());
    for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      const std::size_t rank = data_.nodes[node].place;
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

  // The new issue position of a part: higher by the number of parts added before it.
  [[nodiscard]] std::int32_t moved(std::int32_t issue, std::size_t place) const {
    const auto& added = added_[place];
    return issue + static_cast<std::int32_t>(std::lower_bound(added.begin(), added.end(), issue) - added.begin());
  }

  void add(Graph& out, std::uint32_t node) {
    NodeSpec spec = graph_.spec(Node{node});
    if (spec.part) spec.part->issue = moved(spec.part->issue, data_.nodes[node].place);
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
      const std::size_t rank = data_.nodes[node].place;
      const std::size_t turn = next_added_[rank]++;
      spec.part->message     = str(again, " ", spec.part->message);
      spec.part->issue       = added_[rank][turn] + 1 + static_cast<std::int32_t>(turn);
    }
    redirect(out, spec, node, [&](std::uint32_t access) {
      return !is_token(access) && (writes(data_.accesses[access].mode()) || !sources_[access].region.empty());
    });
    out.add(spec, graph_.body(Node{node}));
  }

  // The chosen accesses use the region's new buffers; all accesses keep their places in the lists.
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
  std::unordered_map<std::uint32_t, Source> sources_;                 // by access, for the reads of regions and readers
  std::vector<char> redirected_;                                      // accesses of readers
  std::map<std::uint32_t, std::vector<std::uint32_t>> again_before_;  // by reader: the nodes
  std::map<std::pair<std::uint32_t, std::uint32_t>, Buffer> second_buffers_;  // by region and buffer
  std::vector<std::vector<std::int32_t>> added_;  // by rank: the position after which each added part is issued
  std::vector<std::size_t> next_added_;
};

}  // namespace

Graph recompute(const Graph& graph, const RecomputePlaces& places) { return Recomputation(graph, places).emit(); }

}  // namespace stepgraph
