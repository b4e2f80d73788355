#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/graph/rank_set.hpp"
#include "engine/simulate/rate_table.hpp"

namespace stepgraph {

inline constexpr double unlimited = std::numeric_limits<double>::infinity();

// How fast work is done. A node that shares no resource takes
// overhead_s + max(flops / flops_per_s, bytes_moved / bytes_per_s).
struct Rate {
  double flops_per_s                               = unlimited;
  double bytes_per_s                               = unlimited;
  double overhead_s                                = 0;
  friend bool operator==(const Rate&, const Rate&) = default;
};

// One direction of a cable, shared fairly by the messages on it.
struct Link {
  double latency_s                                 = 0;
  double bytes_per_s                               = unlimited;
  friend bool operator==(const Link&, const Link&) = default;
};

// Which node runs next on a free worker.
enum class PoolOrder : std::uint8_t {
  first_ready,    // the node that became ready first, then the lower node number
  work_stealing,  // as Taskflow does: the last successor of the node that ended here, then the newest node of the
                  // worker's own queue, then the oldest of another worker's queue
};
[[nodiscard]] std::string_view to_string(PoolOrder order) noexcept;

// Workers that run one node each, from its beginning to its end.
struct PoolSpec {
  std::string name                                         = {};
  int workers                                              = 1;
  PoolOrder order                                          = PoolOrder::first_ready;
  friend bool operator==(const PoolSpec&, const PoolSpec&) = default;
};
enum class PoolId : std::int32_t {};
inline constexpr PoolId no_pool{-1};

// Memory bandwidth, shared fairly: nodes bound to it move their `bytes_moved` over it.
struct BusSpec {
  std::string name                                       = {};
  double bytes_per_s                                     = unlimited;
  friend bool operator==(const BusSpec&, const BusSpec&) = default;
};
enum class BusId : std::int32_t {};
inline constexpr BusId no_bus{-1};

enum class SwitchId : std::int32_t {};

// The nodes that a binding applies to. Nothing set: all.
struct Where {
  std::optional<Rank> rank     = {};     // those of one rank
  std::optional<LaneKind> lane = {};     // those on lanes of one kind
  bool laneless                = false;  // those on no lane; not together with `lane`
};

// A cost model of a cluster: rates of work, pools of workers, memory buses and a tree of switches. Plain data for a
// fixed number of ranks, checked as it is declared (Error(config)). A new Machine is ideal: all work takes no time, no
// resource is shared, and there is no network.
//
// Without a network a communication is copying in shared memory: one worker of the pool that its parts are bound to
// (and those that are idle) moves all bytes that the parts read and write, at the rate of NodeKind::communicate.
class Machine {
 public:
  explicit Machine(int num_ranks);

  // The rate of an op has priority over that of its kind. Parts of communications count as NodeKind::communicate.
  void rate(NodeKind kind, const Rate& rate);
  void rate(std::string_view op, const Rate& rate);
  // A measured table has priority over both; their overhead is still added. Such a node takes the time `busy` while the
  // other workers of its pools have nodes, `alone` while they have none, parallel or not, `paired` while it has
  // one idle worker as a helper, so that half of all workers have nodes, and `halved` while it shares the idle workers
  // with one other node. Between these, its speed grows evenly with the number of helpers. The parts of a communication
  // without a network are looked up together, with the sum of their costs.
  void rate(std::string_view op, RateTable measured);
  // The same for nodes of one kind: such a table has priority over that of the op. An op can run on a device and on the
  // host.
  void rate(std::string_view op, NodeKind kind, RateTable measured);

  PoolId pool(PoolSpec spec);
  BusId bus(BusSpec spec);

  // Binds nodes to a pool, or to a bus (at most one of each). The most specific binding of a node applies: that of its
  // rank and lane, then of its lane on all ranks, then of its rank, then of all nodes; of equal ones the last. Binding
  // to no_pool or no_bus makes an exception from a wider binding.
  void bind(const Where& where, PoolId pool);
  void bind(const Where& where, BusId bus);

  // Lanes that slow each other down, as copies and host nodes that share the memory of the host do: nodes on lanes of
  // kind `lane` take `factor` times as long while nodes run on lanes of all kinds in `others`, of any rank. If several
  // declarations apply, the largest factor does. Only for nodes that are bound to no pool.
  void beside(LaneKind lane, std::span<const LaneKind> others, double factor);

  // The nodes of a rank take `factor` times as long, communications excepted: they wait for it instead.
  void slow(Rank rank, double factor);

  // The network: a root, switches below it, ranks below any of them. Every cable has a link up and a link down. The
  // latency of a route is the sum over its links.
  SwitchId root_switch();
  SwitchId switch_below(SwitchId above, const Link& up, const Link& down);
  SwitchId switch_below(SwitchId above, const Link& both) { return switch_below(above, both, both); }
  void attach(Rank rank, SwitchId to, const Link& up, const Link& down);
  void attach(Rank rank, SwitchId to, const Link& both) { attach(rank, to, both, both); }
  // The time that a sender or receiver spends on each message (o in LogP).
  void message_overhead(double seconds);

  // --- looking at it -------------------------------------------------------------------------------------------
  // A rank or a switch in the tree. Ranks come first, so vertex r is rank r; then switches, each after the one above
  // it.
  struct Vertex {
    std::int32_t above = -1;  // -1: the root, or a rank that is not attached yet
    std::int32_t depth = 0;   // the root's is 0
    Link up = {}, down = {};  // to and from the vertex above
    friend bool operator==(const Vertex&, const Vertex&) = default;
  };

  [[nodiscard]] int num_ranks() const noexcept { return num_ranks_; }
  [[nodiscard]] const Rate& rate_of(NodeKind kind, std::string_view op = {}) const;
  // Null: none. Without a kind: the table for all kinds.
  [[nodiscard]] const RateTable* table_of(std::string_view op, std::optional<NodeKind> kind = {}) const;
  [[nodiscard]] const std::vector<PoolSpec>& pools() const noexcept { return pools_; }
  [[nodiscard]] const std::vector<BusSpec>& buses() const noexcept { return buses_; }
  [[nodiscard]] PoolId pool_of(Rank rank, std::optional<LaneKind> lane) const;  // none: a node without a lane
  [[nodiscard]] BusId bus_of(Rank rank, std::optional<LaneKind> lane) const;
  [[nodiscard]] double slowness(Rank rank) const;  // 1 unless set
  // Of nodes on lanes of a kind, while lanes of the kinds in `busy` have nodes, one bit for each kind; 1: not slowed.
  [[nodiscard]] double slowdown(LaneKind lane, std::uint32_t busy) const;
  [[nodiscard]] std::uint32_t crowded_lanes() const noexcept { return crowded_; }  // kinds that `beside` names
  [[nodiscard]] static constexpr std::uint32_t bit(LaneKind lane) noexcept {
    return std::uint32_t{1} << static_cast<unsigned>(lane);
  }
  [[nodiscard]] bool has_network() const noexcept { return !tree_.empty(); }
  [[nodiscard]] const std::vector<Vertex>& network() const noexcept { return tree_; }
  [[nodiscard]] double message_overhead_s() const noexcept { return message_overhead_s_; }

  // Throws Error(config) if there is a network and a rank is not attached to it.
  void check_complete() const;

  friend bool operator==(const Machine&, const Machine&) = default;

 private:
  // By [rank, or num_ranks for all][lane kind, or num_lane_kinds for laneless, or one more for any]: what is bound.
  using Bindings                    = std::map<std::pair<int, int>, std::int32_t>;
  static constexpr int any_lane     = static_cast<int>(num_lane_kinds) + 1;
  static constexpr int without_lane = static_cast<int>(num_lane_kinds);

  [[nodiscard]] std::pair<int, int> key(const Where& where) const;
  [[nodiscard]] std::int32_t find(const Bindings& bindings, Rank rank, std::optional<LaneKind> lane) const;
  void check_rank(Rank rank, std::string_view what) const;
  [[nodiscard]] std::size_t vertex(SwitchId id) const;

  int num_ranks_;
  std::array<Rate, 4> kind_rates_;
  std::map<std::string, Rate, std::less<>> op_rates_;
  std::map<std::string, RateTable, std::less<>> op_tables_;
  std::array<std::map<std::string, RateTable, std::less<>>, 4> kind_tables_;  // by kind
  std::vector<PoolSpec> pools_;
  std::vector<BusSpec> buses_;
  Bindings pool_bindings_, bus_bindings_;
  struct Beside {
    LaneKind lane                                        = {};
    std::uint32_t others                                 = 0;
    double factor                                        = 1;
    friend bool operator==(const Beside&, const Beside&) = default;
  };
  std::vector<Beside> beside_;
  std::uint32_t crowded_ = 0;
  std::map<int, double> slowness_;  // by rank
  std::vector<Vertex> tree_;
  double message_overhead_s_ = 0;
};

struct Rates {
  Rate compute = {}, communicate = {}, copy = {}, host = {};
};

// The machine that LoopbackWorld and an Executor with as many threads form: one pool that steals work, for all nodes,
// and one memory bus.
struct LoopbackMachine {
  int ranks                 = 1;
  int threads               = 1;
  double memory_bytes_per_s = unlimited;
  Rates rates               = {};
};
[[nodiscard]] Machine loopback_machine(const LoopbackMachine& spec);

// Ranks on devices of their own, each with a link to the host in both directions, a share of the host and a disk. The
// defaults are those of a data-centre GPU of 2023, rounded: good enough to order nodes, not to predict times.
struct DeviceMachine {
  int ranks               = 1;
  double flops_per_s      = 4e14;
  double bytes_per_s      = 2.5e12;  // of the device's memory
  double link_bytes_per_s = 45e9;    // of copies between device and host, each way
  double host_bytes_per_s = 60e9;    // of the host's memory, for host nodes
  double disk_bytes_per_s = 3e9;
  double launch_s         = 4e-6;  // before each node
  // Ranks that have nodes; none: all. The machine then costs what these ranks cost, in a world of any size.
  std::optional<RankSet> only = {};
};
[[nodiscard]] Machine device_machine(const DeviceMachine& spec);

// Nodes of several ranks each. A route inside a node has the latency of `inside`, one between nodes that of `between`,
// which must not be less. Each rank has one port in and one out, of inside.bytes_per_s; the ranks of a node share one
// NIC in and one out, of between.bytes_per_s. The last node may have fewer ranks.
struct TwoLevelMachine {
  int ranks                 = 1;
  int ranks_per_node        = 8;
  Link inside               = {};
  Link between              = {};
  double message_overhead_s = 0;
  Rates rates               = {};
};
[[nodiscard]] Machine two_level_machine(const TwoLevelMachine& spec);

}  // namespace stepgraph
