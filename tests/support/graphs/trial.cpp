#include "tests/support/graphs/trial.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "engine/base/error.hpp"
#include "ops/transfers/reduce.hpp"

namespace stepgraph::testing {
namespace {

using Bytes = std::vector<std::byte>;

LaneKind lane_for(PartOp op) {
  switch (op) {
    case PartOp::send:
      return LaneKind::pp_send;
    case PartOp::recv:
      return LaneKind::pp_recv;
    case PartOp::all_gather:
    case PartOp::gather:
    case PartOp::scatter:
      return LaneKind::gather;
    case PartOp::reduce_scatter:
    case PartOp::all_to_all:
    case PartOp::permute:
      return LaneKind::reduce;
    case PartOp::all_reduce:
    case PartOp::reduce:
    case PartOp::broadcast:
    case PartOp::barrier:
      break;
  }
  return LaneKind::tp;
}

AccessList joined(const AccessList& first, const AccessList& second) {
  AccessList all = first;
  for (const Access& access : second.view()) all.push_back(access);
  return all;
}

// Calls visit(bytes of one row) for each row of the list, in order.
template <class Visit>
void for_rows(Trial::Image& image, const AccessList& list, const Visit& visit) {
  for (const Access& access : list.view()) {
    const Region& region = access.region;
    for (std::int64_t row = 0; row < region.count; ++row) {
      visit(std::span(image[access.buffer.id])
                .subspan(static_cast<std::size_t>(region.offset + row * region.stride),
                         static_cast<std::size_t>(region.length)));
    }
  }
}

Bytes pack(Trial::Image& image, const AccessList& list) {
  Bytes bytes;
  for_rows(image, list, [&](std::span<std::byte> row) { bytes.insert(bytes.end(), row.begin(), row.end()); });
  return bytes;
}

void unpack(const Bytes& bytes, Trial::Image& image, const AccessList& list) {
  std::size_t at = 0;
  for_rows(image, list, [&](std::span<std::byte> row) {
    if (!row.empty()) std::memcpy(row.data(), bytes.data() + at, row.size());
    at += row.size();
  });
}

// Member `which`'s share of a side that holds one for each of n members: its access if there are n, else one n-th.
Bytes shard(const Bytes& whole, const AccessList& list, std::size_t n, std::size_t which) {
  std::size_t begin = 0, size = whole.size() / n;
  if (list.view().size() == n) {
    const auto bytes = [&](std::size_t i) { return static_cast<std::size_t>(list.view()[i].region.num_bytes()); };
    for (std::size_t i = 0; i < which; ++i) begin += bytes(i);
    size = bytes(which);
  } else {
    begin = which * size;
  }
  const auto first = whole.begin() + static_cast<std::ptrdiff_t>(begin);
  return Bytes(first, first + static_cast<std::ptrdiff_t>(size));
}

// The bytes that each member receives.
std::vector<Bytes> outcome(const Meeting& meeting, const std::vector<Bytes>& in, const std::vector<AccessList>& lists) {
  const std::size_t n = meeting.members.size();
  const auto member   = [&](Rank rank) {
    return static_cast<std::size_t>(std::find_if(meeting.members.begin(), meeting.members.end(),
                                                   [&](const TrialMember& m) { return m.rank == rank; }) -
                                    meeting.members.begin());
  };
  std::vector<Bytes> out(n);
  const auto append = [](Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); };
  switch (meeting.op) {
    case PartOp::all_reduce:
      std::fill(out.begin(), out.end(), reduce_in_order(meeting.type, meeting.reduction, in));
      break;
    case PartOp::reduce:
      out[member(meeting.root)] = reduce_in_order(meeting.type, meeting.reduction, in);
      break;
    case PartOp::reduce_scatter: {
      const Bytes total = reduce_in_order(meeting.type, meeting.reduction, in);
      for (std::size_t i = 0; i < n; ++i) out[i] = shard(total, lists[0], n, i);
      break;
    }
    case PartOp::all_gather:
    case PartOp::gather:
      for (std::size_t i = 0; i < n; ++i) {
        if (meeting.op == PartOp::gather && meeting.members[i].rank != meeting.root) continue;
        for (const Bytes& bytes : in) append(out[i], bytes);
      }
      break;
    case PartOp::broadcast:
      std::fill(out.begin(), out.end(), in[member(meeting.root)]);
      break;
    case PartOp::scatter:
      for (std::size_t i = 0; i < n; ++i) out[i] = shard(in[member(meeting.root)], lists[member(meeting.root)], n, i);
      break;
    case PartOp::all_to_all:
      for (std::size_t to = 0; to < n; ++to) {
        for (std::size_t from = 0; from < n; ++from) append(out[to], shard(in[from], lists[from], n, to));
      }
      break;
    case PartOp::permute:
      for (std::size_t i = 0; i < n; ++i) {
        if (meeting.members[i].source != Rank{-1}) out[i] = in[member(meeting.members[i].source)];
      }
      break;
    case PartOp::send:
    case PartOp::recv:
      out[1] = in[0];
      break;
    case PartOp::barrier:
      break;
  }
  return out;
}

// The most rows, up to eight, into which elements can be cut evenly.
int rows_of(int elements) {
  for (int rows = std::min(8, elements); rows > 1; --rows) {
    if (elements % rows == 0) return rows;
  }
  return 1;
}

}  // namespace

Trial::Trial(std::string name, int num_ranks)
    : name_(std::move(name)), graph_(num_ranks), last_(static_cast<std::size_t>(num_ranks)) {}

Group Trial::group(const std::vector<int>& ranks) {
  GroupSpec spec{.name = "g"};
  std::vector<Rank> members;
  for (const int rank : ranks) {
    members.push_back(Rank{rank});
    spec.name += str("-", rank);
  }
  spec.ranks = RankList(std::move(members));
  for (std::uint32_t i = 0; i < graph_.num_groups(); ++i) {
    if (graph_.spec(Group{i}) == spec) return Group{i};
  }
  return graph_.group(spec);
}

AccessList Trial::place(const Memory& memory, const std::vector<int>& sizes, Placement placement) {
  const auto unit        = static_cast<std::int64_t>(size_bytes(memory.type));
  const std::int64_t gap = placement == Placement::tight ? 0 : unit;
  std::vector<Region> regions(sizes.size());
  std::int64_t end        = gap;
  const std::size_t count = sizes.size();
  for (std::size_t k = 0; k < count; ++k) {
    const std::size_t i      = placement == Placement::shuffled ? count - 1 - k : k;
    const std::int64_t bytes = sizes[i] * unit;
    const int rows           = placement == Placement::strided ? rows_of(sizes[i]) : 1;
    regions[i]               = {.offset = end, .length = bytes / rows};
    if (rows > 1) {
      regions[i].stride = bytes / rows + gap;
      regions[i].count  = rows;
    }
    end = regions[i].end() + gap;
  }
  const Buffer buffer = graph_.buffer({.name       = memory.name,
                                       .rank       = memory.rank,
                                       .size_bytes = std::max(end, unit),
                                       .type       = memory.type,
                                       .lifetime   = Lifetime::persistent});
  fills_.push_back(memory.fill);
  AccessList list;
  for (const Region& region : regions) list.push_back({buffer, region});
  return list;
}

void Trial::meet(const Meeting& meeting) {
  const std::string message = str(meeting.name, " #", num_named_++);
  for (std::size_t i = 0; i < meeting.members.size(); ++i) {
    const TrialMember& member = meeting.members[i];
    const PartOp op           = meeting.op == PartOp::send && i == 1 ? PartOp::recv : meeting.op;
    Place& last               = last_[static_cast<std::size_t>(index(member.rank))];
    const bool joins          = meeting.batch >= 0 && meeting.batch == last.batch;
    const Node node           = graph_.add({.name        = meeting.name,
                                            .lane        = graph_.lane(member.rank, lane_for(op)),
                                            .reads       = member.reads,
                                            .writes      = member.writes,
                                            .accumulates = member.both,
                                            .part        = PartSpec{.group     = meeting.group,
                                                                    .op        = op,
                                                                    .reduction = meeting.reduction,
                                                                    .type      = meeting.type,
                                                                    .peer      = member.peer,
                                                                    .source    = member.source,
                                                                    .root      = meeting.root,
                                                                    .message   = message,
                                                                    .issue     = joins ? last.issue : -1}});
    last                      = {meeting.batch, graph_.part(node).issue};
  }
  acts_.emplace_back(meeting);
}

void Trial::touch(const AccessList& list) {
  if (list.empty()) return;
  const Rank rank   = graph_.spec(list.view()[0].buffer).rank;
  std::int64_t size = 0;
  for (const Access& access : list.view()) size += access.region.num_bytes();
  if (size == 0) return;
  const AccessList ones = place({rank, "ones", DType::u8, Fill::ones}, {static_cast<int>(size)});
  reduce_into(graph_, {.name = "touch", .lane = LaneKind::compute, .into = list, .from = ones, .type = DType::u8});
  acts_.emplace_back(Touch{list});
}

void Trial::fail_on(Lane lane, std::shared_ptr<const std::atomic<bool>> armed) {
  graph_.add({.name = "fails when told to", .lane = lane, .device = true}, [armed] {
    if (armed->load()) throw Error(ErrorKind::run, "planned failure");
  });
}

Trial::Image Trial::before(std::uint64_t seed) const {
  Image image(fills_.size());
  for (std::uint32_t i = 0; i < image.size(); ++i) {
    const BufferSpec& spec = graph_.spec(Buffer{i});
    image[i].resize(static_cast<std::size_t>(spec.size_bytes));
    fill(image[i], spec.type, fills_[i], spec.rank, num_ranks(), mix(seed) + i);
  }
  return image;
}

Trial::Image Trial::after(Image image) const {
  for (const auto& act : acts_) {
    if (const auto* touched = std::get_if<Touch>(&act)) {
      for_rows(image, touched->list, [](std::span<std::byte> row) {
        for (std::byte& value : row) value = static_cast<std::byte>(static_cast<int>(value) + 1);
      });
      continue;
    }
    const Meeting& meeting = std::get<Meeting>(act);
    std::vector<AccessList> lists;
    std::vector<Bytes> in;
    for (const TrialMember& member : meeting.members) {
      lists.push_back(joined(member.reads, member.both));
      in.push_back(pack(image, lists.back()));
    }
    const std::vector<Bytes> out = outcome(meeting, in, lists);
    for (std::size_t i = 0; i < out.size(); ++i)
      unpack(out[i], image, joined(meeting.members[i].writes, meeting.members[i].both));
  }
  return image;
}

}  // namespace stepgraph::testing
