#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "engine/run/world.hpp"
#include "tests/support/ops/op_case.hpp"

// Compares ops on a device with the same ops on the CPU. Tests are skipped, with a reason, if there is no device.
namespace stepgraph::testing {

// Skips the test if this build or this machine has no device. Call it before any check.
void need_device();
// Ranks on CUDA device 0, or on a list of devices; skips the test if this build or this machine has none. {0, 0} is two
// logical devices on one GPU.
[[nodiscard]] std::unique_ptr<World> device_world(int num_ranks = 1, bool capture = true,
                                                  const std::vector<int>& devices = {0});

// A complete test: output and gradients on the device equal those of the CPU for the same values, within the precision
// of the type (f32: the tolerance of the case), also when a gradient is added to a previous one; and they have the same
// bits in every run.
void check_on_device(const OpCase& test, const std::vector<DType>& types = {DType::f32, DType::bf16, DType::f16});

// A complete test: with exactly the workspace that its node declares, each body on the device computes the bits that it
// computes with all of its stream's workspace. In two microbatches, so that weight gradients are also added in place.
void check_declared_workspace(const OpCase& test, const std::vector<DType>& types);

// Runs a graph after setting persistent buffers to the given values, and returns the values of other buffers.
[[nodiscard]] std::vector<std::vector<double>> run_graph(const Graph& graph,
                                                         const std::vector<std::pair<Buffer, std::vector<double>>>& set,
                                                         const std::vector<Buffer>& read, bool on_device);

}  // namespace stepgraph::testing
