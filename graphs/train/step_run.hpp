#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/plan/memory_plan.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/recorder.hpp"
#include "engine/run/runnable_graph.hpp"
#include "engine/run/world.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/step/training_step.hpp"

namespace stepgraph {

struct RunOptions {
  int threads = 0;                            // 0: as many as the machine has cores
  std::chrono::milliseconds step_timeout{0};  // 0: no limit
  Reuse reuse            = Reuse::tight;
  const Machine* machine = nullptr;  // of an Evaluator or Generator: StepOptions::machine
};

// A buffer of a second graph that uses the bytes of a buffer of the step.
struct SameBytes {
  Buffer here    = {};
  Buffer of_step = {};  // persistent
};

// A step graph that is proved, has its memory planned and can run many times, on a world with all ranks in this
// process. Tensors are set and read under the names that checkpoints use. The world must outlive it. One thread at a
// time.
class StepRun {
 public:
  StepRun(StepGraph step, World& world, const RunOptions& options = {});  // throws what `verify` throws

  [[nodiscard]] const StepGraph& step() const noexcept { return step_; }
  // The step with the edges that it runs with, and its memory plan: for write_dot, write_trace, summarize, simulate.
  [[nodiscard]] const RunnableGraph& runnable() const noexcept { return runnable_; }
  [[nodiscard]] const MemoryPlan& plan() const noexcept { return *runnable_.memory(); }
  [[nodiscard]] Memory& memory() const noexcept { return program_->memory(); }
  [[nodiscard]] const Program& program() const noexcept { return *program_; }
  [[nodiscard]] int threads() const noexcept { return executor_->threads(); }

  // `fill` is called once for each tensor of the model, with room for all of its elements. Every rank gets its shard.
  using FillTensor =
      std::function<void(const std::string& name, const TensorShape& shape, const Init& init, std::span<double>)>;
  void set_weights(const FillTensor& fill);
  [[nodiscard]] bool has_weights() const noexcept { return has_weights_; }  // set_weights was called; else all are zero
  // A tensor of the model, collected from the ranks that have its shards.
  enum class Which : std::uint8_t { value, gradient };  // gradient: of the last run; the step must keep gradients
  void read_tensor(Which which, const std::string& name, std::span<float> out) const;
  void read_tensor(Which which, const std::string& name, std::span<double> out) const;

  // global * seq + 1 tokens: inputs are all but the last, targets all but the first.
  void set_tokens(std::span<const std::int32_t> tokens);
  void run(Recorder* recorder = nullptr);

  [[nodiscard]] double loss() const;  // of the last run
  // The loss scale of the last run, where the step scales. read_tensor divides gradients by it.
  [[nodiscard]] std::optional<double> loss_scale() const noexcept { return loss_scale_; }

  // A second graph of the same ranks, to run between steps: proved and planned as the step was. Buffers in `same` use
  // the step's bytes. Must not outlive this run.
  [[nodiscard]] Program beside(const Graph& graph, std::span<const SameBytes> same) const;
  void run(const Program& program);

 private:
  struct Holder {  // a rank that has a piece of a tensor, or a shard of the piece
    Rank rank;
    const StepWeight* weight;
    TpPiece piece;
  };
  template <class T>
  void read(Which which, const std::string& name, std::span<T> out) const;
  void find_holders();
  [[nodiscard]] std::vector<StoredRange> parts_of(const Holder& holder, StoredRange StepWeight::*which) const;

  StepGraph step_;
  World* world_;
  RunnableGraph runnable_;
  bool has_weights_                 = false;
  std::optional<double> loss_scale_ = {};
  std::map<std::string, std::vector<Holder>> holders_;  // by tensor, in rank order
  std::unique_ptr<Program> program_;
  std::unique_ptr<Executor> executor_;
  std::chrono::milliseconds step_timeout_{0};
};

}  // namespace stepgraph
