#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "engine/run/world.hpp"
#include "tests/support/op_case.hpp"

// Ops on a device beside the same ops on the CPU. Tests are skipped, with a reason, where there is no device.
namespace stepgraph::testing {

// Skips the test where this build or this machine has no device; to be called before anything is checked.
void need_device();
// Ranks on CUDA device 0; skips the test where this build or this machine has none.
[[nodiscard]] std::unique_ptr<World> device_world(int num_ranks = 1, bool capture = true);

// A test by itself: output and gradients on the device are the CPU's from the same values, within what the type has
// (f32: the case's own tolerance), also where a gradient is added to what is there; and the same bits every time.
void check_on_device(const OpCase& test, const std::vector<DType>& types = {DType::f32, DType::bf16, DType::f16});

// Runs a graph whose persistent buffers begin with these values, and returns what others have afterwards.
[[nodiscard]] std::vector<std::vector<double>> run_graph(const Graph& graph,
                                                         const std::vector<std::pair<Buffer, std::vector<double>>>& set,
                                                         const std::vector<Buffer>& read, bool on_device);

}  // namespace stepgraph::testing
