#pragma once
#include <memory>

#include "tools/bench/overhead/shapes.hpp"

namespace stepgraph::bench {

// A shape as empty tasks of plain Taskflow: the baseline of `stepgraph bench overhead`. Taskflow's header stays in
// raw_taskflow.cpp.
class RawTaskflow {
 public:
  RawTaskflow();
  RawTaskflow(const RawTaskflow&)            = delete;
  RawTaskflow& operator=(const RawTaskflow&) = delete;
  ~RawTaskflow();
  void build(const Shape& shape);

 private:
  friend class RawExecutor;
  struct Tasks;
  std::unique_ptr<Tasks> tasks_;
};

class RawExecutor {
 public:
  explicit RawExecutor(int threads);
  RawExecutor(const RawExecutor&)            = delete;
  RawExecutor& operator=(const RawExecutor&) = delete;
  ~RawExecutor();
  void run(RawTaskflow& taskflow);  // returns when all tasks have ended

 private:
  struct Workers;
  std::unique_ptr<Workers> workers_;
};

}  // namespace stepgraph::bench
