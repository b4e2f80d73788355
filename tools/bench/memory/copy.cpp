#include "tools/bench/memory/copy.hpp"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/bench/memory/copy_run.hpp"
#include "tools/stepgraph/processes/worlds.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

CopyTimes medians(const std::vector<CopyTimes>& runs) {
  const auto median = [&](const auto& of) {
    std::vector<double> values;
    for (const CopyTimes& run : runs) values.push_back(of(run));
    return quantile(values, 0.5);
  };
  CopyTimes out{.copies_s    = median([](const CopyTimes& run) { return run.copies_s; }),
                .all_at_once = median([](const CopyTimes& run) { return run.all_at_once; })};
  const CopyTimes& any = runs.front();
  if (any.h2d_rate) out.h2d_rate = median([](const CopyTimes& run) { return *run.h2d_rate; });
  if (any.d2h_rate) out.d2h_rate = median([](const CopyTimes& run) { return *run.d2h_rate; });
  if (any.product_s) out.product_s = median([](const CopyTimes& run) { return *run.product_s; });
  return out;
}

class Bench {
 public:
  explicit Bench(const CopyOptions& options)
      : options_(options),
        world_(cli::make_world(options.backend, 1)),
        runs_(options.dry_run ? 1 : options.runs),
        copies_(options.dry_run ? 2 : options.copies) {
    shape_.bytes = options.dry_run ? std::min<std::int64_t>(options.bytes, 64 << 10) : options.bytes;
    shape_.width = options.dry_run ? 64 : options.width.value_or(world_->device() != nullptr ? 8192 : 512);
  }

  void run() {
    if (!options_.json) print_heading();
    const CopyTimes in      = measure("h2d", {.h2d = copies_});
    const CopyTimes out     = measure("d2h", {.d2h = copies_});
    const CopyTimes both    = measure("both", {.h2d = copies_, .d2h = copies_}, &in, &out);
    const CopyTimes compute = measure("compute", {.products = options_.dry_run ? 2 : 32});
    // A little longer than the copies, so that copies never run alone.
    const double enough = std::ceil(1.1 * both.copies_s / *compute.product_s) + 1;
    measure("all",
            {.h2d      = copies_,
             .d2h      = copies_,
             .products = static_cast<int>(std::clamp(enough, 2.0, options_.dry_run ? 2.0 : 2000.0))},
            &in, &out, &compute);
  }

 private:
  CopyTimes measure(const char* name, CopyShape shape, const CopyTimes* in = nullptr, const CopyTimes* out = nullptr,
                    const CopyTimes* compute = nullptr) {
    shape.bytes = shape_.bytes;
    shape.width = shape_.width;
    CopyRun what(shape, *world_, options_.threads);
    std::vector<CopyTimes> runs;
    for (int i = options_.dry_run ? 0 : -2; i < runs_; ++i) {  // warm-up: algorithms are chosen and pages touched
      const CopyTimes times = what.run();
      if (i >= 0) runs.push_back(times);
    }
    what.check();
    const CopyTimes times = medians(runs);
    if (options_.trace && compute != nullptr) what.write_trace(*options_.trace);
    const Line line{name, shape, times, in, out, compute};
    options_.json ? print_json(line) : print_text(line);
    return times;
  }

  struct Line {
    const char* name;
    const CopyShape& shape;
    const CopyTimes& times;
    const CopyTimes *in, *out, *compute;  // the runs alone, for ratios; null: none
    [[nodiscard]] double gflops() const {
      const auto width = static_cast<double>(shape.width);
      return 2 * width * width * width / *times.product_s / 1e9;
    }
  };

  void print_json(const Line& line) const {
    JsonValue json = {{"type", "copy"},
                      {"case", line.name},
                      {"backend", options_.backend},
                      {"bytes", line.shape.bytes},
                      {"copies", std::max(line.shape.h2d, line.shape.d2h)},
                      {"products", line.shape.products},
                      {"width", line.shape.width},
                      {"runs", runs_}};
    for (const char* field : {"h2d_GBps", "d2h_GBps", "h2d_ratio_to_alone", "d2h_ratio_to_alone", "product_ms",
                              "gflops", "compute_slowdown", "three_at_once_share"})
      json.set(field, nullptr);
    const CopyTimes& times = line.times;
    if (times.h2d_rate) json.set("h2d_GBps", *times.h2d_rate / 1e9);
    if (times.d2h_rate) json.set("d2h_GBps", *times.d2h_rate / 1e9);
    if (line.in) json.set("h2d_ratio_to_alone", *times.h2d_rate / *line.in->h2d_rate);
    if (line.out) json.set("d2h_ratio_to_alone", *times.d2h_rate / *line.out->d2h_rate);
    if (times.product_s) {
      json.set("product_ms", 1e3 * *times.product_s);
      json.set("gflops", line.gflops());
    }
    if (line.compute) {
      json.set("compute_slowdown", *times.product_s / *line.compute->product_s);
      json.set("three_at_once_share", times.all_at_once);
    }
    cli::print_line(json_line(json));
  }

  void print_heading() const {
    cli::print_line(str("copies of ", shape_.bytes, " bytes between pinned and device memory, ", copies_,
                        " each way; products of bf16, ", shape_.width, " wide; ", options_.backend, ", median of ",
                        runs_, " runs\n  case      h2d GB/s   d2h GB/s   product ms     GFLOP/s"));
  }

  void print_text(const Line& line) const {
    std::ostringstream out;
    const auto column = [&](int width, int digits, std::optional<double> value) {
      out << std::setw(width);
      value ? out << std::setprecision(digits) << *value : out << "-";
    };
    const auto scaled = [](std::optional<double> value, double by) {
      return value ? std::optional(*value * by) : std::nullopt;
    };
    const CopyTimes& times = line.times;
    out << "  " << std::left << std::setw(8) << line.name << std::right << std::fixed;
    column(10, 2, scaled(times.h2d_rate, 1e-9));
    column(11, 2, scaled(times.d2h_rate, 1e-9));
    column(13, 3, scaled(times.product_s, 1e3));
    column(12, 0, times.product_s ? std::optional(line.gflops()) : std::nullopt);
    if (line.compute) {
      out << "\nduring products, copies reach " << std::setprecision(1) << 100 * *times.h2d_rate / *line.in->h2d_rate
          << "% (h2d) and " << 100 * *times.d2h_rate / *line.out->d2h_rate
          << "% (d2h) of their speed alone; a product takes " << std::setprecision(3)
          << *times.product_s / *line.compute->product_s << " times as long as alone; all three lanes are busy for "
          << std::setprecision(1) << 100 * times.all_at_once << "% of the time";
    }
    cli::print_line(out.str());
  }

  const CopyOptions& options_;
  std::unique_ptr<World> world_;
  int runs_, copies_;
  CopyShape shape_;
};

}  // namespace

void copy(const CopyOptions& options) { Bench(options).run(); }

}  // namespace stepgraph::bench
