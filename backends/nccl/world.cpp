#include "backends/nccl/world.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "backends/nccl/links.hpp"
#include "backends/process/message.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

using nccl::NcclLinks;

// Whether a process can capture its runs of a graph. It never waits for a host node in a captured one.
bool has_host_nodes(const Graph& graph) {
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    if (graph.kind({node}) == NodeKind::host && graph.holds(graph.rank({node}))) return true;
  }
  return false;
}

// The links are made in the constructor of the base, and the device that they hold asks them.
std::unique_ptr<Links> make_links(Job& job, ProcessWorld::Hooks hooks, std::chrono::milliseconds timeout,
                                  const NcclWorldOptions& options, const NcclWorld::MakeParts& make_parts) {
  const auto made = std::make_shared<NcclLinks*>(nullptr);
  NcclWorld::Parts parts =
      make_parts([made](bool wishes) { return wishes && *made != nullptr && (*made)->agreed_capture; });
  auto links = std::make_unique<NcclLinks>(job, std::move(hooks), timeout, std::move(parts), options.capture);
  *made      = links.get();
  return links;
}

}  // namespace

NcclWorld::NcclWorld(const ProcessPlace& place, const ProcessWorldOptions& options, const NcclWorldOptions& nccl,
                     const MakeParts& make_parts)
    : ProcessWorld(place, options,
                   [&, timeout = options.timeout](Job& job, Hooks hooks) {
                     return make_links(job, std::move(hooks), timeout, nccl, make_parts);
                   }),
      calls_(nccl.calls),
      links_(dynamic_cast<NcclLinks&>(links())) {}

Device* NcclWorld::device() const { return links_.device(); }
void NcclWorld::set_capture(bool capture) { links_.set_capture(capture); }

std::int64_t NcclWorld::part_workspace(const Graph& graph, Node part) const {
  return nccl::workspace_bytes(graph, part, calls_);
}

std::optional<std::string> NcclWorld::find_refusal(const Graph& graph) const {
  std::map<std::int32_t, int> num_issued;  // by position
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    if (graph.has_part({node})) ++num_issued[graph.part({node}).issue];
  }
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    if (!graph.has_part({node})) continue;
    const Graph::PartView part = graph.part({node});
    if (auto why = nccl::refusal(part, graph.spec(part.group).ranks.size(), calls_)) return why;
    if (!reduces(part.op) || num_issued[part.issue] < 2) continue;
    if (const int groups = nccl::num_groups(graph, {node}, calls_); groups > 1)
      return str("nccl: ", graph.describe(Node{node}), ": is issued together with ", num_issued[part.issue] - 1,
                 " other parts, but is exchanged in ", groups, " groups (issue it alone)");
  }
  return std::nullopt;
}

// One process that refuses a program refuses it for all. Whether it is captured is agreed here, before anything else
// can fail in one process alone.
void NcclWorld::agree(const Graph& graph) {
  const std::string mine       = find_refusal(graph).value_or("");
  const bool wishes            = links_.capture && !has_host_nodes(graph);
  const std::vector<Bytes> all = peers()->gather("whether NCCL can run a program",
                                                 MessageWriter().text(mine).number(std::uint8_t{wishes}).bytes());
  std::string why;
  bool captures = true;
  for (const Bytes& each : all) {
    MessageReader from(each);
    const std::string theirs = from.text();
    if (why.empty()) why = theirs;
    captures = from.number<std::uint8_t>() != 0 && captures;
  }
  const Bytes answer =
      peers()->broadcast("whether NCCL can run a program",
                         all.empty() ? Bytes() : MessageWriter().text(why).number(std::uint8_t{captures}).bytes());
  MessageReader from(answer);
  why                   = from.text();
  links_.agreed_capture = from.number<std::uint8_t>() != 0;
  if (!why.empty()) throw Error(ErrorKind::config, why);
}

std::vector<std::uint32_t> NcclWorld::prepare(const Graph& graph, std::span<const Communicator> groups) {
  agree(graph);
  std::vector<std::uint32_t> numbers = ProcessWorld::prepare(graph, groups);
  std::set<std::uint32_t> used;  // groups of the graph that have collectives
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    if (graph.has_part({node}) && !point_to_point(graph.part({node}).op)) used.insert(graph.part({node}).group.id);
  }
  std::vector<NumberedGroup> collective;
  for (const std::uint32_t id : used) {
    const auto at = std::ranges::find_if(groups, [&](const auto& each) { return each.group == graph.spec(Group{id}); });
    if (at != groups.end() && at->group.ranks.size() > 1)
      collective.push_back({&at->group, numbers[static_cast<std::size_t>(at - groups.begin())]});
  }
  links_.complete(collective);
  return numbers;
}

void NcclWorld::communicate(const Context& context, const Exchange& exchange) {
  communicate_batch(context, {&exchange, 1});
}

void NcclWorld::communicate_batch(const Context&, std::span<const Exchange> batch) {
  struct One {
    const Exchange* exchange;
    NcclLinks::Target target;
    std::vector<nccl::Phase> phases;
  };
  std::vector<One> all;
  std::size_t num_phases = 0;
  for (const Exchange& each : batch) {
    One& one   = all.emplace_back(One{&each, links_.target(each), {}});
    one.phases = nccl::calls_of(each, calls_, each.parts.front().queue->workspace);
    num_phases = std::max(num_phases, one.phases.size());
    if (!one.target.has_all_ranks) continue;
    for (nccl::Phase& phase : one.phases) {
      for (nccl::Call& call : phase.group) call.peer = index(each.group.ranks[static_cast<std::size_t>(call.peer)]);
    }
  }
  // All members call the operations of a communicator in one order.
  std::ranges::stable_sort(all, {}, [](const One& one) {
    return std::tuple(one.target.number, point_to_point(one.exchange->what.op), one.exchange->turn);
  });
  nccl::Library& library = links_.library();
  std::vector<nccl::Library::Grouped> group;
  try {
    for (std::size_t phase = 0; phase < num_phases; ++phase) {
      group.clear();
      for (const One& one : all) {
        if (phase >= one.phases.size()) continue;
        const DeviceQueue& queue = *one.exchange->parts.front().queue;
        for (const nccl::Call& call : one.phases[phase].local) library.local(call, queue);
        for (const nccl::Call& call : one.phases[phase].group) group.push_back({one.target.number, &call, &queue});
      }
      if (!group.empty()) library.group(group);
    }
  } catch (const Error& error) {
    links_.fail(error.what());
  }
}

std::optional<std::string> NcclWorld::failure() const {
  if (auto why = ProcessWorld::failure()) return why;
  if (auto why = interruption()) return why;
  return links_.old_failure(grace());
}

}  // namespace stepgraph
