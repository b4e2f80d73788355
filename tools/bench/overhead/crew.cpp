#include "tools/bench/overhead/crew.hpp"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iomanip>
#include <memory>
#include <sstream>
#include <string>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "graphs/files/json_value.hpp"
#include "ops/cpu/gemm/gemm.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

// A kernel of one rank, in tiles. It counts how often each tile ran.
class Kernel {
 public:
  Kernel(std::int64_t num_tiles, std::int64_t joined) : num_tiles_(num_tiles), joined_(joined) {}
  virtual ~Kernel() = default;
  [[nodiscard]] std::int64_t num_tiles() const { return num_tiles_; }
  [[nodiscard]] std::int64_t joined() const { return joined_; }
  void run(std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) ++ran_[static_cast<std::size_t>(i)].times;
    compute(first, end);
  }
  void check(std::int64_t times) const {
    for (const Count& tile : ran_) {
      if (tile.times != times)
        throw Error(ErrorKind::run, str("crew: a tile ran ", tile.times, " times (", times, ")"));
    }
  }

 private:
  virtual void compute(std::int64_t first, std::int64_t end) = 0;
  struct alignas(64) Count {
    std::int64_t times = 0;
  };
  std::int64_t num_tiles_, joined_;
  std::vector<Count> ran_ = std::vector<Count>(static_cast<std::size_t>(num_tiles_));
};

class Nothing : public Kernel {
 public:
  Nothing() : Kernel(64, 1) {}

 private:
  void compute(std::int64_t, std::int64_t) override {}
};

// y += 0.5 x, of arrays that stay in caches.
class Elements : public Kernel {
 public:
  Elements() : Kernel(32, 1) {}

 private:
  static constexpr std::int64_t per_tile = 16384;
  void compute(std::int64_t first, std::int64_t end) override {
    const float* __restrict x = x_.data();
    float* __restrict y       = y_.data();
    for (std::int64_t i = first * per_tile; i < end * per_tile; ++i) y[i] += 0.5f * x[i];
  }
  std::vector<float> x_ = std::vector<float>(32 * per_tile, 1), y_ = x_;
};

// A product of a layer: activations of 1024 tokens times a weight.
class Product : public Kernel {
 public:
  explicit Product(std::int64_t width)
      : Kernel(num_gemm_tiles(rows, width), gemm_joined(rows, width)),
        width_(width),
        a_(static_cast<std::size_t>(rows * width), 0.5f),
        b_(static_cast<std::size_t>(width * width), 0.25f),
        c_(a_.size()) {}

 private:
  static constexpr std::int64_t rows = 1024;
  void compute(std::int64_t first, std::int64_t end) override {
    const Gemm<float> product{.m        = rows,
                              .n        = width_,
                              .k        = width_,
                              .a        = {a_.data(), width_, 1},
                              .b        = {b_.data(), width_, 1},
                              .c        = {c_.data(), nullptr, rows * width_},
                              .c_stride = width_};
    gemm_tiles(product, first, end);
  }
  std::int64_t width_;
  std::vector<float> a_, b_, c_;
};

// `repeats`: kernels of a run, of all ranks together. Enough for several milliseconds: at its beginning the threads of
// Taskflow that find no node still look for one.
struct Kind {
  const char* name;
  int repeats;
  bool computes;  // the others show what sharing out costs, and are not in the mean
  std::function<std::unique_ptr<Kernel>()> make;
};
std::vector<Kind> kinds() {
  return {{"product 1024x512x512", 16, true, [] { return std::make_unique<Product>(512); }},
          {"product 1024x256x256", 64, true, [] { return std::make_unique<Product>(256); }},
          {"elements 512Ki", 512, true, [] { return std::make_unique<Elements>(); }},
          {"nothing, 64 tiles", 4096, false, [] { return std::make_unique<Nothing>(); }}};
}

using Kernels = std::vector<std::unique_ptr<Kernel>>;  // by rank

// One node for each rank, whose body runs the rank's kernel `repeats` times.
class Ours {
 public:
  Ours(const Kernels& kernels, int repeats, int threads)
      : world_(static_cast<int>(kernels.size())), executor_({.threads = threads}) {
    Graph graph(static_cast<int>(kernels.size()));
    for (std::size_t rank = 0; rank < kernels.size(); ++rank) {
      graph.add({.name = "kernels", .parallel = true, .rank = Rank{static_cast<int>(rank)}},
                [kernel = kernels[rank].get(), repeats](const Context& context) {
                  for (int i = 0; i < repeats; ++i) {
                    context.parallel_for(kernel->num_tiles(), kernel->joined(),
                                         [=](std::int64_t first, std::int64_t end) { kernel->run(first, end); });
                  }
                });
    }
    program_ = std::make_unique<Program>(graph, world_);
  }
  void run() { executor_.run(*program_); }

 private:
  LoopbackWorld world_;
  Executor executor_;
  std::unique_ptr<Program> program_;
};

template <class Partitioner>
class Tbb {
 public:
  Tbb(const Kernels& kernels, int repeats, int threads)
      : kernels_(kernels),
        repeats_(repeats),
        allowed_(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(threads)),
        arena_(threads),
        partitioners_(kernels.size()) {}
  void run() {
    arena_.execute([&] {
      if (kernels_.size() == 1) return rank(0);
      tbb::parallel_for(
          tbb::blocked_range<std::size_t>(0, kernels_.size(), 1),
          [&](const auto& ranks) {
            for (std::size_t i = ranks.begin(); i < ranks.end(); ++i) rank(i);
          },
          tbb::simple_partitioner());
    });
  }

 private:
  void rank(std::size_t of) {
    Kernel& kernel = *kernels_[of];
    for (int i = 0; i < repeats_; ++i) {
      tbb::parallel_for(
          tbb::blocked_range<std::int64_t>(0, kernel.num_tiles(), 1),
          [&](const auto& tiles) { kernel.run(tiles.begin(), tiles.end()); }, partitioners_[of]);
    }
  }
  const Kernels& kernels_;
  int repeats_;
  tbb::global_control allowed_;  // TBB starts one thread for each processor otherwise
  tbb::task_arena arena_;
  std::vector<Partitioner> partitioners_;
};

struct Line {
  const char* kernel;
  int ranks, threads;
  std::array<double, 3> us;  // of a kernel: ours, TBB's static and affinity partitioners
  [[nodiscard]] double ahead() const { return std::min(us[1], us[2]) / us[0]; }
};

// Seconds of a run. Each measurement has its own threads' arena: TBB divides its threads between those that exist. Runs
// of the first milliseconds are not timed, since TBB's threads arrive late.
template <class Way>
double seconds_of_run(const Kernels& kernels, int repeats, int threads, bool dry_run, std::int64_t& num_runs) {
  Way way(kernels, repeats, threads);
  const auto warm = std::chrono::steady_clock::now() + std::chrono::milliseconds(dry_run ? 0 : 10);
  do {
    way.run();
    ++num_runs;
  } while (std::chrono::steady_clock::now() < warm);
  const auto begin = std::chrono::steady_clock::now();
  way.run();
  ++num_runs;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Line measure(const Kind& kind, int ranks, int threads, const CrewOptions& options) {
  const int runs    = options.dry_run ? 1 : options.runs,
            repeats = options.dry_run ? 1 : std::max(2, kind.repeats / ranks);
  Kernels kernels;
  for (int rank = 0; rank < ranks; ++rank) kernels.push_back(kind.make());
  std::array<std::vector<double>, 3> seconds;
  std::int64_t num_runs = 0;
  const auto add        = [&]<class Way>(std::size_t way) {
    seconds[way].push_back(seconds_of_run<Way>(kernels, repeats, threads, options.dry_run, num_runs));
  };
  for (int run = 0; run < runs; ++run) {
    add.template operator()<Ours>(0);
    add.template operator()<Tbb<tbb::static_partitioner>>(1);
    add.template operator()<Tbb<tbb::affinity_partitioner>>(2);
  }
  for (const auto& kernel : kernels) kernel->check(num_runs * repeats);
  Line line{kind.name, ranks, threads, {}};
  for (std::size_t way = 0; way < seconds.size(); ++way)
    line.us[way] = 1e6 * quantile(seconds[way], 0.5) / (repeats * ranks);
  return line;
}

void print(const Line& line, bool json) {
  if (json) {
    cli::print_line(json_line({{"type", "crew"},
                               {"kernel", line.kernel},
                               {"ranks", line.ranks},
                               {"threads", line.threads},
                               {"us", line.us[0]},
                               {"tbb_static_us", line.us[1]},
                               {"tbb_affinity_us", line.us[2]},
                               {"ratio_to_tbb", line.ahead()}}));
    return;
  }
  std::ostringstream out;
  out << std::left << std::setw(22) << line.kernel << std::right << std::setw(7) << line.ranks << std::setw(9)
      << line.threads << std::fixed << std::setprecision(1);
  for (const double each : line.us) out << std::setw(13) << each;
  out << std::setprecision(2) << std::setw(14) << line.ahead();
  cli::print_line(out.str());
}

}  // namespace

void crew(const CrewOptions& options) {
  if (!options.json)
    cli::print_line("us of a kernel           ranks  threads         ours   TBB static TBB affinity  best TBB/ours");
  std::vector<double> ahead;
  for (const int threads : options.threads) {
    for (const Kind& kind : kinds()) {
      for (const int ranks : options.ranks) {
        const Line line = measure(kind, ranks, threads, options);
        print(line, options.json);
        if (kind.computes) ahead.push_back(line.ahead());
      }
    }
  }
  double logs = 0;
  for (const double each : ahead) logs += std::log(each);
  const double mean = std::exp(logs / static_cast<double>(ahead.size())), least = quantile(ahead, 0);
  if (options.json) {
    cli::print_line(json_line({{"type", "crew_summary"}, {"mean_ratio_to_tbb", mean}, {"least_ratio_to_tbb", least}}));
  } else {
    cli::print_line(str("best TBB / ours, without empty tiles: geometric mean ", mean, ", least ", least, " (above 1: ours is faster)"));
  }
}

}  // namespace stepgraph::bench
