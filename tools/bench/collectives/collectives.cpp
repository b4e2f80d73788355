#include "tools/bench/collectives/collectives.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <iomanip>
#include <iostream>
#include <memory>
#include <thread>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/run/executor.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/collectives/algorithms.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/bench/collectives/cases.hpp"
#include "tools/bench/collectives/processes.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

// Expands the collectives of a graph with an algorithm. The graph keeps its buffers in their order and may get more. A
// hierarchy has two nodes. Throws Error(config) if the collective has no such form, instead of timing another form.
Graph expand(const Graph& graph, Algorithm algorithm, int threads) {
  const int ranks       = graph.num_ranks();
  const Machine machine = loopback_machine({.ranks = ranks, .threads = threads});
  const ExpandOptions options{.algorithm = algorithm, .ranks_per_node = std::max(1, ranks / 2), .machine = &machine};
  const Algorithm form = form_of(graph, {0}, options);
  if (form != algorithm && algorithm != Algorithm::adaptive) {
    throw Error(ErrorKind::config,
                str(graph.name({0}), " has no ", algorithm, " form for ", ranks, " ranks: it would be ", form,
                    algorithm == Algorithm::hierarchical ? " (two nodes of at least two ranks each)" : ""));
  }
  return expand_collectives(graph, options);
}

struct NamedAlgorithm {
  std::string name;
  Algorithm algorithm;
};
const std::vector<NamedAlgorithm>& algorithms() {
  static const std::vector<NamedAlgorithm> all = [] {
    std::vector<NamedAlgorithm> named;
    for (const Algorithm algorithm :
         {Algorithm::direct, Algorithm::ring, Algorithm::tree, Algorithm::hierarchical, Algorithm::adaptive})
      named.push_back({std::string(to_string(algorithm)), algorithm});
    return named;
  }();
  return all;
}

template <class Known>
const typename Known::value_type& find(const Known& known, const std::string& name, const char* what) {
  std::string names;
  for (const auto& one : known) {
    if (one.name == name) return one;
    names += (names.empty() ? "" : ", ") + one.name;
  }
  throw Error(ErrorKind::config, str("unknown ", what, " '", name, "' (known: ", names, ")"));
}

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One collective as `sets` chains, one after another, each on its own buffers.
class Trial {
 public:
  Trial(const CollectiveCase& what, const NamedAlgorithm& algorithm, Chain chain, int sets, Executor& executor)
      : what_(what),
        chain_(chain),
        executor_(executor),
        world_(chain.num_ranks),
        sets_(static_cast<std::size_t>(sets)) {
    Graph graph(chain.num_ranks);
    std::vector<Rank> ranks;
    for (int rank = 0; rank < chain.num_ranks; ++rank) ranks.push_back(Rank{rank});
    const Group group = graph.group({.name = "all", .ranks = ranks});
    for (Set& set : sets_) {
      for (const Rank rank : ranks) {
        set.x.push_back(chain_buffer(graph, rank, chain_));
        if (what.alternates) set.y.push_back(chain_buffer(graph, rank, chain_));
      }
    }
    for (const Set& set : sets_) {
      for (int k = 0; k < chain.length; ++k) {
        const bool back = what.alternates && k % 2 == 1;
        what.add(graph, group, back ? set.y : set.x, back ? set.x : set.y);
      }
    }
    const Graph expanded = expand(graph, algorithm.algorithm, executor.threads());
    verify(expanded);
    program_ = std::make_unique<Program>(expanded, world_);
  }

  [[nodiscard]] int num_operations() const { return chain_.length * static_cast<int>(sets_.size()); }

  // Fills the buffers, runs the program and checks the result. Returns the seconds of one operation.
  double run() {
    const double scale = start_scale(what_, chain_.num_ranks);
    for (const Set& set : sets_) {
      for (int rank = 0; rank < chain_.num_ranks; ++rank) {
        const auto values = program_->memory().span<float>(set.x[static_cast<std::size_t>(rank)]);
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] = static_cast<float>(start_value(rank, static_cast<std::int64_t>(i)) * scale);
      }
    }
    const double time = seconds([&] { executor_.run(*program_); }) / num_operations();
    const bool in_y   = what_.alternates && chain_.length % 2 == 1;
    for (const Set& set : sets_) {
      for (int rank = 0; rank < chain_.num_ranks; ++rank) check((in_y ? set.y : set.x), rank, scale);
    }
    return time;
  }

 private:
  struct Set {
    std::vector<Buffer> x, y;
  };

  void check(const std::vector<Buffer>& buffers, int rank, double scale) const {
    const auto values = program_->memory().span<float>(buffers[static_cast<std::size_t>(rank)]);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double expected = what_.expected(chain_, rank, static_cast<std::int64_t>(i)) * scale;
      if (values[i] == static_cast<float>(expected)) continue;
      throw Error(ErrorKind::run,
                  str(what_.name, " on ", chain_.num_ranks, " ranks, ", 4 * chain_.elements, " bytes: rank ", rank,
                      " holds ", values[i], " as element ", i, " (", expected, ")"));
    }
  }

  const CollectiveCase& what_;
  Chain chain_;
  Executor& executor_;
  LoopbackWorld world_;
  std::vector<Set> sets_;
  std::unique_ptr<Program> program_;
};

// Copies one half of `total_bytes` of memory to the other; each thread copies its part.
class Memcpy {
 public:
  Memcpy(std::int64_t total_bytes, int threads)
      : share_(static_cast<std::size_t>(std::max<std::int64_t>(total_bytes / 2 / threads, 64))), threads_(threads) {
    Graph graph;
    for (int i = 0; i < 2; ++i)
      (void)graph.buffer({.size_bytes = static_cast<std::int64_t>(share_) * threads, .lifetime = Lifetime::persistent});
    memory_ = std::make_unique<Memory>(graph);
    from_   = memory_->bytes(Buffer{0});
    to_     = memory_->bytes(Buffer{1});
    std::fill(from_.begin(), from_.end(), std::byte{1});
    std::fill(to_.begin(), to_.end(), std::byte{2});
  }

  // Bytes copied per second by all threads together, `repeats` times in a row.
  double run(int repeats) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> pool;
    for (int i = 0; i < threads_; ++i) {
      pool.emplace_back([&, i] {
        const std::size_t at = share_ * static_cast<std::size_t>(i);
        ready.fetch_add(1);
        while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
        for (int k = 0; k < repeats; ++k) {
          std::memcpy(to_.data() + at, from_.data() + at, share_);
          asm volatile("" ::: "memory");  // keeps the compiler from removing copies
        }
      });
    }
    while (ready.load() < threads_) std::this_thread::yield();
    const double time = seconds([&] {
      go.store(true, std::memory_order_release);
      for (std::thread& thread : pool) thread.join();
    });
    if (to_.back() != from_.back()) throw Error(ErrorKind::run, "memcpy did not copy");
    return static_cast<double>(from_.size()) * repeats / time;
  }

 private:
  std::size_t share_;
  int threads_;
  std::unique_ptr<Memory> memory_;  // the same kind of memory as that of the collectives
  std::span<std::byte> from_, to_;
};

void bench(const CollectiveCase& what, const NamedAlgorithm& algorithm, int ranks, std::int64_t size,
           const CollectivesOptions& options, Executor& executor) {
  const std::int64_t elements = std::max<std::int64_t>(size / 4 / ranks, 1) * ranks;
  const std::int64_t bytes = 4 * elements, total = bytes * ranks;
  // Long enough to hide the start of a run; large messages need only a few operations.
  const int wanted =
      options.dry_run ? 3 : static_cast<int>(std::clamp<std::int64_t>((std::int64_t{512} << 20) / total, 8, 1000));
  const int length = std::min(wanted, what.max_length(ranks));
  const int sets   = bytes <= (16 << 10) ? (wanted + length - 1) / length : 1;
  Trial trial(what, algorithm, {ranks, elements, length, std::pow(ranks, length - 1)}, sets, executor);
  Memcpy copy(total, options.threads);

  const int runs = options.dry_run ? 1 : options.runs;
  std::vector<double> times, copies;
  for (int i = options.dry_run ? 0 : -1; i < runs; ++i) {
    const double time = trial.run(), rate = copy.run(trial.num_operations());
    if (i < 0) continue;
    times.push_back(time);
    copies.push_back(rate / 1e9);
  }
  const double time = quantile(times, 0.5), algbw = static_cast<double>(bytes) / time / 1e9;
  const double busbw = algbw * what.bus_factor(ranks);
  if (options.json) {
    cli::print_line(json_line({{"type", "collective"},
                               {"op", what.name},
                               {"algorithm", algorithm.name},
                               {"ranks", ranks},
                               {"bytes", bytes},
                               {"threads", options.threads},
                               {"operations", trial.num_operations()},
                               {"runs", runs},
                               {"us", time * 1e6},
                               {"us_min", quantile(times, 0) * 1e6},
                               {"us_p95", quantile(times, 0.95) * 1e6},
                               {"algbw_GBps", algbw},
                               {"busbw_GBps", busbw},
                               {"memcpy_GBps", quantile(copies, 0.5)}}));
  } else {
    std::cout << std::left << std::setw(16) << what.name << std::setw(14) << algorithm.name << std::right
              << std::setw(5) << ranks << std::setw(11) << bytes << std::fixed << std::setprecision(2) << std::setw(13)
              << time * 1e6 << std::setw(13) << quantile(times, 0.95) * 1e6 << std::setw(13) << algbw << std::setw(13)
              << busbw << std::setw(14) << quantile(copies, 0.5) << std::endl;
  }
}

}  // namespace

std::vector<std::string> known_collectives() {
  std::vector<std::string> names;
  for (const CollectiveCase& what : collective_cases()) names.push_back(what.name);
  return names;
}

std::vector<std::string> known_algorithms() {
  std::vector<std::string> names;
  for (const NamedAlgorithm& algorithm : algorithms()) names.push_back(algorithm.name);
  return names;
}

void collectives(const CollectivesOptions& options) {
  for (const std::string& name : options.ops) (void)find(collective_cases(), name, "op");
  for (const std::string& name : options.algorithms) (void)find(algorithms(), name, "algorithm");
  if (options.backend != "loopback") return process_collectives(options);
  // Impossible combinations are refused before the first measurement.
  Executor executor({.threads = options.threads});
  for (const std::string& op : options.ops) {
    for (const std::string& algorithm : options.algorithms) {
      for (const int ranks : options.ranks)
        (void)Trial(find(collective_cases(), op, "op"), find(algorithms(), algorithm, "algorithm"),
                    {ranks, 4 * ranks, 1, 1}, 1, executor);
    }
  }
  if (!options.json) {
    std::cout << "Collectives of f32 on loopback, in place, " << options.threads << " threads, median of "
              << (options.dry_run ? 1 : options.runs)
              << " runs; memcpy: bytes copied by all threads, from one half of ranks x bytes to the other\n"
              << "op              algorithm     ranks      bytes    median us       p95 us   algbw GB/s   busbw GB/s   "
                 "memcpy GB/s\n";
  }
  for (const std::string& op : options.ops) {
    for (const std::string& algorithm : options.algorithms) {
      for (const int ranks : options.ranks) {
        for (const std::int64_t size : options.sizes) {
          bench(find(collective_cases(), op, "op"), find(algorithms(), algorithm, "algorithm"), ranks,
                options.dry_run ? std::min<std::int64_t>(size, 16 << 10) : size, options, executor);
        }
      }
    }
  }
}

}  // namespace stepgraph::bench
