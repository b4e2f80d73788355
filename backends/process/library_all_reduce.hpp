#pragma once
#include <span>

namespace stepgraph {

// The all-reduce that a communication library itself has, over all ranks: a baseline for benchmarks. Its sums have an
// order of its own.
class LibraryAllReduce {
 public:
  virtual ~LibraryAllReduce() = default;

  // Sums in place. Collective; not while a program runs.
  virtual void run(std::span<float> values) = 0;
};

}  // namespace stepgraph
