#include "engine/simulate/machine.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>

#include "engine/base/error.hpp"
#include "engine/graph/graph.hpp"
#include "engine/simulate/simulate.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {
constexpr sg::Rank r0{0}, r1{1};
}

TEST_CASE("the rate of an op overrides that of its kind", "[engine][machine]") {
  sg::Machine machine(1);
  CHECK(machine.rate_of(sg::NodeKind::compute, "linear") == sg::Rate{});
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 10});
  machine.rate("linear", {.flops_per_s = 20, .overhead_s = 1});
  CHECK(machine.rate_of(sg::NodeKind::compute, "linear").flops_per_s == 20);
  CHECK(machine.rate_of(sg::NodeKind::copy, "linear").flops_per_s == 20);
  CHECK(machine.rate_of(sg::NodeKind::compute, "other").flops_per_s == 10);
  CHECK(machine.rate_of(sg::NodeKind::compute).flops_per_s == 10);
  CHECK(machine.rate_of(sg::NodeKind::copy) == sg::Rate{});
}

TEST_CASE("the most specific binding of a node holds", "[engine][machine]") {
  sg::Machine machine(2);
  const auto compute = sg::LaneKind::compute;
  CHECK(machine.pool_of(r0, compute) == sg::no_pool);
  const sg::PoolId all = machine.pool({.name = "all"}), rank = machine.pool({.name = "rank"}),
                   lane = machine.pool({.name = "lane"}), both = machine.pool({.name = "both"}),
                   laneless = machine.pool({.name = "laneless"});
  machine.bind({.rank = r0, .lane = compute}, both);
  machine.bind({.lane = compute}, lane);
  machine.bind({.laneless = true}, laneless);
  machine.bind({.rank = r0}, rank);
  machine.bind({}, all);
  CHECK(machine.pool_of(r0, compute) == both);
  CHECK(machine.pool_of(r1, compute) == lane);
  CHECK(machine.pool_of(r0, sg::LaneKind::tp) == rank);
  CHECK(machine.pool_of(r1, sg::LaneKind::tp) == all);
  CHECK(machine.pool_of(r0, std::nullopt) == laneless);
  machine.bind({.rank = r1, .laneless = true}, sg::no_pool);
  CHECK(machine.pool_of(r1, std::nullopt) == sg::no_pool);
  CHECK(machine.bus_of(r0, compute) == sg::no_bus);
  const sg::BusId bus = machine.bus({.name = "memory", .bytes_per_s = 1});
  machine.bind({.lane = compute}, bus);
  CHECK(machine.bus_of(r1, compute) == bus);
  CHECK(machine.bus_of(r1, std::nullopt) == sg::no_bus);
}

TEST_CASE("a machine is a value", "[engine][machine]") {
  const sg::Machine machine = sg::two_level_machine({.ranks = 4, .ranks_per_node = 2});
  sg::Machine copy          = machine;
  CHECK(copy == machine);
  copy.message_overhead(1);
  CHECK(copy != machine);
  CHECK(machine.message_overhead_s() == 0);
}

TEST_CASE("a two-level machine has a port per rank and a NIC per node", "[engine][machine]") {
  const sg::Machine machine = sg::two_level_machine(
      {.ranks = 5, .ranks_per_node = 2, .inside = {.bytes_per_s = 100}, .between = {.bytes_per_s = 7}});
  const auto& tree = machine.network();
  REQUIRE(tree.size() == 5 + 1 + 3);  // ranks, root, nodes
  for (std::size_t rank = 0; rank < 5; ++rank) {
    CHECK(tree[rank].above == static_cast<int>(6 + rank / 2));
    CHECK(tree[rank].depth == 2);
    CHECK(tree[rank].up.bytes_per_s == 100);
    CHECK(tree[rank].down.bytes_per_s == 100);
  }
  CHECK(tree[5].above == -1);
  for (std::size_t node = 6; node < 9; ++node) {
    CHECK(tree[node].above == 5);
    CHECK(tree[node].up.bytes_per_s == 7);
    CHECK(tree[node].down.bytes_per_s == 7);
  }
}

TEST_CASE("a loopback machine has one pool and one bus for everything", "[engine][machine]") {
  const sg::Machine machine =
      sg::loopback_machine({.ranks = 2, .threads = 3, .memory_bytes_per_s = 5, .rates = {.host = {.overhead_s = 2}}});
  REQUIRE(machine.pools().size() == 1);
  CHECK(machine.pools()[0].workers == 3);
  CHECK(machine.pools()[0].order == sg::PoolOrder::work_stealing);
  CHECK(machine.buses()[0].bytes_per_s == 5);
  CHECK(machine.pool_of(r1, sg::LaneKind::gather) == sg::PoolId{0});
  CHECK(machine.bus_of(r0, std::nullopt) == sg::BusId{0});
  CHECK(machine.rate_of(sg::NodeKind::host).overhead_s == 2);
  CHECK_FALSE(machine.has_network());
}

TEST_CASE("a machine refuses invalid settings by name", "[engine][machine][refuses]") {
  const double nan = std::nan("");
  sg::Machine machine(2);
  const auto refused = [](const auto& work, const char* why) {
    CAPTURE(why);
    CHECK_THROWS_MATCHES(work(), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refused([] { sg::Machine none(0); }, "num_ranks = 0");
  for (const double bad : {0.0, -1.0, nan}) {
    refused([&] { machine.rate(sg::NodeKind::copy, {.flops_per_s = bad}); }, "kind copy");
    refused([&] { machine.rate("linear", {.bytes_per_s = bad}); }, "op 'linear'");
    refused([&] { machine.bus({.name = "ram", .bytes_per_s = bad}); }, "bus 'ram'");
  }
  for (const double bad : {-1.0, nan, sg::unlimited}) {
    refused([&] { machine.rate(sg::NodeKind::copy, {.overhead_s = bad}); }, "overhead_s");
    refused([&] { machine.message_overhead(bad); }, "message overhead");
  }
  refused([&] { machine.rate("", {}); }, "without a name");
  refused([&] { machine.pool({.name = "cores", .workers = 0}); }, "pool 'cores' has workers = 0");
  refused([&] { machine.bind({}, sg::PoolId{0}); }, "no pool has number 0");
  refused([&] { machine.bind({}, sg::BusId{3}); }, "no bus has number 3");
  const sg::PoolId pool = machine.pool({.name = "cores"});
  refused([&] { machine.bind({.rank = sg::Rank{2}}, pool); }, "rank 2 (0 to 1)");
  refused([&] { machine.bind({.lane = sg::LaneKind::tp, .laneless = true}, pool); }, "lane tp");

  refused([&] { machine.switch_below(sg::SwitchId{0}, {}); }, "no switch has number 0");
  const sg::SwitchId root = machine.root_switch();
  refused([&] { machine.root_switch(); }, "already");
  refused([&] { machine.switch_below(root, {.latency_s = -1}); }, "latency_s = -1");
  refused([&] { machine.attach(r0, root, {.bytes_per_s = 0}); }, "link of rank 0");
  machine.attach(r0, root, {});
  refused([&] { machine.attach(r0, root, {}); }, "rank 0 is already attached to a switch");
  refused([&] { machine.check_complete(); }, "rank 1 is not in the network");
  machine.attach(r1, root, {});
  machine.check_complete();
  refused([] { (void)sg::two_level_machine({.ranks = 2, .ranks_per_node = 0}); }, "ranks_per_node = 0");
  refused([] { (void)sg::two_level_machine({.ranks = 9, .inside = {.latency_s = 2}, .between = {.latency_s = 1}}); },
          "takes 2 s (at most 1 s)");
  CHECK_NOTHROW(sg::two_level_machine({.ranks = 8, .inside = {.latency_s = 2}}));  // one node: no links between nodes
}

TEST_CASE("a device machine times kernels, transfers, host nodes and the disk", "[engine][simulate]") {
  sg::Graph graph;
  const auto lane    = [&](sg::LaneKind kind) { return graph.lane(sg::Rank{0}, kind); };
  const auto seconds = [&](sg::NodeSpec spec) {
    sg::Graph one;
    spec.lane = one.lane(sg::Rank{0}, spec.lane->kind);
    one.add(spec);
    return sg::simulate(one, sg::device_machine({.flops_per_s      = 1000,
                                                 .bytes_per_s      = 100,
                                                 .link_bytes_per_s = 10,
                                                 .host_bytes_per_s = 5,
                                                 .disk_bytes_per_s = 1,
                                                 .launch_s         = 0.5}))
        .makespan_s;
  };
  CHECK(seconds({.name = "product", .lane = lane(sg::LaneKind::compute), .cost = {.flops = 2000}}) == 2.5);
  CHECK(seconds({.name = "sum", .lane = lane(sg::LaneKind::compute), .cost = {.bytes_moved = 300}}) == 3.5);
  CHECK(seconds({.name = "up",
                 .lane = lane(sg::LaneKind::h2d),
                 .kind = sg::NodeKind::copy,
                 .op   = "h2d",
                 .cost = {.bytes_moved = 40}}) == 2.5);
  CHECK(seconds({.name = "update",
                 .lane = lane(sg::LaneKind::host),
                 .kind = sg::NodeKind::host,
                 .op   = "adamw",
                 .cost = {.bytes_moved = 10}}) == 2.5);
  CHECK(seconds({.name = "load",
                 .lane = lane(sg::LaneKind::disk),
                 .kind = sg::NodeKind::host,
                 .op   = "disk_read",
                 .cost = {.bytes_moved = 4}}) == 2.5);
}

TEST_CASE("a device machine of some ranks costs what these ranks cost", "[engine][simulate]") {
  const sg::Machine all  = sg::device_machine({.ranks = 8});
  const sg::Machine some = sg::device_machine({.ranks = 1 << 20, .only = sg::Rank{5}});
  CHECK(all.pools().size() == 8);
  CHECK(some.num_ranks() == 1 << 20);
  REQUIRE(some.pools().size() == 1);
  CHECK(some.pools().front().name == "other nodes of rank 5");
  CHECK(some.rate_of(sg::NodeKind::copy, "h2d") == all.rate_of(sg::NodeKind::copy, "h2d"));
}
