// Ranks on CUDA devices: lists of devices, captured steps, workspaces, markers, and worlds in several threads.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#if defined(STEPGRAPH_WITH_CUDA)
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include "backends/cuda/kernels.hpp"
#include "backends/cuda/ranks.hpp"
#include "backends/cuda/streams.hpp"
#include "backends/cuda/world.hpp"
#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

cudaStream_t stream_of(const sg::DeviceQueue& queue) { return static_cast<cudaStream_t>(queue.stream); }

// A graph on one rank with a node for each lane, one after another.
sg::Graph chain(const std::vector<sg::LaneKind>& lanes) {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 4096, .lifetime = sg::Lifetime::persistent});
  for (const sg::LaneKind kind : lanes)
    graph.add({.name = "node", .lane = graph.lane(sg::Rank{0}, kind), .accumulates = x, .device = true}, [] {});
  return graph;
}

// The streams of a graph, without an executor: the test enqueues the work of nodes.
class Driven {
 public:
  Driven(sg::cuda::Ranks& ranks, const sg::Graph& graph, sg::StreamPlan plan)
      : plan_(std::move(plan)), streams_(ranks.lower(graph, plan_)) {}
  Driven(sg::cuda::Ranks& ranks, const sg::Graph& graph) : Driven(ranks, graph, plan_of(graph)) {}

  static sg::StreamPlan plan_of(const sg::Graph& graph) {
    const sg::LoopbackWorld world(graph.num_ranks());
    return sg::plan_streams(sg::RunnableGraph(graph, world), world);
  }

  // Whether the run was a replay.
  template <class Work>
  bool start(const Work& work) {
    if (streams_->replay()) return true;
    streams_->begin(false);
    for (const std::uint32_t node : plan_.issue_order) {
      work(sg::Node{node}, *streams_->before(sg::Node{node}));
      streams_->after(sg::Node{node});
    }
    streams_->end(true);
    return false;
  }
  void finish() {
    const auto end = std::chrono::steady_clock::now() + 30s * sg::testing::scale();
    while (!streams_->done()) {
      REQUIRE(std::chrono::steady_clock::now() < end);
      std::this_thread::sleep_for(100us);
    }
  }
  template <class Work>
  bool run(const Work& work) {
    const bool replayed = start(work);
    finish();
    return replayed;
  }
  [[nodiscard]] sg::cuda::Streams& streams() { return dynamic_cast<sg::cuda::Streams&>(*streams_); }

 private:
  sg::StreamPlan plan_;
  std::unique_ptr<sg::DeviceStreams> streams_;
};

std::shared_ptr<sg::cuda::Ranks> ranks_with(sg::cuda::RanksOptions options, const sg::RankSet& ranks = sg::Rank{0}) {
  sg::testing::need_device();
  return sg::cuda::Ranks::make(ranks, std::move(options));
}

}  // namespace

TEST_CASE("a list of devices that cannot work is refused", "[backends][cuda][refuses]") {
  sg::testing::need_device();
  const auto refuses = [](int ranks, const std::vector<int>& devices, const std::string& why) {
    CAPTURE(ranks, devices);
    CHECK_THROWS_MATCHES(sg::CudaWorld(ranks, {.devices = devices}), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  const int count = static_cast<int>(sg::cuda::all_devices().size());
  refuses(0, {0}, "cuda: 0 ranks (at least 1)");
  refuses(1, {0, 0}, "cuda: 2 devices for 1 rank, so that some would have none (at most 1)");
  refuses(2, {0, 0, 0}, "cuda: 3 devices for 2 ranks");
  refuses(1, {-1}, "cuda: no device -1 (this machine has ");
  refuses(2, {0, count}, sg::str("cuda: no device ", count, " (this machine has ", count));
  CHECK_THROWS_MATCHES(sg::cuda::Ranks::make(sg::Rank{3}, {.devices = {}}), sg::Error,
                       MessageMatches(ContainsSubstring("cuda: no devices (at least one)")));
  CHECK_NOTHROW(sg::CudaWorld(1, {.devices = {}}));  // all, at most one for each rank
}

TEST_CASE("a process can have one rank of many on its device", "[backends][cuda]") {
  const auto ranks = ranks_with({}, sg::Rank{3});
  CHECK(ranks->device_of(sg::Rank{3}) == 0);
  CHECK_THROWS_MATCHES(ranks->device_of(sg::Rank{0}), sg::Error,
                       MessageMatches(ContainsSubstring("rank 0 is not in this process")));
  std::byte* const bytes = ranks->memory().allocate(sg::Rank{3}, sg::Space::device, 1000);
  std::vector<std::byte> seen(1000, std::byte{1});
  ranks->memory().read(bytes, seen);
  CHECK(std::ranges::count(seen, std::byte{0}) == 1000);
  ranks->memory().release(sg::Rank{3}, sg::Space::device, bytes);
}

TEST_CASE("nodes of a captured step have the priorities of their lanes", "[backends][cuda]") {
  const auto ranks      = ranks_with({});
  const auto lanes      = {sg::LaneKind::compute, sg::LaneKind::reduce, sg::LaneKind::compute, sg::LaneKind::gather};
  const sg::Graph graph = chain(lanes);
  std::byte* const x    = ranks->memory().allocate(sg::Rank{0}, sg::Space::device, 4096);
  {
    Driven driven(*ranks, graph);
    std::multiset<int> priorities;
    const auto work = [&](sg::Node, const sg::DeviceQueue& queue) {
      sg::cuda::PerMember<const std::byte*> in(1);
      sg::cuda::PerMember<std::byte*> out(1);
      in[0] = out[0] = x;
      sg::cuda::reduce(queue.stream, in, out, 4096, sg::DType::f32, sg::Reduction::sum);
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      cudaGraph_t captured           = nullptr;
      REQUIRE(cudaStreamGetCaptureInfo(stream_of(queue), &status, nullptr, &captured, nullptr, nullptr, nullptr) ==
              cudaSuccess);
      if (status != cudaStreamCaptureStatusActive) return;
      std::size_t count = 0;
      REQUIRE(cudaGraphGetNodes(captured, nullptr, &count) == cudaSuccess);
      std::vector<cudaGraphNode_t> nodes(count);
      REQUIRE(cudaGraphGetNodes(captured, nodes.data(), &count) == cudaSuccess);
      priorities.clear();
      for (const cudaGraphNode_t node : nodes) {
        cudaGraphNodeType type{};
        REQUIRE(cudaGraphNodeGetType(node, &type) == cudaSuccess);
        if (type != cudaGraphNodeTypeKernel) continue;
        cudaLaunchAttributeValue value{};
        REQUIRE(cudaGraphKernelNodeGetAttribute(node, cudaLaunchAttributePriority, &value) == cudaSuccess);
        priorities.insert(value.priority);
      }
    };
    CHECK_FALSE(driven.run(work));
    CHECK_FALSE(driven.run(work));  // captured
    int least = 0, greatest = 0;
    REQUIRE(cudaDeviceGetStreamPriorityRange(&least, &greatest) == cudaSuccess);
    REQUIRE(least != greatest);
    CHECK(priorities == std::multiset<int>{least, least, greatest, greatest});
    CHECK(driven.run(work));
  }
  ranks->memory().release(sg::Rank{0}, sg::Space::device, x);
}

TEST_CASE("nodes have exactly the workspaces of the plan, and programs share them", "[backends][cuda]") {
  const auto ranks      = ranks_with({});
  const sg::Graph graph = chain({sg::LaneKind::compute, sg::LaneKind::reduce, sg::LaneKind::compute});
  const auto plan_with  = [&](std::int64_t first, std::int64_t second, std::int64_t third) {
    sg::StreamPlan plan = Driven::plan_of(graph);
    plan.workspace_bytes.assign(sg::num_lane_kinds, 0);
    plan.workspace_bytes[static_cast<std::size_t>(sg::LaneKind::compute)] = std::max(first, third);
    plan.workspace_bytes[static_cast<std::size_t>(sg::LaneKind::reduce)]  = second;
    plan.node_workspaces.clear();
    const std::int64_t sizes[] = {first, second, third};
    for (std::uint32_t node = 0; node < 3; ++node) {
      if (sizes[node] > 0) plan.node_workspaces.push_back({.node = {node}, .size_bytes = sizes[node]});
    }
    return plan;
  };
  const auto seen_by = [](Driven& driven) {
    std::vector<std::span<std::byte>> seen;
    driven.run([&](sg::Node, const sg::DeviceQueue& queue) { seen.push_back(queue.workspace); });
    return seen;
  };
  Driven large(*ranks, graph, plan_with(1'000'000, 0, 77));
  const auto first = seen_by(large);
  CHECK(first[0].size() == 1'000'000);
  CHECK(first[1].empty());
  CHECK(first[2].size() == 77);
  CHECK(first[2].data() == first[0].data());

  Driven small(*ranks, graph, plan_with(1000, 500, 0));
  const auto second = seen_by(small);
  CHECK(second[0].size() == 1000);
  CHECK(second[0].data() == first[0].data());
  CHECK(second[1].size() == 500);
  CHECK(second[2].empty());

  Driven larger(*ranks, graph, plan_with(2'000'000, 0, 0));
  CHECK(seen_by(larger)[0].size() == 2'000'000);
  CHECK(seen_by(large)[0].data() == first[0].data());  // a captured step may contain its address

  sg::StreamPlan apart                  = plan_with(512, 0, 0);
  apart.node_workspaces[0].offset_bytes = 256;
  apart.node_workspaces[0].size_bytes   = 100;
  Driven driven(*ranks, graph, apart);
  CHECK(seen_by(driven)[0].size() == 100);
}

TEST_CASE("programs that forget their captured steps begin again with an issued run", "[backends][cuda]") {
  const auto ranks = ranks_with({});
  Driven one(*ranks, chain({sg::LaneKind::compute, sg::LaneKind::d2h})), other(*ranks, chain({sg::LaneKind::compute}));
  int issued      = 0;
  const auto work = [&](sg::Node, const sg::DeviceQueue&) { ++issued; };
  const auto runs = [&](Driven& driven) {
    std::vector<bool> replayed;
    for (int i = 0; i < 4; ++i) replayed.push_back(driven.run(work));
    return replayed;
  };
  const std::vector<bool> expected{false, false, true, true};
  CHECK(runs(one) == expected);
  CHECK(runs(other) == expected);
  ranks->drop_captures();
  CHECK(one.streams().captured() == nullptr);
  CHECK(runs(one) == expected);
  CHECK(runs(other) == expected);
  CHECK(issued == 4 * 2 + 4 * 1);
}

TEST_CASE("programs are captured only if all processes agree", "[backends][cuda]") {
  std::vector<bool> wishes;
  bool agreed        = false;
  const auto ranks   = ranks_with({.may_capture = [&](bool wish) {
    wishes.push_back(wish);
    return agreed;
  }});
  const auto replays = [&] {
    Driven driven(*ranks, chain({sg::LaneKind::compute}));
    int count = 0;
    for (int i = 0; i < 4; ++i) count += driven.run([](sg::Node, const sg::DeviceQueue&) {});
    return count;
  };
  CHECK(replays() == 0);
  agreed = true;
  CHECK(replays() == 2);
  ranks->set_capture(false);
  CHECK(replays() == 0);
  CHECK(wishes == std::vector<bool>{true, true, false});
}

TEST_CASE("markers tell how far a run is, also inside a captured step", "[backends][cuda]") {
  const auto ranks = ranks_with({.markers = true});
  sg::Graph graph;
  const sg::Buffer x    = graph.buffer({.name = "x", .size_bytes = 4096, .lifetime = sg::Lifetime::persistent});
  const sg::Group group = graph.group({.name = "alone", .ranks = {sg::Rank{0}}});
  graph.add({.name = "first", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .accumulates = x, .device = true},
            [] {});
  const sg::Node part = graph.add({.name        = "sum",
                                   .lane        = graph.lane(sg::Rank{0}, sg::LaneKind::reduce),
                                   .accumulates = x,
                                   .part        = sg::PartSpec{.group = group, .op = sg::PartOp::all_reduce}});
  const sg::Node last = graph.add(
      {.name = "last", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .accumulates = x, .device = true},
      [] {});
  Driven driven(*ranks, graph);

  static std::atomic<std::uint32_t> opened;  // nodes that may end
  opened = 0;
  struct Gate {
    std::uint32_t number;
    static void CUDART_CB wait(void* gate) {
      while (opened < static_cast<Gate*>(gate)->number) std::this_thread::sleep_for(100us);
    }
  };
  static Gate gates[3] = {{1}, {2}, {3}};
  const auto work      = [](sg::Node node, const sg::DeviceQueue& queue) {
    REQUIRE(cudaLaunchHostFunc(stream_of(queue), Gate::wait, &gates[node.id]) == cudaSuccess);
  };
  const auto is_at = [&](const std::vector<sg::Node>& parts, bool computes, std::uint64_t num_done) {
    const auto end = std::chrono::steady_clock::now() + 30s * sg::testing::scale();
    while (std::chrono::steady_clock::now() < end) {
      const auto at = ranks->progress();
      if (at && at->parts_entered == parts && at->computes == computes && at->num_done == num_done) return true;
      std::this_thread::sleep_for(100us);
    }
    return false;
  };
  for (int run = 0; run < 4; ++run) {  // issued, captured, replayed twice
    CAPTURE(run);
    opened = 0;
    CHECK(driven.start(work) == (run > 1));
    CHECK(is_at({}, true, 0));
    opened = 1;
    CHECK(is_at({part}, false, 1));
    opened = 2;
    CHECK(is_at({}, true, 2));
    opened = 3;
    CHECK(is_at({}, false, 3));
    driven.finish();
    CHECK(ranks->progress()->last_done == last);
  }
}

TEST_CASE("two trainers in two threads have the results that each has alone", "[backends][cuda][threads]") {
  sg::testing::need_device();
  const int steps  = std::max(6, sg::testing::cases(60));
  const auto train = [&](int ranks, std::uint64_t seed, const std::vector<int>& devices) {
    sg::CudaWorld world(ranks, {.devices = devices});
    const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 16};
    std::vector<double> results;
    // Programs are made, captured and destroyed while the other trainer does the same.
    for (int round = 0; round < 3; ++round) {
      sg::Trainer trainer(sg::testing::small_gpt2(), {.layout = {.dp = ranks}}, batch, world,
                          {.threads = 1, .seed = seed});
      for (int step = 0; step < steps / 3; ++step) {
        const auto result = trainer.step(sg::testing::tokens_for(batch, step, 64));
        results.push_back(result.loss);
        results.push_back(result.grad_norm);
      }
    }
    return results;
  };
  const auto first = train(1, 1, {0}), second = train(2, 2, {0, 0});
  std::vector<double> found[2];
  std::string failed[2];
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        try {
          found[i] = i == 0 ? train(1, 1, {0}) : train(2, 2, {0, 0});
        } catch (const std::exception& error) {
          failed[i] = error.what();
        }
      });
    }
  }
  CHECK(failed[0].empty());
  CHECK(failed[1].empty());
  CHECK(found[0] == first);
  CHECK(found[1] == second);
}
#endif
