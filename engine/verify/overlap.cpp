#include <algorithm>
#include <utility>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/graph/shards.hpp"
#include "engine/verify/findings.hpp"
#include "engine/verify/regions.hpp"

namespace stepgraph::verifier {
namespace {

// One access of a side. `position` is the offset of its bytes when all accesses of the side are concatenated.
struct Laid {
  Buffer buffer;
  Region region;
  std::int64_t position;
  [[nodiscard]] std::int64_t end() const { return position + region.num_bytes(); }
};

std::vector<Laid> lay(const Graph& graph, Node node, Side side) {
  std::vector<Laid> laid;
  std::int64_t position = 0;
  for (std::size_t i = 0; i < graph.num_accesses(node); ++i) {
    const Graph::AccessView access = graph.access(node, i);
    const bool wanted              = side == Side::in ? reads(access.mode) : writes(access.mode);
    if (!wanted || graph.spec(access.buffer).token || access.region.length == 0) continue;
    laid.push_back({access.buffer, access.region, position});
    position = laid.back().end();
  }
  return laid;
}

// The accesses that a part writes, sorted by buffer and start, so that those near an access are found without a full
// scan.
class Outputs {
 public:
  explicit Outputs(std::vector<Laid> list) : list_(std::move(list)) {
    std::sort(list_.begin(), list_.end(), [](const Laid& a, const Laid& b) { return key(a) < key(b); });
    for (const Laid& one : list_) longest_ = std::max(longest_, one.region.end() - one.region.begin());
  }
  [[nodiscard]] const std::vector<Laid>& all() const { return list_; }
  template <class Visit>
  void for_near(const Laid& access, const Visit& visit) const {
    const auto from = std::pair(access.buffer.id, access.region.begin() - longest_);
    auto at =
        std::lower_bound(list_.begin(), list_.end(), from, [](const Laid& a, const auto& b) { return key(a) < b; });
    for (; at != list_.end() && at->buffer == access.buffer && at->region.begin() < access.region.end(); ++at)
      visit(*at);
  }

 private:
  static std::pair<std::uint32_t, std::int64_t> key(const Laid& one) { return {one.buffer.id, one.region.begin()}; }

  std::vector<Laid> list_;
  std::int64_t longest_ = 0;
};

// For an in-place operation, bytes [begin, end) of the input are the same memory as bytes [begin + shift, end + shift)
// of the output.
struct Place {
  std::int64_t begin, end, shift;
};

std::vector<Place> places(const Graph& graph, Node node, const Graph::PartView& part) {
  const bool is_root    = graph.rank(node) == part.root;
  const std::size_t own = member_of(graph, node);
  const auto all        = std::max(part.bytes_read, part.bytes_written);
  const auto own_of_out = [&] { return shard_sizes(graph, node, Side::out)->begin(own); };
  const auto own_of_in  = [&] {
    const auto sizes         = shard_sizes(graph, node, Side::in);
    const std::int64_t begin = sizes->begin(own);
    return Place{begin, begin + (*sizes)[own], -begin};
  };
  switch (part.op) {
    case PartOp::all_reduce:
    case PartOp::reduce:
    case PartOp::broadcast:
      return {{0, all, 0}};
    case PartOp::all_gather:
      return {{0, all, own_of_out()}};
    case PartOp::gather:
      return is_root ? std::vector<Place>{{0, all, own_of_out()}} : std::vector<Place>{};
    case PartOp::reduce_scatter:
      return {own_of_in()};
    case PartOp::scatter:
      return is_root ? std::vector<Place>{own_of_in()} : std::vector<Place>{};
    case PartOp::all_to_all: {
      const auto to = shard_sizes(graph, node, Side::in), from = shard_sizes(graph, node, Side::out);
      if (*to == *from) return {{0, all, 0}};
      std::vector<Place> same;  // slices with the same offset and size on both sides
      std::int64_t sent = 0, received = 0;
      for (std::size_t k = 0; k < to->size(); ++k) {
        if (sent == received && (*to)[k] == (*from)[k]) same.push_back({sent, sent + (*to)[k], 0});
        sent += (*to)[k];
        received += (*from)[k];
      }
      return same;
    }
    case PartOp::permute:
    case PartOp::send:
    case PartOp::recv:
    case PartOp::barrier:
      break;
  }
  return {};
}

// The first bytes that the two accesses share outside the allowed places. None if they are disjoint or in place.
std::optional<Range> misplaced(const Laid& in, const Laid& out, const std::vector<Place>& allowed) {
  if (!overlap(in.region, out.region)) return std::nullopt;
  const auto covered = [&](std::int64_t begin, std::int64_t end, std::int64_t shift) {
    // There are few places, sorted by offset. A range may continue from one place into the next.
    for (const Place& place : allowed) {
      if (place.shift == shift && place.begin <= begin && begin < place.end) begin = std::min(end, place.end);
    }
    return begin == end;
  };
  if (in.region == out.region && covered(in.position, in.end(), out.position - in.position)) return std::nullopt;
  // Each row of one region meets only a few rows of the other.
  const auto row_step = [](const Region& region) { return std::max<std::int64_t>(region.stride, 1); };
  for (std::int64_t row = 0; row < in.region.count; ++row) {
    const std::int64_t begin = in.region.offset + row * in.region.stride, end = begin + in.region.length;
    const std::int64_t before = begin - out.region.offset - out.region.length;
    std::int64_t other        = before < 0 ? 0 : before / row_step(out.region);
    for (; other < out.region.count; ++other) {
      const std::int64_t theirs = out.region.offset + other * out.region.stride;
      if (theirs >= end) break;
      const Range shared{std::max(begin, theirs), std::min(end, theirs + out.region.length)};
      if (shared.begin >= shared.end) continue;
      const std::int64_t from = in.position + row * in.region.length + shared.begin - begin;
      const std::int64_t to   = out.position + other * out.region.length + shared.begin - theirs;
      if (!covered(from, from + shared.end - shared.begin, to - from)) return shared;
    }
  }
  return std::nullopt;
}

void check_part(const Graph& graph, Node node, Findings& findings) {
  const Graph::PartView part = graph.part(node);
  if (part.op == PartOp::barrier || part.bytes_written == 0 || !misfit(graph, node).empty()) return;
  const auto say = [&](const Laid& at, Range bytes, const char* what, const char* rule) {
    findings.add(Flaw::bad_overlap, str(graph.describe(node), " (", to_string(part.op), ") ", what, " bytes [",
                                        bytes.begin, ", ", bytes.end, ") of ", graph.describe(at.buffer), rule));
  };
  const Outputs out(lay(graph, node, Side::out));
  for (const Laid& one : out.all()) {
    std::optional<Range> twice;
    out.for_near(one, [&](const Laid& other) {
      if (&other != &one && !twice) twice = overlap(one.region, other.region);
    });
    if (twice) return say(one, *twice, "writes", " twice (once)");
  }
  std::optional<std::vector<Place>> allowed;  // computed on first use; most parts do not need it
  for (const Laid& sent : lay(graph, node, Side::in)) {
    std::optional<Range> bytes;
    out.for_near(sent, [&](const Laid& received) {
      if (!allowed) allowed = places(graph, node, part);
      if (!bytes) bytes = misplaced(sent, received, *allowed);
    });
    if (bytes)
      return say(sent, *bytes, "reads and writes", " (separate buffers, or the layout of an in-place operation)");
  }
}

}  // namespace

void check_overlaps(const Graph& graph, Findings& findings) {
  for (std::uint32_t node = 0; node < graph.num_nodes() && !findings.full(); ++node) {
    if (graph.has_part({node})) check_part(graph, {node}, findings);
  }
}

}  // namespace stepgraph::verifier
