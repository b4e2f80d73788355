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
#include "engine/run/peers.hpp"
#include "engine/run/recorder.hpp"
#include "engine/run/runnable_graph.hpp"
#include "engine/run/world.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/step/training_step.hpp"
#include "graphs/train/stored_values.hpp"

namespace stepgraph {

struct RunOptions {
  int threads = 0;                             // 0: as many as the machine has cores
  std::chrono::milliseconds step_timeout{0};   // 0: no limit
  std::chrono::milliseconds stall_timeout{0};  // ExecutorOptions::stall_timeout
  Reuse reuse            = Reuse::tight;
  const Machine* machine = nullptr;  // of an Evaluator or Generator: StepOptions::machine
  MakeStorage storage    = {};       // of buffers on disk; needed where the step has some
};

// Throws if a layout has more or fewer ranks than the world.
void require_ranks(const Layout& layout, const World& world);

// A buffer of a second graph that uses the bytes of a buffer of the step.
struct SameBytes {
  Buffer here    = {};
  Buffer of_step = {};  // persistent
};

// A step, and what it runs with: for reports about a run.
struct StepView {
  const StepGraph& step;
  const RunnableGraph& runnable;
  const Memory& memory;
  Peers* peers = nullptr;
};

// A step graph that is proved, has its memory planned and can run many times. Tensors are set and read under the names
// that Hugging Face folders use. The world must outlive it. One thread at a time.
//
// In a world of several processes each process has the step of its own ranks (StepOptions::only). Functions that are
// "collective" are then called by all processes, in the same order.
class StepRun {
 public:
  StepRun(StepGraph step, World& world, const RunOptions& options = {});  // collective; throws what `verify` throws
  // A step of the same model and plan that uses the bytes of the other step's weights, and its threads. It runs between
  // runs of the other, which it flushes, and must not outlive it.
  StepRun(StepGraph step, const StepRun& owner, const RunOptions& options = {});

  [[nodiscard]] const StepGraph& step() const noexcept { return step_; }
  // The step with the edges that it runs with, and its memory plan: for write_dot, write_trace, summarize, simulate.
  [[nodiscard]] const RunnableGraph& runnable() const noexcept { return runnable_; }
  [[nodiscard]] const MemoryPlan& plan() const noexcept { return *runnable_.memory(); }
  [[nodiscard]] Memory& memory() const noexcept { return program_->memory(); }
  // Elements of weights and optimizer states, also of offloaded ones.
  [[nodiscard]] StoredValues& values() const noexcept { return *values_; }
  [[nodiscard]] const Program& program() const noexcept { return *program_; }
  [[nodiscard]] int threads() const noexcept { return executor_->threads(); }
  [[nodiscard]] const World& world() const noexcept { return *world_; }
  // The processes of the world; null: this process has all ranks.
  [[nodiscard]] Peers* peers() const noexcept { return peers_; }
  [[nodiscard]] bool is_first() const noexcept;  // process 0
  [[nodiscard]] StepView view() const noexcept { return {step_, runnable_, memory(), peers_}; }

  // `fill` is called once for each tensor that a rank of this process has a piece of, with room for all elements of the
  // tensor. Every rank gets its shard.
  using FillTensor =
      std::function<void(const std::string& name, const TensorShape& shape, const Init& init, std::span<double>)>;
  // After a run that has failed (require_intact) it also sets optimizer states and the number of updates to zero.
  void set_weights(const FillTensor& fill);
  [[nodiscard]] bool has_weights() const noexcept { return has_weights_; }  // set_weights was called; else all are zero
  // Callers that write weights and optimizer states to values() call the first function before, which is flush(), and
  // the second one when they have written all of them. The first is collective.
  void prepare_to_set();
  void set_has_weights() noexcept;
  // A tensor of the model, collected from the ranks that have its shards. Collective: process 0 passes room for all
  // elements, the other processes pass none. If one process fails, process 0 throws too, and calls can go on.
  enum class Which : std::uint8_t { value, gradient };  // gradient: of the last run; the step must keep gradients
  void read_tensor(Which which, const std::string& name, std::span<float> out) const;
  void read_tensor(Which which, const std::string& name, std::span<double> out) const;

  // global * seq + 1 tokens, the same in all processes: inputs are all but the last, targets all but the first.
  void set_tokens(std::span<const std::int32_t> tokens);
  // global * seq of both. Targets that are -1 do not count: the loss is the mean over the others, and 0 without any.
  void set_tokens(std::span<const std::int32_t> inputs, std::span<const std::int32_t> targets);
  [[nodiscard]] std::int64_t num_counted() const noexcept { return num_counted_; }  // targets that count
  // Collective: if the run of one process fails, all processes throw.
  void run(Recorder* recorder = nullptr);
  // With StepOptions::update_first: does the update of the last run, which the next run would do. After it, weights and
  // optimizer states are those of a step that updates at its end. Does nothing when nothing is left. Collective.
  // Functions that read or set weights call it, and so do runs of graphs beside the step. Callers that use memory()
  // for weights or optimizer states call it before.
  void flush() const;

  // A run or flush() of a training step with offload has failed: transfers that were under way may have written old or
  // unfinished bytes into weights and states. Or an asynchronous window has failed: its updates have changed some
  // states, but not the weights. Functions that run the step or read its weights then throw Error(run), until weights
  // are set or a checkpoint is loaded. The same in all processes.
  void require_intact() const;

  // With a delayed update (UpdatePlan::delays): sets of gradients that wait for their update; and drops them, as
  // setting weights does.
  [[nodiscard]] int num_waiting() const;
  void drop_waiting();

  // Of the last run, in every process. With a delayed update the norm is that of the run before it, and NaN if there is
  // none.
  [[nodiscard]] double loss() const;
  [[nodiscard]] double grad_norm() const;  // a training step's
  [[nodiscard]] bool skipped() const;      // its gradients overflowed with the loss scale
  // The loss scale of the last run, where the step scales. read_tensor divides gradients by it.
  [[nodiscard]] std::optional<double> loss_scale() const noexcept { return loss_scale_; }

  // A second graph of the same ranks, to run between steps: proved and planned as the step was. Buffers in `same` use
  // the step's bytes. Must not outlive this run. Both are collective.
  [[nodiscard]] Program beside(const Graph& graph, std::span<const SameBytes> same) const;
  [[nodiscard]] Program beside(const RunnableGraph& runnable, std::span<const SameBytes> same) const;
  void run(const Program& program);
  // The same for an asynchronous window of another length than the step's own. If it fails, so has a run of the step.
  void run_window(const Program& program, Recorder* recorder = nullptr);

 private:
  struct Holder {  // a rank that has a piece of a tensor, or a shard of the piece
    Rank rank;
    const StepWeight* weight;
    TpPiece piece;
  };
  // What a run has computed, as all processes know it.
  struct Outcome {
    double loss = 0, grad_norm = 0;
    bool has_loss = false, skipped = false;
    int failed_in  = -1;  // the first process whose run has failed; -1: none
    ErrorKind kind = ErrorKind::run;
  };
  StepRun(StepGraph step, World& world, const RunOptions& options, const StepRun* owner);
  void set_nothing_left() const;
  void prepare_run();
  void run_prepared(Recorder* recorder);
  void clear_states();
  void note_failure(const Error& error) const;
  void execute(const Program& program, Recorder* recorder = nullptr) const;
  [[nodiscard]] std::unique_ptr<Program> make_program(const StepRun* owner, const MakeStorage& make);
  [[nodiscard]] std::shared_ptr<Memory> memory_beside(const StepRun& owner, const MakeStorage& make) const;
  template <class T, class Give>
  void read_here(Which which, const std::string& name, const Give& give) const;
  template <class T>
  void read(Which which, const std::string& name, std::span<T> out) const;
  void find_holders();
  [[nodiscard]] StoredRange stored(Which which, const StepWeight& weight) const;
  [[nodiscard]] Outcome local_outcome() const;
  void share_outcome(Outcome outcome, const std::optional<Error>& error);

  StepGraph step_;
  World* world_;
  Peers* peers_;
  RunnableGraph runnable_;
  bool has_weights_                 = false;
  std::int64_t num_counted_         = 0;
  std::optional<double> loss_scale_ = {};
  const StepRun* owner_             = nullptr;          // whose weights it uses
  std::optional<Outcome> outcome_   = {};               // with peers
  ParameterInventory parameters_;                       // of the model
  std::map<std::string, std::vector<Holder>> holders_;  // by tensor, in rank order; ranks of this process
  std::unique_ptr<Program> program_;
  std::unique_ptr<StoredValues> values_;
  std::shared_ptr<Executor> executor_;  // the owner's, where there is one with enough threads
  ExecutorOptions options_;
  mutable bool update_left_ = false;          // the last run's
  mutable std::string failure_;               // why weights and states may be wrong; empty: they are not
  mutable std::unique_ptr<Program> updates_;  // of update_left_; made when it is first needed
};

}  // namespace stepgraph
