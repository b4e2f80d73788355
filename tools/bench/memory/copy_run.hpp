#pragma once
#include <memory>
#include <optional>
#include <string>

#include "engine/graph/timeline.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/world.hpp"

namespace stepgraph::bench {

// Chains of copies and of matrix products, each chain on its own lane.
struct CopyShape {
  std::int64_t bytes = 0;  // of a copy
  std::int64_t width = 0;  // rows and columns of the matrices
  int h2d = 0, d2h = 0, products = 0;
};

// Times of one run.
struct CopyTimes {
  std::optional<double> h2d_rate = {},
                        d2h_rate = {};  // bytes a second, from the first copy's begin to the last one's end
  double copies_s                = 0;   // from the first begin to the last end of any
  // The median time of the products that run while all lanes are busy; of all products if there are none.
  std::optional<double> product_s = {};
  double all_at_once              = 0;  // share of the makespan
};

// A graph of one rank. Each run is recorded.
class CopyRun {
 public:
  CopyRun(const CopyShape& shape, World& world, int threads);
  [[nodiscard]] CopyTimes run();
  void check() const;                               // throws Error(run) if a copy differs from its source
  void write_trace(const std::string& path) const;  // of the last run

 private:
  CopyShape shape_;
  Graph graph_;
  Buffer host_in_, device_in_, device_out_, host_out_;
  std::optional<RunnableGraph> runnable_;
  std::unique_ptr<Program> program_;
  Executor executor_;
  Timeline timeline_;
};

}  // namespace stepgraph::bench
