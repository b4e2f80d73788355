#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/run/world.hpp"

namespace stepgraph::testing {

struct ConformanceOptions {
  // Reductions of numbers that round must have the bits of a reduction in group order (16-bit floats: summed as f32).
  bool rank_order = false;
  // After a step that failed on one rank, and that every rank must be told of, the next step works.
  bool aborted_steps = true;
  // The element types that the world can move and reduce.
  std::vector<DType> types = {DType::u8, DType::i32, DType::i64, DType::f16, DType::bf16, DType::f32, DType::f64};
  std::int64_t large_bytes = 4 << 20;  // of one large communication, over all ranks
  int num_random           = 4;        // graphs of communications drawn at random
  int threads              = 2;
  std::chrono::milliseconds step_timeout{20'000};
  std::string only = {};  // the cases whose names contain this
};

// Runs graphs of every kind of communication in `world` and compares the resulting memory, including gaps between
// accesses, with a sequential reference. Returns one line per error; empty: the world conforms. Memory can be on the
// host or on a device.
//
// With one local rank it runs that rank's slice: every process of the world calls it at the same time, with its own
// World and the same options. With more local ranks it runs the whole graph. Wrong numbers do not stop it. A failed
// step does, because the processes would disagree on what comes next. Any thread may call it. Nothing hangs longer than
// the time-out of one step.
[[nodiscard]] std::vector<std::string> world_conformance(World& world, const ConformanceOptions& options = {});

}  // namespace stepgraph::testing
