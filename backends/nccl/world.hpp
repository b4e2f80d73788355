#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/nccl/calls.hpp"
#include "backends/nccl/library.hpp"
#include "backends/process/world.hpp"
#include "engine/run/device.hpp"

namespace stepgraph {

namespace nccl {
class NcclLinks;  // backends/nccl/links.hpp
}

struct NcclWorldOptions {
  nccl::CallOptions calls = {};    // comm.exact; the same in all processes
  bool capture            = true;  // this process can capture steps that have no host nodes
};

// One process of a world with one GPU, and so one rank, in each process. They communicate by NCCL. The constructor is
// collective, as that of every world of processes.
//
// Communicators are made when a program is made, in one order in all processes, one for each group. A communication is
// calls of NCCL on the stream of its part (backends/nccl/calls.hpp); parts that are issued together are one NCCL group.
// A rank's communications run one after another, in its issue order: NCCL needs that. Types and reductions that cannot
// be executed, and reductions of several phases that are issued together with other parts, are refused when the program
// is made.
//
// A run that was aborted, here or by a peer, throws Error(backend). The device ended its communications early and went
// on with what they left: persistent buffers are undefined after it. The next run begins with new communicators.
//
// All processes capture a program, or none does. A recorder makes a process issue the run node by node: give one to all
// processes or to none.
class NcclWorld final : public ProcessWorld {
 public:
  // The device of this process, and NCCL on it.
  struct Parts {
    std::shared_ptr<Device> device;
    std::unique_ptr<nccl::Library> library;
    // Whether the device captures steps, from the next step on; see set_capture.
    std::function<void(bool)> set_capture = {};
  };
  // `may_capture`: whether all processes agreed to capture the program that is being made. Device::lower asks it. It
  // does not wait. Error: all processes end, with its text.
  using MakeParts = std::function<Parts(std::function<bool(bool wishes)> may_capture)>;

  NcclWorld(const ProcessPlace& place, const ProcessWorldOptions& options, const NcclWorldOptions& nccl,
            const MakeParts& make_parts);

  [[nodiscard]] bool waits(LaneKind) const override { return false; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::per_rank; }
  [[nodiscard]] bool reduces_in_order() const override { return calls_.exact; }
  [[nodiscard]] bool batches() const override { return true; }
  [[nodiscard]] Device* device() const override;
  [[nodiscard]] std::int64_t part_workspace(const Graph& graph, Node part) const override;
  [[nodiscard]] std::vector<std::uint32_t> prepare(const Graph& graph, std::span<const Communicator> groups) override;
  void communicate(const Context& context, const Exchange& exchange) override;
  void communicate_batch(const Context& context, std::span<const Exchange> batch) override;
  // Beside a verdict: the abort of the run that is under way, and errors of NCCL whose cause does not become known
  // soon.
  [[nodiscard]] std::optional<std::string> failure() const override;

  void set_capture(bool capture);  // in all processes alike; not during a step

 private:
  [[nodiscard]] std::optional<std::string> find_refusal(const Graph& graph) const;
  void agree(const Graph& graph);

  const nccl::CallOptions calls_;
  nccl::NcclLinks& links_;  // those of the base
};

}  // namespace stepgraph
