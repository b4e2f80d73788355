#include "tools/bench/collectives/processes.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <memory>

#include "backends/init_world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/peers.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/bench/collectives/cases.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

// A chain of one collective, as the slice of this process.
class ProcessTrial {
 public:
  ProcessTrial(const CollectiveCase& what, Chain chain, ProcessWorld& world, Executor& executor)
      : what_(what), chain_(chain), world_(world), executor_(executor), rank_(index(world.local_ranks()[0])) {
    Graph graph(chain.num_ranks);
    std::vector<Rank> ranks;
    for (int rank = 0; rank < chain.num_ranks; ++rank) ranks.push_back(Rank{rank});
    const Group group = graph.group({.name = "all", .ranks = ranks});
    std::vector<Buffer> x, y;
    for (const Rank rank : ranks) {
      x.push_back(chain_buffer(graph, rank, chain_));
      if (what.alternates) y.push_back(chain_buffer(graph, rank, chain_));
    }
    for (int k = 0; k < chain.length; ++k) {
      const bool back = what.alternates && k % 2 == 1;
      what.add(graph, group, back ? y : x, back ? x : y);
    }
    const Graph mine = slice(graph, world.local_ranks());
    verify(mine, {.world = &world, .waiting_lanes = executor.waiting_lanes()});
    program_ = std::make_unique<Program>(mine, world);
  }

  // Seconds of one operation, from the moment in which all processes are ready.
  double run() {
    return measure([this] { executor_.run(*program_); });
  }
  double run_library(LibraryAllReduce& library) {
    return measure([&] {
      const std::span<float> values = program_->memory().span<float>(Buffer{0});
      for (int k = 0; k < chain_.length; ++k) library.run(values);
    });
  }

 private:
  template <class Work>
  double measure(const Work& work) {
    const double scale = start_scale(what_, chain_.num_ranks);
    std::vector<float> values(static_cast<std::size_t>(chain_.elements));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(start_value(rank_, static_cast<std::int64_t>(i)) * scale);
    program_->memory().write(Buffer{0}, std::span<const float>(values));
    world_.peers()->barrier("bench");
    const auto begin = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    program_->memory().read(Buffer{what_.alternates && chain_.length % 2 == 1 ? 1U : 0U}, std::span<float>(values));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double expected = what_.expected(chain_, rank_, static_cast<std::int64_t>(i)) * scale;
      if (values[i] == static_cast<float>(expected)) continue;
      throw Error(ErrorKind::run,
                  str(what_.name, " on ", chain_.num_ranks, " ranks, ", 4 * chain_.elements, " bytes: rank ", rank_,
                      " holds ", values[i], " as element ", i, " (", expected, ")"));
    }
    return time.count() / chain_.length;
  }

  const CollectiveCase& what_;
  Chain chain_;
  ProcessWorld& world_;
  Executor& executor_;
  int rank_;
  std::unique_ptr<Program> program_;
};

void bench(const CollectiveCase& what, std::int64_t size, const CollectivesOptions& options, ProcessWorld& world,
           Executor& executor, LibraryAllReduce* library) {
  const int ranks             = world.num_ranks();
  const std::int64_t elements = std::max<std::int64_t>(size / 4 / ranks, 1) * ranks, bytes = 4 * elements;
  const int wanted =
      options.dry_run ? 3 : static_cast<int>(std::clamp<std::int64_t>((std::int64_t{128} << 20) / bytes, 4, 200));
  const int length = std::min(wanted, what.max_length(ranks));
  ProcessTrial trial(what, {ranks, elements, length, std::pow(ranks, length - 1)}, world, executor);
  const bool has_baseline = library != nullptr && what.name == "all_reduce";
  const int runs          = options.dry_run ? 1 : options.runs;
  std::vector<double> times, library_times, ratios;
  for (int i = options.dry_run ? 0 : -1; i < runs; ++i) {
    const double time         = trial.run();
    const double library_time = has_baseline ? trial.run_library(*library) : 0;
    if (i < 0) continue;
    times.push_back(time);
    library_times.push_back(library_time);
    ratios.push_back(library_time / time);
  }
  if (world.peers()->process() != 0) return;
  const double time = quantile(times, 0.5), factor = what.bus_factor(ranks);
  const auto rate    = [&](double seconds) { return static_cast<double>(bytes) / seconds / 1e9; };
  const double algbw = rate(time), library_algbw = has_baseline ? rate(quantile(library_times, 0.5)) : 0;
  if (options.json) {
    JsonValue line{{"type", "collective"},
                   {"op", what.name},
                   {"algorithm", options.exact ? "exact" : "direct"},
                   {"backend", options.backend},
                   {"ranks", ranks},
                   {"bytes", bytes},
                   {"operations", length},
                   {"runs", runs},
                   {"us", time * 1e6},
                   {"us_min", quantile(times, 0) * 1e6},
                   {"us_p95", quantile(times, 0.95) * 1e6},
                   {"algbw_GBps", algbw},
                   {"busbw_GBps", algbw * factor}};
    if (has_baseline) line.add({{"library_busbw_GBps", library_algbw * factor}, {"ratio", quantile(ratios, 0.5)}});
    cli::print_line(json_line(line));
    return;
  }
  std::cout << std::left << std::setw(16) << what.name << std::right << std::setw(5) << ranks << std::setw(11) << bytes
            << std::fixed << std::setprecision(2) << std::setw(13) << time * 1e6 << std::setw(13)
            << quantile(times, 0.95) * 1e6 << std::setw(13) << algbw << std::setw(13) << algbw * factor;
  if (has_baseline) std::cout << std::setw(20) << library_algbw * factor << std::setw(8) << quantile(ratios, 0.5);
  std::cout << std::endl;
}

}  // namespace

void process_collectives(const CollectivesOptions& options) {
  InitOptions init;
  init.nccl.devices                         = options.devices;
  init.nccl.exact                           = options.exact;
  const std::unique_ptr<ProcessWorld> world = init_world(options.backend, init);
  try {
    int num_lanes = 0;
    for (std::size_t kind = 0; kind < num_lane_kinds; ++kind) num_lanes += world->waits(static_cast<LaneKind>(kind));
    Executor executor({.threads = 1, .waiting_lanes = num_lanes});
    const std::unique_ptr<LibraryAllReduce> library = world->library_all_reduce();
    if (!options.json && world->peers()->process() == 0) {
      std::cout
          << "Collectives of f32 over " << options.backend << ", in place, one process for each rank, median of "
          << (options.dry_run ? 1 : options.runs) << " runs; library: its own all-reduce, run in turn\n"
          << "op              ranks      bytes    median us       p95 us   algbw GB/s   busbw GB/s  library busbw "
             "GB/s   ratio\n";
    }
    for (const std::string& op : options.ops) {
      for (const CollectiveCase& what : collective_cases()) {
        if (what.name != op) continue;
        for (const std::int64_t size : options.sizes)
          bench(what, options.dry_run ? std::min<std::int64_t>(size, 16 << 10) : size, options, *world, executor,
                library.get());
      }
    }
  } catch (const std::exception& error) {
    if (!world->fail(error.what())) throw cli::Exit{3};  // another process has, which is printed
    throw;
  }
  if (!world->end()) throw cli::Exit{3};
}

}  // namespace stepgraph::bench
