#include "engine/run/world.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <mutex>
#include <thread>

#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/worlds/waiting_world.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::Rank;

namespace {

// What a world is told, with ranks 0 and 1 of four in this process.
class ListeningWorld final : public sg::World {
 public:
  explicit ListeningWorld(bool batches = false) : batches_(batches) {}
  [[nodiscard]] int num_ranks() const override { return 4; }
  [[nodiscard]] sg::RankSet local_ranks() const override { return sg::RankSet(std::vector{Rank{0}, Rank{1}}); }
  [[nodiscard]] bool waits(sg::LaneKind) const override { return false; }
  [[nodiscard]] sg::IssueOrder issue_order() const override { return sg::IssueOrder::any; }
  [[nodiscard]] bool batches() const override { return batches_; }
  [[nodiscard]] std::vector<std::uint32_t> prepare(const sg::Graph&,
                                                   std::span<const sg::Communicator> groups) override {
    std::vector<std::uint32_t> numbers;
    for (const sg::Communicator& group : groups) {
      prepared.push_back(sg::str(group.group.name, " ", group.num_operations));
      numbers.push_back(static_cast<std::uint32_t>(100 + numbers.size()));
    }
    if (forgets) numbers.pop_back();
    return numbers;
  }
  void communicate(const sg::Context&, const sg::Exchange& exchange) override { add(exchange); }
  void communicate_batch(const sg::Context&, std::span<const sg::Exchange> batch) override {
    const std::lock_guard lock(mutex_);
    batch_sizes.push_back(batch.size());
    for (const sg::Exchange& exchange : batch) exchanges.push_back(describe(exchange));
  }
  void abort(std::string_view) noexcept override {}

  bool forgets = false;
  std::vector<std::string> prepared, exchanges;
  std::vector<std::size_t> batch_sizes;

 private:
  static std::string describe(const sg::Exchange& exchange) {
    std::string text = sg::str(exchange.what.message, " on ", exchange.communicator, " turn ", exchange.turn, " by");
    for (const sg::LocalPart& part : exchange.parts) text += sg::str(" ", part.rank);
    return text;
  }
  void add(const sg::Exchange& exchange) {
    const std::lock_guard lock(mutex_);
    exchanges.push_back(describe(exchange));
  }

  bool batches_;
  std::mutex mutex_;
};

sg::Graph held() { return sg::Graph(4, sg::RankSet(std::vector{Rank{0}, Rank{1}})); }

sg::Node add_part(sg::Graph& graph, Rank rank, sg::PartSpec part) {
  return graph.add({.name = part.message, .lane = graph.lane(rank, sg::LaneKind::reduce), .part = std::move(part)});
}

}  // namespace

TEST_CASE("a world gets its groups by name, and exchanges have their number and turn", "[engine][world]") {
  sg::Graph graph        = held();
  const sg::Group later  = graph.group({.name = "later", .ranks = {Rank{0}, Rank{1}, Rank{2}}}),
                  first  = graph.group({.name = "first", .ranks = {Rank{0}, Rank{1}, Rank{2}}}),
                  unused = graph.group({.name = "a", .ranks = {Rank{0}, Rank{3}}});
  static_cast<void>(unused);
  for (const Rank rank : {Rank{0}, Rank{1}}) {
    for (const char* message : {"x", "y"})
      add_part(graph, rank, {.group = later, .op = sg::PartOp::barrier, .message = message});
    add_part(graph, rank, {.group = first, .op = sg::PartOp::barrier, .message = "z"});
  }
  // Messages are counted from each sender to each receiver.
  for (const char* message : {"m", "n"})
    add_part(graph, Rank{0}, {.group = first, .op = sg::PartOp::send, .peer = Rank{2}, .message = message});
  add_part(graph, Rank{1}, {.group = first, .op = sg::PartOp::send, .peer = Rank{2}, .message = "o"});

  ListeningWorld world;
  sg::Executor executor({.threads = 2});
  executor.run(sg::Program(graph, world));
  CHECK(world.prepared == std::vector<std::string>{"first 4", "later 2"});
  std::sort(world.exchanges.begin(), world.exchanges.end());
  CHECK(world.exchanges == std::vector<std::string>{"m on 100 turn 0 by 0", "n on 100 turn 1 by 0",
                                                    "o on 100 turn 0 by 1", "x on 101 turn 0 by 0 1",
                                                    "y on 101 turn 1 by 0 1", "z on 100 turn 0 by 0 1"});
  CHECK(world.batch_sizes.empty());

  world.forgets = true;
  CHECK_THROWS_WITH(sg::Program(graph, world), ContainsSubstring("1 numbers for 2 groups"));
}

TEST_CASE("parts that a rank issues together reach a world in one call", "[engine][world]") {
  sg::Graph graph       = held();
  const sg::Group group = graph.group({.name = "pipe", .ranks = {Rank{0}, Rank{1}, Rank{2}, Rank{3}}});
  const auto add        = [&](Rank rank, sg::LaneKind lane, sg::PartOp op, Rank peer, int issue) {
    const std::string message = sg::str(to_string(op), " ", rank, " ", peer);
    graph.add({.name = message,
                      .lane = graph.lane(rank, lane),
                      .part = sg::PartSpec{.group = group, .op = op, .peer = peer, .message = message, .issue = issue}});
  };
  // Rank 1 sends to 3 and receives from 2 at once; rank 0 sends to 2 on its own.
  add(Rank{1}, sg::LaneKind::pp_send, sg::PartOp::send, Rank{3}, 0);
  add(Rank{1}, sg::LaneKind::pp_recv, sg::PartOp::recv, Rank{2}, 0);
  add(Rank{0}, sg::LaneKind::pp_send, sg::PartOp::send, Rank{2}, 0);
  const auto run = [&](bool batches) {
    auto world = std::make_unique<ListeningWorld>(batches);
    sg::Executor executor({.threads = 1});
    const sg::Program program(graph, *world);
    CHECK(program.num_tasks() == (batches ? 2u : 3u));
    executor.run(program);
    CHECK(world->exchanges.size() == 3);
    return world->batch_sizes;
  };
  CHECK(run(true) == std::vector<std::size_t>{2});
  CHECK(run(false).empty());
}

TEST_CASE("a batch in which one part follows another is refused", "[engine][world][refuses]") {
  sg::Graph graph       = held();
  const sg::Group group = graph.group({.name = "pipe", .ranks = {Rank{0}, Rank{2}}});
  for (const char* message : {"a", "b"})  // on one lane, so in order
    add_part(graph, Rank{0}, {.group = group, .op = sg::PartOp::send, .peer = Rank{2}, .message = message, .issue = 0});
  ListeningWorld batching(true), plain;
  CHECK_THROWS_WITH(sg::Program(graph, batching), ContainsSubstring("wait for each other in a cycle"));
  CHECK_NOTHROW(sg::Program(graph, plain));
}

TEST_CASE("a run stops when a peer has failed, and says which", "[engine][world]") {
  sg::Graph graph(2, Rank{0});
  const sg::Group pair = graph.group({.name = "pair", .ranks = {Rank{0}, Rank{1}}});
  graph.add({.name = "meet", .lane = graph.lane(Rank{0}, sg::LaneKind::tp), .part = sg::PartSpec{.group = pair}});
  sg::testing::WaitingWorld world(2, Rank{0});
  sg::Executor executor({.threads = 1, .waiting_lanes = 1});
  const sg::Program program(graph, world);
  sg::Run run = executor.start(program);
  CHECK_FALSE(run.done());
  while (world.entered() == 0) std::this_thread::yield();
  world.fail_peer();
  try {
    run.get();
    FAIL("the run did not fail");
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::backend);
    CHECK_THAT(error.what(), ContainsSubstring("rank 1 is gone") && ContainsSubstring("'meet'"));
  }
  CHECK(world.aborts() == 1);
}
