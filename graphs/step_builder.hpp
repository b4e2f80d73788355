#pragma once
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "graphs/step_setup.hpp"
#include "ops/tape.hpp"

// Builds the nodes of one rank of a step: internal to graphs/. Ranks are built one after another, each from its own row
// of the schedule, so a slice is built alone at its own cost.
namespace stepgraph {

class StepBuilder {
 public:
  StepBuilder(StepSetup& setup, Rank rank);

  void training();
  void forward_only(ForwardResult result);

 private:
  using Key = std::pair<int, int>;  // stage, microbatch
  struct Work {                     // one stage and microbatch under way
    std::unique_ptr<Tape> tape;
    Tensor input, output;  // on the tape; the last stage has no output
  };

  void declare_inputs(bool trains, ForwardResult result);
  void declare_weights(bool trains);
  void act(const Action& action, ForwardResult result);

  void forward(const Action& action, ForwardResult result);
  void loss_of(Tape& tape, const Tensor& logits, int microbatch, ForwardResult result);
  void begin_backward(const Action& action);
  void transfer(const Action& action);
  void reduce_gradients(Stage stage);
  void reduce_gradient(StepWeight& weight, const Labels& labels);
  void sum_losses();

  void join_tied_weights();
  void add_norm();
  void add_updates();

  [[nodiscard]] Graph& graph() { return setup_.step.graph; }
  [[nodiscard]] StepRank& here() { return setup_.step.ranks[static_cast<std::size_t>(index(rank_))]; }
  [[nodiscard]] Key key(const Action& action) const { return {index(action.stage), index(action.microbatch)}; }
  [[nodiscard]] bool has(Stage stage) const { return setup_.rank_of(stage, coord_) == rank_; }
  [[nodiscard]] DType sum_type() const { return wide_type(setup_.step.type); }  // of gradients of weights
  [[nodiscard]] bool keeps_rounded_gradients() const {  // as they travelled between data-parallel ranks
    return setup_.plan.precision.keep_low_precision_grads && setup_.plan.layout.dp > 1;
  }
  [[nodiscard]] DType type_of(Buffer buffer) const { return setup_.step.graph.spec(buffer).type; }
  [[nodiscard]] Stage last_stage() const { return Stage{setup_.num_stages() - 1}; }
  Buffer make(std::string name, std::int64_t elements, DType type, Lifetime lifetime);
  void all_reduce_part(const std::string& name, Group group, int members, const Access& bytes, DType type,
                       LaneKind lane, const Labels& labels);

  StepSetup& setup_;
  Rank rank_;
  Coord coord_;
  TensorParallel tp_;
  WeightTable table_;
  std::map<Key, Work> work_;
  std::map<Key, Buffer> received_, received_gradient_;
  Buffer losses_, squares_, factor_;
};

}  // namespace stepgraph
