#include "engine/graph/graph.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <set>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/graph/graph_data.hpp"

namespace stepgraph {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::config, message); }

// A region in normal form, checked against its buffer; none when it has no bytes.
Region normal_form(const Access& access, const BufferSpec& buffer, std::string_view node) {
  Region region = access.region;
  if (region.length == Access::whole) return {.length = buffer.size_bytes};
  const auto bad = [&](std::string_view why) {
    refuse(str("graph: node '", node, "': access ", to_string(region), " of buffer '", buffer.name, "': ", why));
  };
  if (region.offset < 0 || region.length < 0 || region.count < 0) bad("offset, length and count must not be negative");
  if (region.length == 0 || region.count == 0) return {};
  if (region.count > 1) {
    if (region.stride < region.length) bad("the stride must be at least the length (ranges must not overlap)");
    if (region.count - 1 > (buffer.size_bytes - region.offset) / region.stride)
      bad(str("the buffer has ", buffer.size_bytes, " bytes"));
  }
  if (region.count == 1) region.stride = 0;
  if (region.offset > buffer.size_bytes || region.length > buffer.size_bytes || region.end() > buffer.size_bytes) {
    bad(str("the buffer has ", buffer.size_bytes, " bytes"));
  }
  if (region.count > 1 && region.stride == region.length) {
    region = {.offset = region.offset, .length = region.length * region.count};
  }
  return region;
}

// For a handle that was never set, or is of another graph.
std::string not_of_this_graph(const char* what, std::uint32_t id, std::size_t count) {
  if (id == ~std::uint32_t{0}) return str("graph: this ", what, " was never made (graph.", what, "(...) makes one)");
  return str("graph: ", what, " #", id, " is not in this graph (it has ", count, " ", what, "s)");
}

}  // namespace

std::uint32_t Interner::intern(std::string_view text) {
  if (text.empty()) return 0;
  if (const auto found = ids_.find(text); found != ids_.end()) return found->second;
  const auto id = static_cast<std::uint32_t>(texts_.size());
  texts_.emplace_back(text);
  ids_.emplace(std::string(text), id);
  return id;
}

GraphData::GraphData(const GraphData& other)
    : num_ranks(other.num_ranks),
      ranks(other.ranks),
      buffers(other.buffers),
      uses(other.uses),
      groups(other.groups),
      nodes(other.nodes),
      bodies(other.bodies),
      accesses(other.accesses),
      regions(other.regions),
      parts(other.parts),
      workspaces(other.workspaces),
      lane_sizes(other.lane_sizes),
      parts_on_rank(other.parts_on_rank),
      bytes_on_rank(other.bytes_on_rank),
      names(other.names),
      strings(other.strings) {}

template <class What>
void Graph::check_rank(Rank rank, const What& what) const {
  if (index(rank) < 0 || index(rank) >= data_->num_ranks) {
    refuse(str("graph: ", what(), ": rank ", rank, " is not in the world (0 to ", data_->num_ranks - 1, ")"));
  }
  if (!holds(rank)) refuse(str("graph: ", what(), ": rank ", rank, " in a graph that holds only ", to_string(ranks())));
}

Graph::Graph(int num_ranks) : Graph(num_ranks, RankSet::all(std::max(num_ranks, 0))) {}

Graph::Graph(int num_ranks, RankSet ranks) : data_(std::make_shared<GraphData>()) {
  if (num_ranks < 1) refuse(str("graph: ", num_ranks, " ranks (at least 1)"));
  for (const Rank last : {ranks[0], ranks[ranks.size() - 1]}) {
    if (index(last) < 0 || index(last) >= num_ranks)
      refuse(str("graph: rank ", last, " is not in the world (0 to ", num_ranks - 1, ")"));
  }
  data_->num_ranks = num_ranks;
  data_->lane_sizes.resize(GraphData::lane_index(ranks.size(), 0));
  data_->parts_on_rank.resize(ranks.size());
  data_->bytes_on_rank.resize(ranks.size());
  data_->ranks = std::move(ranks);
}

GraphData& Graph::mutate() {
  if (data_.use_count() > 1) data_ = std::make_shared<GraphData>(*data_);
#if !defined( \
    STEPGRAPH_TSAN)  // use_count() is a relaxed load: what a dropped copy's thread read, it read before we write
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
  if (data_->edges) data_->edges.reset();
  return *data_;
}

Buffer Graph::buffer(BufferSpec spec) {
  check_rank(spec.rank, [&] { return str("buffer '", spec.name, "'"); });
  if (spec.size_bytes < 0) refuse(str("graph: buffer '", spec.name, "': size ", spec.size_bytes, " is negative"));
  const auto element = static_cast<std::int64_t>(size_bytes(spec.type));
  if (spec.size_bytes % element != 0) {
    refuse(str("graph: buffer '", spec.name, "': ", spec.size_bytes, " bytes are not a whole number of ", spec.type,
               " elements of ", element, " bytes"));
  }
  const std::size_t rank = *data_->ranks.place(spec.rank);
  if (spec.size_bytes > Graph::most_bytes - data_->bytes_on_rank[rank]) {
    refuse(str("graph: buffer '", spec.name, "' of ", spec.size_bytes, " bytes: rank ", spec.rank, " has buffers of ",
               data_->bytes_on_rank[rank], " (at most ", Graph::most_bytes, " in all)"));
  }
  GraphData& data = mutate();
  if (data.buffers.size() >= (1u << 30)) refuse("graph: more than 2^30 buffers");
  data.bytes_on_rank[rank] += spec.size_bytes;
  data.buffers.push_back(std::move(spec));
  data.uses.emplace_back();
  return {static_cast<std::uint32_t>(data.buffers.size() - 1)};
}

Buffer Graph::token(Rank rank, std::string_view name) {
  return buffer({.name = std::string(name), .rank = rank, .size_bytes = 1, .token = true});
}

Group Graph::group(GroupSpec spec) {
  if (spec.ranks.empty()) refuse(str("graph: group '", spec.name, "' has no ranks"));
  const auto check = [&](Rank rank) {
    if (index(rank) < 0 || index(rank) >= data_->num_ranks) {
      refuse(
          str("graph: group '", spec.name, "': rank ", rank, " is not in the world (0 to ", data_->num_ranks - 1, ")"));
    }
  };
  if (spec.ranks.is_mesh()) {
    check(spec.ranks.front());
    check(spec.ranks.back());
  } else {
    std::set<Rank> seen;
    for (const Rank rank : spec.ranks) {
      check(rank);
      if (!seen.insert(rank).second) refuse(str("graph: group '", spec.name, "': rank ", rank, " is a member twice"));
    }
  }
  GraphData& data = mutate();
  data.groups.push_back(std::move(spec));
  return {static_cast<std::uint32_t>(data.groups.size() - 1)};
}

Lane Graph::lane(Rank rank, LaneKind kind) const {
  check_rank(rank, [&] { return str("lane ", kind); });
  return {rank, kind};
}

Rank Graph::rank_of(const NodeSpec& spec) const {
  const auto agree = [&](std::optional<Rank>& known, Rank other, const auto& what) {
    if (!known) known = other;
    if (*known == other) return;
    refuse(str("graph: node '", spec.name, "' on rank ", *known, ": ", what(), " is on rank ", other,
               " (a node touches one rank; data crosses ranks in matched parts)"));
  };
  std::optional<Rank> rank;
  if (spec.lane) rank = spec.lane->rank;
  if (spec.rank) agree(rank, *spec.rank, [] { return std::string("its declared rank"); });
  for (const AccessList* list : {&spec.reads, &spec.writes, &spec.accumulates}) {
    for (const Access& access : list->view()) {
      if (access.buffer.id >= data_->buffers.size()) {
        refuse(str("node '", spec.name, "': ", not_of_this_graph("buffer", access.buffer.id, data_->buffers.size())));
      }
      const BufferSpec& buffer = data_->buffers[access.buffer.id];
      agree(rank, buffer.rank, [&] { return str("buffer '", buffer.name, "'"); });
    }
  }
  if (!rank && data_->ranks.size() == 1) rank = data_->ranks[0];
  if (!rank) refuse(str("graph: node '", spec.name, "' has no lane and no accesses (set its rank)"));
  check_rank(*rank, [&] { return str("node '", spec.name, "'"); });
  return *rank;
}

void Graph::check_part(const NodeSpec& spec, Rank rank) const {
  const PartSpec& part = *spec.part;
  const auto bad       = [&](const std::string& why) { refuse(str("graph: part '", spec.name, "': ", why)); };
  if (part.group.id >= data_->groups.size()) bad(not_of_this_graph("group", part.group.id, data_->groups.size()));
  const GroupSpec& group = data_->groups[part.group.id];
  if (!group.ranks.contains(rank)) bad(str("rank ", rank, " is not in group '", group.name, "'"));
  if (point_to_point(part.op)) {
    if (!group.ranks.contains(part.peer)) bad(str("peer ", part.peer, " is not in group '", group.name, "'"));
    if (part.peer == rank) bad(str("rank ", rank, " cannot ", to_string(part.op), " to itself"));
  }
  if (part.op == PartOp::permute) {
    for (const auto& [role, other] : {std::pair{"peer", part.peer}, std::pair{"source", part.source}}) {
      if (other != Rank{-1} && !group.ranks.contains(other))
        bad(str(role, " ", other, " is not in group '", group.name, "' (a member, or -1 for none)"));
      if (other == rank) bad(str("rank ", rank, " cannot be its own ", role, " (another member, or -1 for none)"));
    }
  }
  if (has_root(part.op) && !group.ranks.contains(part.root)) {
    bad(str("root ", part.root, " is not in group '", group.name, "' (set .root to the rank that ",
            part.op == PartOp::broadcast || part.op == PartOp::scatter ? "sends" : "receives", ")"));
  }
  for (const AccessList* list : {&spec.reads, &spec.writes, &spec.accumulates}) {
    for (const Access& access : list->view()) {
      const BufferSpec& buffer = data_->buffers[access.buffer.id];
      if (buffer.token || buffer.type == DType::u8 || buffer.type == part.type) continue;
      bad(str("its type is ", part.type, ", but buffer '", buffer.name, "' holds ", buffer.type,
              " (equal, or a buffer of plain bytes: u8)"));
    }
  }
  if (part.issue < -1 || part.issue > (1 << 30))
    bad(str("issue position ", part.issue, " (0 to 2^30, or -1 for the next)"));
}

void Graph::check_workspace(const NodeSpec& spec) {
  const auto bad = [&](std::string_view why) {
    refuse(str("graph: node '", spec.name, "': ", spec.workspace_bytes, " bytes of workspace: ", why));
  };
  if (spec.workspace_bytes < 0 || spec.workspace_bytes > most_bytes) bad(str("0 to ", most_bytes));
  if (spec.part) bad("the world says what a part needs (World::part_workspace)");
  if (spec.kind == NodeKind::host) bad("a host node is on no stream");
  if (!spec.device) bad("only bodies that can run on a device use workspace (set .device)");
}

Node Graph::add(const NodeSpec& spec, Body body) {
  const Rank rank = rank_of(spec);
  if (spec.part) {
    check_part(spec, rank);
    if (body) refuse(str("graph: part '", spec.name, "' has a body (the world executes parts)"));
  }
  if (spec.workspace_bytes != 0) check_workspace(spec);
  GraphData& data = mutate();
  if (data.nodes.size() >= no_node - 1) refuse("graph: more than 2^32 - 2 nodes");
  if (data.names.size() + spec.name.size() > std::numeric_limits<std::uint32_t>::max()) {
    refuse("graph: node names take more than 4 GiB");
  }
  const auto id = static_cast<std::uint32_t>(data.nodes.size());

  // Regions are checked before anything is stored, so that an invalid node leaves the graph unchanged.
  const std::size_t accesses_before = data.accesses.size();
  const std::size_t regions_before  = data.regions.size();
  std::int64_t bytes_read = 0, bytes_written = 0;
  try {
    for (const auto& [list, mode] :
         {std::pair{&spec.reads, AccessMode::read}, std::pair{&spec.writes, AccessMode::write},
          std::pair{&spec.accumulates, AccessMode::accumulate}}) {
      for (const Access& access : list->view()) {
        const BufferSpec& buffer = data.buffers[access.buffer.id];
        const Region region      = normal_form(access, buffer, spec.name);
        const bool whole         = region == Region{.length = buffer.size_bytes};
        std::uint32_t region_id  = whole_region;
        if (region.length == 0) {
          region_id = empty_region;
        } else if (!whole) {
          const BufferUse& use = data.uses[access.buffer.id];
          if (use.state != BufferUse::State::untouched && data.regions[use.region] == region) {
            region_id = use.region;
          } else {
            region_id = static_cast<std::uint32_t>(data.regions.size());
            data.regions.push_back(region);
          }
        }
        data.accesses.push_back({(access.buffer.id << 2) | static_cast<std::uint32_t>(mode), region_id});
        if (spec.part && !buffer.token) {  // the accesses of a part may name one buffer several times
          const std::int64_t bytes = region.num_bytes();
          if (reads(mode)) bytes_read += bytes;
          if (writes(mode)) bytes_written += bytes;
          if (std::max(bytes_read, bytes_written) > most_bytes)
            refuse(str("graph: part '", spec.name, "' sends or receives more than ", most_bytes, " bytes"));
        }
      }
    }
  } catch (...) {
    data.accesses.resize(accesses_before);
    data.regions.resize(regions_before);
    throw;
  }
  for (std::size_t i = accesses_before; i < data.accesses.size(); ++i) {
    const AccessRecord access = data.accesses[i];
    if (access.region == empty_region) continue;
    BufferUse& use = data.uses[access.buffer()];
    if (use.state == BufferUse::State::untouched) {
      use = {access.region, BufferUse::State::uniform};
    } else if (use.region != access.region) {
      use.state = BufferUse::State::mixed;
    }
  }

  NodeRecord node{.name_begin    = static_cast<std::uint32_t>(data.names.size()),
                  .access_begin  = static_cast<std::uint32_t>(accesses_before),
                  .rank          = index(rank),
                  .place         = static_cast<std::uint32_t>(*data.ranks.place(rank)),
                  .lane          = -1,
                  .lane_position = 0,
                  .part          = -1,
                  .op            = data.strings.intern(spec.op),
                  .phase         = data.strings.intern(spec.labels.phase),
                  .stage         = spec.labels.stage,
                  .microbatch    = spec.labels.microbatch,
                  .layer         = spec.labels.layer,
                  .kind          = spec.part ? NodeKind::communicate : spec.kind,
                  .parallel      = spec.parallel,
                  .device        = spec.device,
                  .cost          = spec.cost};
  if (spec.lane) {
    const auto kind    = static_cast<std::size_t>(spec.lane->kind);
    node.lane          = static_cast<std::int32_t>(kind);
    node.lane_position = data.lane_sizes[GraphData::lane_index(node)]++;
  }
  if (spec.part) {
    std::int32_t& next       = data.parts_on_rank[node.place];
    const std::int32_t issue = spec.part->issue == -1 ? next : spec.part->issue;
    next                     = std::max(next, issue + 1);
    node.part                = static_cast<std::int32_t>(data.parts.size());
    data.parts.push_back({.node          = id,
                          .group         = spec.part->group.id,
                          .op            = spec.part->op,
                          .reduction     = spec.part->reduction,
                          .type          = spec.part->type,
                          .peer          = spec.part->peer,
                          .source        = spec.part->source,
                          .root          = spec.part->root,
                          .message       = data.strings.intern(spec.part->message),
                          .issue         = issue,
                          .bytes_read    = bytes_read,
                          .bytes_written = bytes_written});
  }
  if (spec.workspace_bytes > 0) data.workspaces.push_back({id, spec.workspace_bytes});
  data.names += spec.name;
  data.nodes.push_back(node);
  data.bodies.push_back(std::move(body));
  return {id};
}

const Edges& Graph::edges() const {
  const std::lock_guard lock(data_->edges_mutex);
  if (!data_->edges) data_->edges = std::make_unique<const Edges>(derive(*this));
  return *data_->edges;
}

int Graph::num_ranks() const noexcept { return data_->num_ranks; }
const RankSet& Graph::ranks() const noexcept { return data_->ranks; }
std::uint32_t Graph::num_nodes() const noexcept { return static_cast<std::uint32_t>(data_->nodes.size()); }
std::uint32_t Graph::num_buffers() const noexcept { return static_cast<std::uint32_t>(data_->buffers.size()); }
std::uint32_t Graph::num_groups() const noexcept { return static_cast<std::uint32_t>(data_->groups.size()); }

const NodeRecord& Graph::record(Node node) const {
  if (node.id >= data_->nodes.size())
    refuse(str("graph: node #", node.id, " is not in this graph (it has ", data_->nodes.size(), " nodes)"));
  return data_->nodes[node.id];
}

std::string_view Graph::name(Node node) const { return (void)record(node), data_->name(node.id); }
Rank Graph::rank(Node node) const { return Rank{record(node).rank}; }
std::optional<Lane> Graph::lane(Node node) const {
  const NodeRecord& of = record(node);
  if (of.lane < 0) return std::nullopt;
  return Lane{Rank{of.rank}, static_cast<LaneKind>(of.lane)};
}
std::uint32_t Graph::lane_position(Node node) const { return record(node).lane_position; }
std::uint32_t Graph::lane_size(Lane lane) const {
  if (index(lane.rank) < 0 || index(lane.rank) >= data_->num_ranks)
    refuse(str("graph: rank ", lane.rank, " is not in the world (0 to ", data_->num_ranks - 1, ")"));
  const auto place = data_->ranks.place(lane.rank);
  return place ? data_->lane_sizes[GraphData::lane_index(*place, static_cast<std::size_t>(lane.kind))] : 0;
}
NodeKind Graph::kind(Node node) const { return record(node).kind; }
std::string_view Graph::op(Node node) const { return data_->strings[record(node).op]; }
bool Graph::parallel(Node node) const { return record(node).parallel; }
bool Graph::device(Node node) const { return record(node).device; }
std::int64_t Graph::workspace_bytes(Node node) const {
  (void)record(node);
  const auto& all  = data_->workspaces;
  const auto found = std::lower_bound(all.begin(), all.end(), node.id,
                                      [](const WorkspaceRecord& of, std::uint32_t id) { return of.node < id; });
  return found != all.end() && found->node == node.id ? found->bytes : 0;
}
const Cost& Graph::cost(Node node) const { return record(node).cost; }
Labels Graph::labels(Node node) const {
  const NodeRecord& of = record(node);
  return {of.stage, of.microbatch, of.layer, std::string(data_->strings[of.phase])};
}
std::size_t Graph::num_accesses(Node node) const { return data_->access_end(node.id) - record(node).access_begin; }
Graph::AccessView Graph::access(Node node, std::size_t i) const {
  const AccessRecord& record = data_->accesses[data_->nodes[node.id].access_begin + i];
  return {{record.buffer()}, record.mode(), data_->region(record)};
}
bool Graph::has_part(Node node) const { return record(node).part >= 0; }
Graph::PartView Graph::part(Node node) const {
  if (!has_part(node)) refuse(str("graph: ", describe(node), " is not a part"));
  const PartRecord& record = data_->parts[static_cast<std::size_t>(data_->nodes[node.id].part)];
  return {.group         = {record.group},
          .op            = record.op,
          .reduction     = record.reduction,
          .type          = record.type,
          .peer          = record.peer,
          .source        = record.source,
          .root          = record.root,
          .message       = data_->strings[record.message],
          .issue         = record.issue,
          .bytes_read    = record.bytes_read,
          .bytes_written = record.bytes_written};
}
const Body& Graph::body(Node node) const { return (void)record(node), data_->bodies[node.id]; }
const BufferSpec& Graph::spec(Buffer buffer) const {
  if (buffer.id >= data_->buffers.size()) refuse(not_of_this_graph("buffer", buffer.id, data_->buffers.size()));
  return data_->buffers[buffer.id];
}
const GroupSpec& Graph::spec(Group group) const {
  if (group.id >= data_->groups.size()) refuse(not_of_this_graph("group", group.id, data_->groups.size()));
  return data_->groups[group.id];
}

NodeSpec Graph::spec(Node node) const {
  NodeSpec spec{.name            = std::string(name(node)),
                .lane            = lane(node),
                .kind            = kind(node),
                .op              = std::string(op(node)),
                .parallel        = parallel(node),
                .device          = device(node),
                .workspace_bytes = workspace_bytes(node),
                .cost            = cost(node),
                .labels          = labels(node),
                .rank            = rank(node)};
  for (std::size_t i = 0; i < num_accesses(node); ++i) {
    const AccessView view = access(node, i);
    AccessList& list      = view.mode == AccessMode::read    ? spec.reads
                            : view.mode == AccessMode::write ? spec.writes
                                                             : spec.accumulates;
    list.push_back({view.buffer, view.region});
  }
  if (has_part(node)) {
    const PartView view = part(node);
    spec.part           = PartSpec{.group     = view.group,
                                   .op        = view.op,
                                   .reduction = view.reduction,
                                   .type      = view.type,
                                   .peer      = view.peer,
                                   .source    = view.source,
                                   .root      = view.root,
                                   .message   = std::string(view.message),
                                   .issue     = view.issue};
  }
  return spec;
}

std::string Graph::describe(Node node) const {
  const auto on = lane(node);
  return str("rank ", rank(node), " ", on ? to_string(on->kind) : "(no lane)", " '", name(node), "'");
}

std::string Graph::describe(Buffer buffer) const {
  const BufferSpec& spec = this->spec(buffer);
  const char* what       = spec.token ? "token" : "buffer";
  return spec.name.empty() ? str(what, " #", buffer.id) : str(what, " '", spec.name, "'");
}

bool operator==(const Graph& a, const Graph& b) {
  const GraphData &x = *a.data_, &y = *b.data_;
  if (&x == &y) return true;
  if (x.num_ranks != y.num_ranks || x.ranks != y.ranks || x.buffers != y.buffers || x.groups != y.groups ||
      x.nodes.size() != y.nodes.size() || x.names != y.names || x.workspaces != y.workspaces) {
    return false;
  }
  const auto same_part = [&](Node node) {
    const auto p = a.part(node), q = b.part(node);
    return p.group == q.group && p.op == q.op && p.reduction == q.reduction && p.type == q.type && p.peer == q.peer &&
           p.source == q.source && p.root == q.root && p.message == q.message && p.issue == q.issue;
  };
  for (std::uint32_t i = 0; i < x.nodes.size(); ++i) {
    const Node node{i};
    if (a.name(node) != b.name(node) || a.rank(node) != b.rank(node) || a.lane(node) != b.lane(node) ||
        a.kind(node) != b.kind(node) || a.op(node) != b.op(node) || a.parallel(node) != b.parallel(node) ||
        a.device(node) != b.device(node) || a.cost(node) != b.cost(node) || a.labels(node) != b.labels(node) ||
        a.num_accesses(node) != b.num_accesses(node) || a.has_part(node) != b.has_part(node) ||
        (a.has_part(node) && !same_part(node))) {
      return false;
    }
    for (std::size_t k = 0; k < a.num_accesses(node); ++k) {
      const auto p = a.access(node, k), q = b.access(node, k);
      if (p.buffer != q.buffer || p.mode != q.mode || p.region != q.region) return false;
    }
  }
  return a.edges() == b.edges();
}

}  // namespace stepgraph
