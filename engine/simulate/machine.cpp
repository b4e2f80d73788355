#include "engine/simulate/machine.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

// NaN fails both tests.
bool positive(double value) { return value > 0; }
bool duration(double seconds) { return seconds >= 0 && std::isfinite(seconds); }

void check_rate(const Rate& rate, std::string_view of) {
  if (!positive(rate.flops_per_s) || !positive(rate.bytes_per_s)) {
    throw Error(ErrorKind::config, str("machine: the rate of ", of, " is ", rate.flops_per_s, " flops_per_s and ",
                                       rate.bytes_per_s, " bytes_per_s (above 0; unlimited: infinity)"));
  }
  if (!duration(rate.overhead_s)) {
    throw Error(ErrorKind::config,
                str("machine: the rate of ", of, " has overhead_s = ", rate.overhead_s, " (not negative, and finite)"));
  }
}

void check_named(std::string_view op) {
  if (op.empty()) throw Error(ErrorKind::config, "machine: a rate for an op without a name (name it, or give a kind)");
}

void check_link(const Link& link, std::string_view of) {
  if (duration(link.latency_s) && positive(link.bytes_per_s)) return;
  throw Error(ErrorKind::config,
              str("machine: a link of ", of, " has latency_s = ", link.latency_s,
                  " and bytes_per_s = ", link.bytes_per_s, " (a latency that is not negative, a bandwidth above 0)"));
}

void set_rates(Machine& machine, const Rates& rates) {
  machine.rate(NodeKind::compute, rates.compute);
  machine.rate(NodeKind::communicate, rates.communicate);
  machine.rate(NodeKind::copy, rates.copy);
  machine.rate(NodeKind::host, rates.host);
}

}  // namespace

std::string_view to_string(PoolOrder order) noexcept {
  switch (order) {
    case PoolOrder::first_ready:
      return "first_ready";
    case PoolOrder::work_stealing:
      return "work_stealing";
  }
  return "unknown";
}

Machine::Machine(int num_ranks) : num_ranks_(num_ranks) {
  if (num_ranks < 1) throw Error(ErrorKind::config, str("machine: num_ranks = ", num_ranks, " (at least 1)"));
}

void Machine::rate(NodeKind kind, const Rate& rate) {
  check_rate(rate, str("kind ", kind));
  kind_rates_.at(static_cast<std::size_t>(kind)) = rate;
}

void Machine::rate(std::string_view op, const Rate& rate) {
  check_named(op);
  check_rate(rate, str("op '", op, "'"));
  op_rates_.insert_or_assign(std::string(op), rate);
}

void Machine::rate(std::string_view op, RateTable measured) {
  check_named(op);
  op_tables_.insert_or_assign(std::string(op), std::move(measured));
}

void Machine::rate(std::string_view op, NodeKind kind, RateTable measured) {
  check_named(op);
  kind_tables_.at(static_cast<std::size_t>(kind)).insert_or_assign(std::string(op), std::move(measured));
}

void Machine::beside(LaneKind lane, std::span<const LaneKind> others, double factor) {
  std::uint32_t mask = 0;
  for (const LaneKind other : others) mask |= bit(other);
  if (mask == 0 || (mask & bit(lane)) != 0)
    throw Error(ErrorKind::config, str("machine: lane ", lane, " beside ", others.size(),
                                       " lanes (one or more, of other kinds than its own)"));
  if (!(factor >= 1 && std::isfinite(factor)))
    throw Error(ErrorKind::config,
                str("machine: lane ", lane, " is slower by a factor of ", factor, " (1 or more, and finite)"));
  beside_.push_back({lane, mask, factor});
  crowded_ |= mask | bit(lane);
}

double Machine::slowdown(LaneKind lane, std::uint32_t busy) const {
  double factor = 1;
  for (const Beside& each : beside_) {
    if (each.lane == lane && (each.others & ~busy) == 0) factor = std::max(factor, each.factor);
  }
  return factor;
}

PoolId Machine::pool(PoolSpec spec) {
  if (spec.workers < 1 || spec.workers > 65536) {
    throw Error(ErrorKind::config,
                str("machine: pool '", spec.name, "' has workers = ", spec.workers, " (1 to 65536)"));
  }
  pools_.push_back(std::move(spec));
  return PoolId{static_cast<std::int32_t>(pools_.size() - 1)};
}

BusId Machine::bus(BusSpec spec) {
  if (!positive(spec.bytes_per_s)) {
    throw Error(ErrorKind::config,
                str("machine: bus '", spec.name, "' has bytes_per_s = ", spec.bytes_per_s, " (above 0)"));
  }
  buses_.push_back(std::move(spec));
  return BusId{static_cast<std::int32_t>(buses_.size() - 1)};
}

void Machine::bind(const Where& where, PoolId pool) {
  if (pool != no_pool && (pool < PoolId{0} || std::cmp_greater_equal(static_cast<int>(pool), pools_.size()))) {
    throw Error(ErrorKind::config,
                str("machine: no pool has number ", static_cast<int>(pool), " (there are ", pools_.size(), ")"));
  }
  pool_bindings_[key(where)] = static_cast<std::int32_t>(pool);
}

void Machine::bind(const Where& where, BusId bus) {
  if (bus != no_bus && (bus < BusId{0} || std::cmp_greater_equal(static_cast<int>(bus), buses_.size()))) {
    throw Error(ErrorKind::config,
                str("machine: no bus has number ", static_cast<int>(bus), " (there are ", buses_.size(), ")"));
  }
  bus_bindings_[key(where)] = static_cast<std::int32_t>(bus);
}

std::pair<int, int> Machine::key(const Where& where) const {
  if (where.rank) check_rank(*where.rank, "a binding");
  if (where.lane && where.laneless) {
    throw Error(ErrorKind::config,
                str("machine: a binding has both lane ", *where.lane, " and `laneless` (set `lane` or `laneless`)"));
  }
  const int lane = where.lane ? static_cast<int>(*where.lane) : where.laneless ? without_lane : any_lane;
  return {where.rank ? index(*where.rank) : num_ranks_, lane};
}

std::int32_t Machine::find(const Bindings& bindings, Rank rank, std::optional<LaneKind> lane) const {
  if (bindings.empty()) return -1;
  const int where = lane ? static_cast<int>(*lane) : without_lane;
  for (const int kind : {where, any_lane}) {
    for (const int bound_rank : {index(rank), num_ranks_}) {  // num_ranks_: a binding of all ranks
      const auto found = bindings.find({bound_rank, kind});
      if (found != bindings.end()) return found->second;
    }
  }
  return -1;
}

PoolId Machine::pool_of(Rank rank, std::optional<LaneKind> lane) const {
  return PoolId{find(pool_bindings_, rank, lane)};
}
BusId Machine::bus_of(Rank rank, std::optional<LaneKind> lane) const { return BusId{find(bus_bindings_, rank, lane)}; }

const Rate& Machine::rate_of(NodeKind kind, std::string_view op) const {
  if (!op.empty() && !op_rates_.empty()) {
    const auto found = op_rates_.find(op);
    if (found != op_rates_.end()) return found->second;
  }
  return kind_rates_.at(static_cast<std::size_t>(kind));
}

const RateTable* Machine::table_of(std::string_view op, std::optional<NodeKind> kind) const {
  if (op.empty()) return nullptr;
  if (kind) {
    const auto& tables = kind_tables_.at(static_cast<std::size_t>(*kind));
    if (const auto found = tables.find(op); found != tables.end()) return &found->second;
  }
  const auto found = op_tables_.find(op);
  return found != op_tables_.end() ? &found->second : nullptr;
}

SwitchId Machine::root_switch() {
  if (has_network()) throw Error(ErrorKind::config, "machine: the network has a root switch already");
  tree_.resize(static_cast<std::size_t>(num_ranks_) + 1);
  return SwitchId{0};
}

SwitchId Machine::switch_below(SwitchId above, const Link& up, const Link& down) {
  const std::size_t parent = vertex(above);
  check_link(up, "a switch");
  check_link(down, "a switch");
  tree_.push_back({static_cast<std::int32_t>(parent), tree_[parent].depth + 1, up, down});
  return SwitchId{static_cast<std::int32_t>(tree_.size()) - 1 - num_ranks_};
}

void Machine::attach(Rank rank, SwitchId to, const Link& up, const Link& down) {
  check_rank(rank, "a link");
  const std::size_t parent = vertex(to);
  check_link(up, str("rank ", rank));
  check_link(down, str("rank ", rank));
  Vertex& leaf = tree_[static_cast<std::size_t>(index(rank))];
  if (leaf.above >= 0) throw Error(ErrorKind::config, str("machine: rank ", rank, " is already attached to a switch"));
  leaf = {static_cast<std::int32_t>(parent), tree_[parent].depth + 1, up, down};
}

void Machine::message_overhead(double seconds) {
  if (!duration(seconds)) {
    throw Error(ErrorKind::config, str("machine: a message overhead of ", seconds, " s (not negative, and finite)"));
  }
  message_overhead_s_ = seconds;
}

void Machine::slow(Rank rank, double factor) {
  check_rank(rank, "a factor");
  if (!(factor > 0 && std::isfinite(factor)))
    throw Error(ErrorKind::config, str("machine: rank ", rank, " is slow by a factor of ", factor, " (above 0)"));
  slowness_[index(rank)] = factor;
}

double Machine::slowness(Rank rank) const {
  const auto found = slowness_.find(index(rank));
  return found == slowness_.end() ? 1 : found->second;
}

void Machine::check_rank(Rank rank, std::string_view what) const {
  if (index(rank) >= 0 && index(rank) < num_ranks_) return;
  throw Error(ErrorKind::config, str("machine: ", what, " of rank ", rank, " (0 to ", num_ranks_ - 1, ")"));
}

std::size_t Machine::vertex(SwitchId id) const {
  const auto at = static_cast<std::int64_t>(id) + num_ranks_;
  if (id >= SwitchId{0} && std::cmp_less(at, tree_.size())) return static_cast<std::size_t>(at);
  throw Error(ErrorKind::config, str("machine: no switch has number ", static_cast<int>(id), " (there are ",
                                     has_network() ? tree_.size() - static_cast<std::size_t>(num_ranks_) : 0, ")"));
}

void Machine::check_complete() const {
  if (!has_network()) return;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (tree_[static_cast<std::size_t>(rank)].above >= 0) continue;
    throw Error(ErrorKind::config, str("machine: rank ", rank, " is not in the network (attach it to a switch)"));
  }
}

Machine loopback_machine(const LoopbackMachine& spec) {
  Machine machine(spec.ranks);
  set_rates(machine, spec.rates);
  machine.bind({}, machine.pool({.name = "threads", .workers = spec.threads, .order = PoolOrder::work_stealing}));
  machine.bind({}, machine.bus({.name = "memory", .bytes_per_s = spec.memory_bytes_per_s}));
  return machine;
}

Machine device_machine(const DeviceMachine& spec) {
  Machine machine(spec.ranks);
  const auto moved = [&](double bytes_per_s) { return Rate{.bytes_per_s = bytes_per_s, .overhead_s = spec.launch_s}; };
  set_rates(machine, {.compute     = {spec.flops_per_s, spec.bytes_per_s, spec.launch_s},
                      .communicate = moved(spec.bytes_per_s),
                      .copy        = moved(spec.bytes_per_s),
                      .host        = moved(spec.host_bytes_per_s)});
  // Costs count bytes read and bytes written; a transfer moves half of their sum.
  for (const char* const op : {"h2d", "d2h"}) machine.rate(op, moved(2 * spec.link_bytes_per_s));
  for (const char* const op : {"disk_read", "disk_write"}) machine.rate(op, moved(2 * spec.disk_bytes_per_s));
  // Nodes without a lane share a stream of their rank. If they took no turns, all that could run at the beginning would
  // be issued before the first node of any lane that waits for one of them.
  for (const Rank rank : spec.only.value_or(RankSet::all(spec.ranks)))
    machine.bind({.rank = rank, .laneless = true}, machine.pool({.name = str("other nodes of rank ", rank)}));
  return machine;
}

Machine two_level_machine(const TwoLevelMachine& spec) {
  if (spec.ranks_per_node < 1) {
    throw Error(ErrorKind::config, str("machine: ranks_per_node = ", spec.ranks_per_node, " (at least 1)"));
  }
  const bool several_nodes = spec.ranks > spec.ranks_per_node;
  if (several_nodes && !(spec.between.latency_s >= spec.inside.latency_s)) {
    throw Error(ErrorKind::config,
                str("machine: a route between nodes takes ", spec.between.latency_s, " s, but one inside a node takes ",
                    spec.inside.latency_s, " s (at most ", spec.between.latency_s, " s)"));
  }
  Machine machine(spec.ranks);
  set_rates(machine, spec.rates);
  machine.message_overhead(spec.message_overhead_s);
  // All latency is on the uplinks, so that the latency of a route is exactly the given number.
  const Link port{spec.inside.latency_s, spec.inside.bytes_per_s};
  const Link nic{several_nodes ? spec.between.latency_s - spec.inside.latency_s : 0, spec.between.bytes_per_s};
  const SwitchId root = machine.root_switch();
  SwitchId node{};
  for (int rank = 0; rank < spec.ranks; ++rank) {
    if (rank % spec.ranks_per_node == 0) node = machine.switch_below(root, nic, {0, nic.bytes_per_s});
    machine.attach(Rank{rank}, node, port, {0, port.bytes_per_s});
  }
  return machine;
}

}  // namespace stepgraph
