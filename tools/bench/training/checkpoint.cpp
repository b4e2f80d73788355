#include "tools/bench/training/checkpoint.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iomanip>
#include <memory>
#include <sstream>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"
#include "engine/base/quantile.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/files/token_data.hpp"
#include "graphs/train/broadcast_weights.hpp"
#include "graphs/train/checkpoint.hpp"
#include "tools/bench/training/training.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

namespace fs = std::filesystem;
using Clock  = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A folder that is removed again.
class Scratch {
 public:
  explicit Scratch(const std::string& in) : path_(fs::path(in) / str("bench-checkpoint-", random_suffix())) {
    fs::create_directories(path_);
  }
  ~Scratch() { clear(true); }
  Scratch(const Scratch&)            = delete;
  Scratch& operator=(const Scratch&) = delete;
  [[nodiscard]] std::string operator/(const char* name) const { return (path_ / name).string(); }
  void clear(bool all = false) const noexcept {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
    if (!all) fs::create_directories(path_, ignored);
  }

 private:
  fs::path path_;
};

double plain_write(const std::string& path, std::int64_t bytes) {
  constexpr std::size_t piece = std::size_t{8} << 20;
  const auto check            = [&](bool good) {
    if (!good) throw Error(ErrorKind::backend, str(path, ": cannot be written: ", system_reason(errno)));
  };
  const std::unique_ptr<void, void (*)(void*)> buffer(std::aligned_alloc(4096, piece), std::free);
  std::memset(buffer.get(), 7, piece);
  const auto start = Clock::now();
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0666));
  if (!file.is_open() && errno == EINVAL) {
    ::unlink(path.c_str());
    file = Descriptor(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  }
  check(file.is_open());
  for (std::int64_t done = 0; done < bytes;) {
    const ssize_t now = ::write(file.get(), buffer.get(), piece);
    check(now > 0);
    done += now;
  }
  check(::fsync(file.get()) == 0);
  const double taken = seconds_since(start);
  ::unlink(path.c_str());
  return taken;
}

void drop_from_cache(const std::string& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const Descriptor file(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    if (file.is_open()) ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

class Bench {
 public:
  explicit Bench(const CheckpointBenchOptions& options)
      : options_(options),
        case_(training_case(options.dry_run ? "tiny" : options.model, options.layout)),
        model_(gpt2(case_.spec)),
        scratch_(options.folder) {
    case_.plan.precision = {};  // f32
  }

  void run() {
    measure_files();
    if (options_.steps > 0) measure_steps();
  }

 private:
  // Little memory beside the states.
  [[nodiscard]] BatchSpec small_batch() const { return {.global = case_.plan.layout.dp, .micro = 1, .seq = 8}; }

  void measure_files() {
    LoopbackWorld world(Layout(case_.plan.layout).num_ranks());
    Trainer trainer(model_, case_.plan, small_batch(), world, {.threads = options_.threads, .seed = 1});
    set_fresh_weights(trainer.run(), 1);
    const std::uint64_t expected = check_weights(trainer.run());
    std::vector<double> plain, save, load;
    std::int64_t bytes = 0;
    for (int i = 0; i < (options_.dry_run ? 1 : options_.runs); ++i) {
      CheckpointWriter writer(trainer, {.folder = scratch_ / "run", .async = false});
      auto start = Clock::now();
      writer.save(0);
      const std::string path = writer.finish().value();
      save.push_back(seconds_since(start));
      bytes = writer.figures().num_bytes();
      plain.push_back(plain_write(scratch_ / "plain", bytes));
      drop_from_cache(path);
      start = Clock::now();
      static_cast<void>(load_checkpoint(trainer, path));
      load.push_back(seconds_since(start));
      if (check_weights(trainer.run()) != expected) throw Error(ErrorKind::run, "checkpoint: loaded other weights");
      scratch_.clear();
    }
    const auto rate = [&](const std::vector<double>& times) {
      return static_cast<double>(bytes) / quantile(times, 0.5) / 1e9;
    };
    const double baseline = rate(plain);
    if (options_.json) {
      cli::print_line(json_line({{"type", "checkpoint"},
                                 {"model", case_.model},
                                 {"layout", case_.layout},
                                 {"parameters", model_.parameters().num_elements()},
                                 {"bytes", bytes},
                                 {"save_GBps", rate(save)},
                                 {"load_GBps", rate(load)},
                                 {"plain_write_GBps", baseline},
                                 {"save_ratio", rate(save) / baseline},
                                 {"load_ratio", rate(load) / baseline}}));
      return;
    }
    std::ostringstream out;
    out << std::fixed << std::setprecision(3) << case_.model << ' ' << case_.layout << ", " << bytes << " bytes: save "
        << rate(save) << " GB/s, load " << rate(load) << " GB/s, plain writer " << baseline << " GB/s; ratios "
        << rate(save) / baseline << " and " << rate(load) / baseline;
    cli::print_line(out.str());
  }

  // Rounds of `every` steps, in turn with one checkpoint and without.
  void measure_steps() {
    LoopbackWorld world(Layout(case_.plan.layout).num_ranks());
    Trainer trainer(model_, case_.plan, case_.batch, world, {.threads = options_.threads, .seed = 1});
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(case_.tokens()) + 1);
    TokenData(SyntheticTokens{.seed = 1}, case_.spec.vocab).read(0, tokens);
    CheckpointWriter writer(trainer, {.folder = scratch_ / "steps", .keep = 1, .replace = true});
    const auto round = [&](bool saves) {
      const auto start = Clock::now();
      if (saves) writer.save(0);
      for (int i = 0; i < options_.every; ++i) static_cast<void>(trainer.step(tokens));
      if (saves) writer.finish();
      return seconds_since(start);
    };
    static_cast<void>(round(true));  // warm-up: the copy is allocated
    std::vector<double> with, without;
    for (int done = 0; done < options_.steps; done += options_.every) {
      without.push_back(round(false));
      with.push_back(round(true));
    }
    const double cost = quantile(with, 0.5) / quantile(without, 0.5) - 1;
    if (options_.json) {
      cli::print_line(json_line({{"type", "checkpoint_steps"},
                                 {"model", case_.model},
                                 {"layout", case_.layout},
                                 {"every", options_.every},
                                 {"step_ms", 1e3 * quantile(without, 0.5) / options_.every},
                                 {"stage_ms", 1e3 * writer.figures().staged_s},
                                 {"write_ms", 1e3 * writer.figures().written_s},
                                 {"cost_share", cost}}));
      return;
    }
    std::ostringstream out;
    out << std::fixed << std::setprecision(2) << "a checkpoint every " << options_.every << " steps of "
        << 1e3 * quantile(without, 0.5) / options_.every << " ms costs " << 100 * cost << " % of the time (copy "
        << 1e3 * writer.figures().staged_s << " ms, then " << 1e3 * writer.figures().written_s << " ms beside steps)";
    cli::print_line(out.str());
  }

  CheckpointBenchOptions options_;
  TrainingCase case_;
  Model model_;
  Scratch scratch_;
};

}  // namespace

void checkpoint(const CheckpointBenchOptions& options) { Bench(options).run(); }

}  // namespace stepgraph::bench
