#include "tests/support/oracle/oracle_parts.hpp"

#include <algorithm>
#include <numeric>
#include <optional>

namespace stepgraph::testing {
namespace {

// The owner of every byte of a side that holds a shard of each member; none if the side cannot be cut.
using Owners = std::optional<std::vector<std::size_t>>;

Owners cut(const std::vector<std::size_t>& accesses, std::size_t num_members, std::size_t element) {
  std::vector<std::size_t> sizes = accesses;
  if (accesses.size() != num_members) {
    const std::size_t total = std::accumulate(accesses.begin(), accesses.end(), std::size_t{0});
    if (total % num_members != 0) return std::nullopt;
    sizes.assign(num_members, total / num_members);
  }
  std::vector<std::size_t> owners;
  for (std::size_t member = 0; member < num_members; ++member) {
    if (sizes[member] % element != 0) return std::nullopt;
    owners.insert(owners.end(), sizes[member], member);
  }
  return owners;
}

Owners owners_in(const Part& part) { return cut(part.in_accesses, part.num_members, size_bytes(part.view.type)); }
Owners owners_out(const Part& part) { return cut(part.out_accesses, part.num_members, size_bytes(part.view.type)); }

std::size_t owned(const Owners& owners, std::size_t member) {
  return static_cast<std::size_t>(std::count(owners->begin(), owners->end(), member));
}

// The index of byte i among the bytes of its owner.
std::size_t place(const Owners& owners, std::size_t i) {
  return static_cast<std::size_t>(
      std::count(owners->begin(), owners->begin() + static_cast<std::ptrdiff_t>(i), (*owners)[i]));
}

std::size_t first_of(const Owners& owners, std::size_t member) {
  return static_cast<std::size_t>(std::find(owners->begin(), owners->end(), member) - owners->begin());
}

// Whether one member's sizes are valid, regardless of the others.
bool fits_alone(const Graph& graph, const Part& part) {
  const std::size_t element = size_bytes(part.view.type);
  const bool root           = graph.rank(part.node) == part.view.root;
  const bool whole_in = part.in.size() % element == 0, whole_out = part.out.size() % element == 0;
  switch (part.view.op) {
    case PartOp::barrier:
      return true;
    case PartOp::send:
      return whole_in;
    case PartOp::recv:
      return whole_out;
    case PartOp::all_reduce:
      return whole_in && part.in.size() == part.out.size();
    case PartOp::reduce:
      return whole_in && part.out.size() == (root ? part.in.size() : 0);
    case PartOp::broadcast:
      return whole_out && (!root || part.in.size() == part.out.size());
    case PartOp::permute:
      return whole_in && whole_out && (part.in.empty() || index(part.view.peer) >= 0) &&
             (part.out.empty() || index(part.view.source) >= 0);
    case PartOp::all_gather:
      return owners_out(part) && owned(owners_out(part), part.member) == part.in.size();
    case PartOp::gather:
      if (!root) return whole_in && part.out.empty();
      return owners_out(part) && owned(owners_out(part), part.member) == part.in.size();
    case PartOp::reduce_scatter:
      return owners_in(part) && owned(owners_in(part), part.member) == part.out.size();
    case PartOp::scatter:
      if (!root) return whole_out && part.in.empty();
      return owners_in(part) && owned(owners_in(part), part.member) == part.out.size();
    case PartOp::all_to_all:
      return owners_in(part) && owners_out(part) &&
             owned(owners_in(part), part.member) == owned(owners_out(part), part.member);
  }
  return false;
}

// Whether b receives from a exactly what a sends to b.
bool fit_together(const Graph& graph, const Part& a, const Part& b) {
  const Rank rank_a = graph.rank(a.node), rank_b = graph.rank(b.node);
  switch (a.view.op) {
    case PartOp::barrier:
    case PartOp::recv:
      return true;
    case PartOp::send:
      return b.view.op != PartOp::recv || a.in.size() == b.out.size();
    case PartOp::all_reduce:
    case PartOp::reduce:
      return a.in.size() == b.in.size();
    case PartOp::broadcast:
      return a.out.size() == b.out.size();
    case PartOp::all_gather:
      return a.in.size() == owned(owners_out(b), a.member);
    case PartOp::gather:
      return rank_b != b.view.root || a.in.size() == owned(owners_out(b), a.member);
    case PartOp::reduce_scatter:
      return owned(owners_in(a), b.member) == b.out.size();
    case PartOp::scatter:
      return rank_a != a.view.root || owned(owners_in(a), b.member) == b.out.size();
    case PartOp::all_to_all:
      return owned(owners_in(a), b.member) == owned(owners_out(b), a.member);
    case PartOp::permute:
      if ((a.view.peer == rank_b) != (b.view.source == rank_a)) return false;
      return a.view.peer != rank_b || a.in.size() == b.out.size();
  }
  return false;
}

// Whether byte i of `in` may be byte j of `out`.
bool in_place(const Graph& graph, const Part& part, std::size_t i, std::size_t j) {
  const bool root = graph.rank(part.node) == part.view.root;
  switch (part.view.op) {
    case PartOp::all_reduce:
    case PartOp::reduce:
    case PartOp::broadcast:
      return i == j;
    case PartOp::gather:
    case PartOp::all_gather: {
      if (part.view.op == PartOp::gather && !root) return false;
      const Owners out = owners_out(part);
      return (*out)[j] == part.member && place(out, j) == i;
    }
    case PartOp::scatter:
    case PartOp::reduce_scatter: {
      if (part.view.op == PartOp::scatter && !root) return false;
      const Owners in = owners_in(part);
      return (*in)[i] == part.member && place(in, i) == j;
    }
    case PartOp::all_to_all: {
      const Owners in = owners_in(part), out = owners_out(part);
      const std::size_t member = (*in)[i];
      return i == j && (*out)[j] == member && owned(in, member) == owned(out, member) &&
             first_of(in, member) == first_of(out, member);
    }
    default:
      return false;
  }
}

}  // namespace

std::vector<Part> all_parts(const Graph& graph) {
  std::vector<Part> parts;
  for (std::uint32_t id = 0; id < graph.num_nodes(); ++id) {
    if (!graph.has_part({id})) continue;
    Part part{.node = {id}, .view = graph.part({id})};
    const RankList& ranks = graph.spec(part.view.group).ranks;
    part.num_members      = ranks.size();
    while (ranks[part.member] != graph.rank({id})) ++part.member;
    for (std::size_t i = 0; i < graph.num_accesses({id}); ++i) {
      const auto [buffer, mode, region] = graph.access({id}, i);
      if (graph.spec(buffer).token) continue;
      std::vector<Byte> bytes;
      for (std::int64_t range = 0; range < region.count; ++range) {
        for (std::int64_t k = 0; k < region.length; ++k)
          bytes.emplace_back(buffer.id, region.offset + range * region.stride + k);
      }
      if (mode != AccessMode::write) {
        part.in.insert(part.in.end(), bytes.begin(), bytes.end());
        part.in_accesses.push_back(bytes.size());
      }
      if (mode != AccessMode::read) {
        part.out.insert(part.out.end(), bytes.begin(), bytes.end());
        part.out_accesses.push_back(bytes.size());
      }
    }
    parts.push_back(part);
  }
  std::stable_sort(parts.begin(), parts.end(),
                   [](const Part& a, const Part& b) { return a.view.issue < b.view.issue; });
  return parts;
}

bool fit(const Graph& graph, const Match& match) {
  const auto& first = match.front().view;
  for (const Part& part : match) {
    const auto& view = part.view;
    if (view.type != first.type || view.message != first.message) return false;
    if (point_to_point(view.op)) continue;
    if (view.op != first.op) return false;
    const bool has_root = view.op == PartOp::broadcast || view.op == PartOp::reduce || view.op == PartOp::scatter ||
                          view.op == PartOp::gather;
    if (has_root && view.root != first.root) return false;
    const bool reduces =
        view.op == PartOp::all_reduce || view.op == PartOp::reduce_scatter || view.op == PartOp::reduce;
    if (reduces && view.reduction != first.reduction) return false;
  }
  for (const Part& part : match) {
    if (!fits_alone(graph, part)) return false;
  }
  for (const Part& a : match) {
    for (const Part& b : match) {
      if (!fit_together(graph, a, b)) return false;
    }
  }
  return true;
}

bool overlaps_badly(const Graph& graph, const Part& part) {
  // With invalid sizes the layout is undefined.
  if (part.view.op == PartOp::barrier || !fits_alone(graph, part)) return false;
  for (std::size_t j = 0; j < part.out.size(); ++j) {
    for (std::size_t k = 0; k < j; ++k) {
      if (part.out[j] == part.out[k]) return true;
    }
    for (std::size_t i = 0; i < part.in.size(); ++i) {
      if (part.in[i] == part.out[j] && !in_place(graph, part, i, j)) return true;
    }
  }
  return false;
}

}  // namespace stepgraph::testing
