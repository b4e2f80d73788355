#include "tests/support/worlds/thread_processes.hpp"

#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "tests/support/worlds/hub_world.hpp"
#include "tests/support/worlds/message_hub.hpp"
#include "tests/support/worlds/thread_peers.hpp"

namespace stepgraph::testing {

std::vector<RankSet> neighbours(int num_ranks, int num_processes) {
  std::vector<RankSet> sets;
  for (int process = 0, next = 0; process < num_processes; ++process) {
    std::vector<Rank> ranks;
    const int count = num_ranks / num_processes + (process < num_ranks % num_processes ? 1 : 0);
    for (int i = 0; i < count; ++i) ranks.push_back(Rank{next++});
    sets.emplace_back(std::move(ranks));
  }
  return sets;
}

void in_processes(const std::vector<RankSet>& processes, Exchanges exchanges,
                  const std::function<void(World& world)>& process) {
  const int num_ranks = std::accumulate(processes.begin(), processes.end(), 0, [](int sum, const RankSet& ranks) {
    return sum + static_cast<int>(ranks.size());
  });
  Hub hub(num_ranks);
  MessageHub messages(num_ranks);
  PeersHub peers(static_cast<int>(processes.size()));
  std::mutex mutex;
  std::exception_ptr first;
  const auto run = [&](int number) {
    const RankSet& ranks = processes[static_cast<std::size_t>(number)];
    std::unique_ptr<World> world;
    if (exchanges == Exchanges::hub) {
      world = std::make_unique<HubWorld>(hub, ranks, &peers.of(number));
    } else {
      world = std::make_unique<MessageHubWorld>(messages, ranks, &peers.of(number));
    }
    try {
      process(*world);
    } catch (const std::exception& error) {
      peers.fail(error.what());
      world->abort(error.what());  // ends a communication that others wait in
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (int number = 0; number < static_cast<int>(processes.size()); ++number) threads.emplace_back(run, number);
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace stepgraph::testing
