#include "graphs/train/step_run.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/run/host_memory_error.hpp"
#include "engine/run/packed.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/models/parallel_ranges.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/train/checkpoint/tensor_assembly.hpp"
#include "ops/layers/cross_entropy.hpp"

namespace stepgraph {
namespace {

// Memory for elements of any type, used again and again: new pages for each tensor would cost more than its elements.
// Its elements are not set, so that the threads that set them also get their pages.
class Room {
 public:
  template <class T>
  [[nodiscard]] std::span<T> of(std::size_t size) {
    if (size_ < size * sizeof(T)) {
      bytes_.reset();
      size_  = size * sizeof(T);
      bytes_ = std::make_unique_for_overwrite<std::byte[]>(size_);
    }
    return {reinterpret_cast<T*>(bytes_.get()), size};
  }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  std::size_t size_ = 0;
};

}  // namespace

void require_ranks(const Layout& layout, const World& world) {
  const int wanted = layout.num_ranks();
  if (world.num_ranks() == wanted) return;
  throw Error(ErrorKind::config, str("step: the layout has ", wanted, wanted == 1 ? " rank" : " ranks",
                                     ", but the world has ", world.num_ranks()));
}

namespace {

// The step has the ranks of this process, and there is a way to the others.
void check_ranks(const StepGraph& step, World& world) {
  const int wanted = step.layout.num_ranks();
  require_ranks(step.layout, world);
  if (step.graph.ranks() != world.local_ranks())
    throw Error(ErrorKind::config, str("step: holds ", step.graph.ranks().size(), " of ", wanted,
                                       " ranks, but others than the ", world.local_ranks().size(),
                                       " that live in this process (StepOptions::only = world.local_ranks())"));
  if (std::ssize(step.graph.ranks()) < wanted && world.peers() == nullptr)
    throw Error(ErrorKind::config,
                "step: some ranks live in other processes, and the world cannot exchange host data with them "
                "(World::peers)");
}

}  // namespace

StepRun::StepRun(StepGraph step, World& world, const RunOptions& options)
    : StepRun(std::move(step), world, options, nullptr) {}

StepRun::StepRun(StepGraph step, const StepRun& owner, const RunOptions& options)
    : StepRun(std::move(step), *owner.world_, options, &owner) {}

StepRun::StepRun(StepGraph step, World& world, const RunOptions& options, const StepRun* owner)
    : step_(std::move(step)),
      world_(&world),
      peers_(world.peers()),
      runnable_((check_ranks(step_, world), step_.graph), world, {.reuse = options.reuse}) {
  verify(runnable_);
  program_          = make_program(owner, options.storage);
  values_           = std::make_unique<StoredValues>(step_, memory());
  options_          = {.threads       = options.threads,
                       .waiting_lanes = static_cast<int>(program_->num_waiting_lanes()),
                       .step_timeout  = options.step_timeout,
                       .stall_timeout = options.stall_timeout};
  const bool shares = owner != nullptr && owner->executor_->waiting_lanes() >= options_.waiting_lanes;
  executor_         = shares ? owner->executor_ : std::make_shared<Executor>(options_);
  has_weights_      = owner != nullptr;
  owner_            = owner;
  find_holders();
  for (const StepRank& rank : step_.ranks) {
    if (rank.loss_scale != Buffer{}) memory().set_first(rank.loss_scale, step_.precision.loss_scale.value);
  }
  drop_waiting();
}

void StepRun::drop_waiting() {
  constexpr double empty = std::numeric_limits<double>::quiet_NaN();
  for (const StepRank& rank : step_.ranks) {
    for (std::size_t age = 0; age < rank.sets.size(); ++age) {
      const GradientSet& set = rank.sets[age];
      if (age > 0 && set.scale != Buffer{}) memory().set_first(set.scale, empty);
      if (set.factor != Buffer{}) memory().set_first(set.factor, empty);
      // Without loss scaling nothing else writes it.
      if (age == 0 && set.scale != Buffer{} && rank.loss_scale == Buffer{}) memory().set_first(set.scale, 1.0);
    }
  }
}

int StepRun::num_waiting() const {
  int waiting = 0;
  for (const GradientSet& set : step_.ranks.front().sets) {
    const bool of_earlier = &set != &step_.ranks.front().sets.front();
    waiting += of_earlier && !std::isnan(memory().first<double>(set.scale));
  }
  return waiting;
}

std::unique_ptr<Program> StepRun::make_program(const StepRun* owner, const MakeStorage& make) {
  try {
    std::shared_ptr<Memory> beside = owner == nullptr ? nullptr : memory_beside(*owner, make);
    return std::make_unique<Program>(runnable_, *world_, std::move(beside), make);
  } catch (const HostMemoryError& error) {
    const auto& arenas = runnable_.memory()->arenas;
    const auto any_of  = [&](Space space) {
      return std::ranges::any_of(arenas, [&](const ArenaPlan& arena) { return arena.space == space; });
    };
    const bool only_host = any_of(Space::pinned) && !any_of(Space::disk);
    if (!only_host) throw;
    throw Error(error.kind(), str(error.what(),
                                  " (offload.disk=FOLDER with offload.host_bytes, such as \"16GiB\": the "
                                  "rest of what is offloaded then lies on disk)"));
  }
}

// The same plan gives both steps the same buffers of values.
std::shared_ptr<Memory> StepRun::memory_beside(const StepRun& owner, const MakeStorage& make) const {
  std::vector<Loan> loans;
  std::set<std::uint32_t> seen;  // weights of a unit share a buffer, and so do tied weights
  for (std::size_t place = 0; place < step_.ranks.size(); ++place) {
    const auto& mine   = step_.ranks[place].weights;
    const auto& theirs = owner.step_.ranks[place].weights;
    const auto same    = [&](const StoredRange& a, const StoredRange& b) {
      if (a.begin != b.begin || a.end != b.end || a.offset != b.offset) return false;
      if (a.empty()) return true;
      const BufferSpec &here = step_.graph.spec(a.buffer), &there = owner.step_.graph.spec(b.buffer);
      return here.size_bytes == there.size_bytes && here.space == there.space;
    };
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (mine.size() != theirs.size() || mine[i].block != theirs[i].block || mine[i].number != theirs[i].number ||
          !same(mine[i].value, theirs[i].value))
        throw Error(ErrorKind::config,
                    "step: the weights of the other step are stored otherwise (the same model and "
                    "plan)");
      const Buffer here = mine[i].value.buffer;
      if (mine[i].value.empty() || !seen.insert(here.id).second) continue;
      loans.push_back(owner.memory().loan(theirs[i].value.buffer, here));
    }
  }
  return std::make_shared<Memory>(step_.graph, *runnable_.memory(), loans, owner.memory().device(), make);
}

bool StepRun::is_first() const noexcept { return peers_ == nullptr || peers_->process() == 0; }

void StepRun::find_holders() {
  parameters_  = step_.model.parameters();
  const int tp = step_.layout.degree(Axis::tp);
  std::map<std::tuple<std::size_t, std::size_t, int>, std::vector<TpPiece>> pieces;  // by block, weight and tp index
  for (std::size_t r = 0; r < step_.ranks.size(); ++r) {
    const int tp_index = step_.ranks[r].coord.tp;
    for (const StepWeight& weight : step_.ranks[r].weights) {
      const auto [found, fresh] = pieces.try_emplace({weight.block, weight.number, tp_index});
      if (fresh) found->second = tp_pieces(step_.spec(weight), tp, tp_index);  // of a tied weight: its owner's
      for (const TpPiece& piece : found->second)
        holders_[piece.tensor].push_back({step_.ranks.ranks()[r], &weight, piece});
    }
  }
}

void StepRun::prepare_to_set() { failure_.empty() ? flush() : set_nothing_left(); }

void StepRun::set_has_weights() noexcept {
  has_weights_ = true;
  failure_.clear();
}

void StepRun::clear_states() {
  for (const StepRank& rank : step_.ranks) {
    for (const StepWeight& weight : rank.weights) {
      for (const StoredRange& part : {weight.first, weight.second}) {
        if (part.empty()) continue;
        dispatch_float(step_.element_type(part.buffer), [&]<class T>(T) {
          const std::vector<T> zeros(static_cast<std::size_t>(part.size()));
          values().write(part.buffer, std::span<const T>(zeros), part.offset);
        });
      }
    }
    memory().set_first(rank.num_updates, std::int64_t{0});
  }
}

void StepRun::set_weights(const FillTensor& fill) {
  prepare_to_set();
  if (!failure_.empty()) clear_states();
  drop_waiting();
  has_weights_ = true;
  Room whole_room, local_room;
  const int tp = step_.layout.degree(Axis::tp), threads = executor_->threads();
  for (const Parameter& parameter : parameters_.parameters()) {
    const auto held = holders_.find(parameter.name);
    if (held == holders_.end()) continue;  // other processes have it
    const auto whole = whole_room.of<double>(static_cast<std::size_t>(parameter.num_elements()));
    for_ranges(std::ssize(whole), threads, [&](std::int64_t begin, std::int64_t end) {
      std::fill(whole.begin() + begin, whole.begin() + end, 0.0);
    });
    const std::vector<Holder>& all = held->second;
    fill(parameter.name, parameter.shape, step_.spec(*all.front().weight).init, whole);
    const auto set = [&](DType type, StoredRange StepWeight::*which) {
      dispatch_float(type, [&]<class T>(T) {
        for (const Holder& holder : all) {
          const StoredRange& part = holder.weight->*which;
          if (part.empty()) continue;
          const WeightSpec& spec         = step_.spec(*holder.weight);
          const auto elements            = num_elements(local_shape(spec, tp, step_.layout.coord(holder.rank).tp));
          const std::span<std::byte> own = values().in_place(part.buffer);
          const std::span<T> local       = own.empty()
                                               ? local_room.of<T>(static_cast<std::size_t>(part.size()))
                                               : std::span(reinterpret_cast<T*>(own.data()) + part.offset, part.size());
          // Elements of other pieces stay as they are.
          if (own.empty() && spec.sections.size() > 1) values().read(part.buffer, local, part.offset);
          for_ranges(part.size(), threads, [&](std::int64_t begin, std::int64_t end) {
            round_piece<T>(spec, holder.piece, whole, elements, part.begin + begin,
                           local.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
          });
          if (own.empty()) values().write(part.buffer, std::span<const T>(local), part.offset);
        }
      });
    };
    const DType type = step_.value_type(step_.spec(*all.front().weight));
    set(type, &StepWeight::value);
    if (wide_type(type) != type) set(wide_type(type), &StepWeight::master);
  }
  values().flush();
  set_has_weights();
}

// Where a weight, or its gradient, is read. The master where there is one: training continues with it, not with the
// rounded value.
StoredRange StepRun::stored(Which which, const StepWeight& weight) const {
  if (which == Which::gradient) return weight.gradient;
  const DType type  = step_.value_type(step_.spec(weight));
  const bool trains = step_.ranks.front().grad_norm != Buffer{};
  return trains && wide_type(type) != type ? weight.master : weight.value;
}

// Calls `give` for the elements that ranks of this process give. Each element is given by one rank: the first
// data-parallel rank that has it, and the first of the ranks that hold the same piece.
template <class T, class Give>
void StepRun::read_here(Which which, const std::string& name, const Give& give) const {
  const double scale = which == Which::gradient ? loss_scale_.value_or(1) : 1;
  const auto held    = holders_.find(name);
  if (held == holders_.end()) return;  // other processes have it
  for (const Holder& holder : held->second) {
    const StoredRange part = stored(which, *holder.weight);
    const int num_givers   = part.sharded ? step_.shard_size : 1;
    if (holder.weight->tied || !holder.piece.first_holder || part.empty() ||
        step_.layout.coord(holder.rank).dp >= num_givers)
      continue;
    std::vector<T> values(static_cast<std::size_t>(part.size()));
    dispatch_float(step_.element_type(part.buffer), [&]<class Stored>(Stored) {
      std::vector<Stored> as_stored(values.size());
      values_->read(part.buffer, std::span(as_stored), part.offset);
      std::transform(as_stored.begin(), as_stored.end(), values.begin(),
                     [scale](Stored value) { return static_cast<T>(static_cast<double>(wide(value)) / scale); });
    });
    give(holder, part.begin, std::span<const T>(values));
  }
}

// A process that cannot give its elements takes part in the gathering, so that the calls of all processes stay in step.
template <class T>
void StepRun::read(Which which, const std::string& name, std::span<T> out) const {
  if (which == Which::value) (owner_ == nullptr ? this : owner_)->flush();
  const Parameter& parameter = parameters_.find(name);  // throws in all processes, or in none
  const auto wanted          = is_first() ? static_cast<std::size_t>(parameter.num_elements()) : 0;
  TensorAssembly<T> tensor(step_, name, out);
  Packer sent;
  sent.add(true);  // has not failed
  std::optional<Error> error;
  try {
    if (owner_ != nullptr) values_->flush();  // the owner may have run since
    if (out.size() != wanted)
      throw Error(ErrorKind::config, str("tensor '", name, "': a span of ", out.size(), " elements (",
                                         is_first() ? "the tensor has " : "only process 0 gets it: ", wanted, ")"));
    read_here<T>(which, name, [&](const Holder& holder, std::int64_t begin, std::span<const T> values) {
      if (is_first()) {
        tensor.put(holder.rank, holder.weight->block, holder.weight->number, begin, values);
      } else {
        sent.add(TensorStretch{.rank   = index(holder.rank),
                               .block  = static_cast<std::uint32_t>(holder.weight->block),
                               .number = static_cast<std::uint32_t>(holder.weight->number),
                               .begin  = begin});
        sent.add_list(values);
      }
    });
  } catch (const Error& caught) {
    if (peers_ == nullptr) throw;
    error = caught;
  }
  if (peers_ != nullptr) {
    Bytes bytes = error ? Packer().add(false).add(error->kind()).add_text(error->what()).take() : sent.take();
    const std::vector<Bytes> all = peers_->gather(str("tensor '", name, "'"), std::move(bytes));
    if (error) throw *error;
    for (std::size_t process = 0; process < all.size(); ++process) {
      Unpacker received(all[process]);
      if (!received.get<bool>()) {
        const auto kind = received.get<ErrorKind>();
        throw Error(kind, str("process ", process, ": ", received.get_text()));
      }
      while (!received.empty()) {
        const auto place            = received.get<TensorStretch>();
        const std::vector<T> values = received.get_list<T>();
        tensor.put(Rank{place.rank}, place.block, place.number, place.begin, values);
      }
    }
  }
  tensor.finish();
}

void StepRun::read_tensor(Which which, const std::string& name, std::span<float> out) const { read(which, name, out); }
void StepRun::read_tensor(Which which, const std::string& name, std::span<double> out) const { read(which, name, out); }

void StepRun::set_tokens(std::span<const std::int32_t> tokens) {
  const BatchSpec& batch = step_.batch;
  const auto wanted      = static_cast<std::size_t>(batch.global) * static_cast<std::size_t>(batch.seq) + 1;
  if (tokens.size() != wanted) {
    throw Error(ErrorKind::config, str("step: ", tokens.size(), " tokens given (", wanted, ": ", batch.global,
                                       " sequences of ", batch.seq, " and one more token)"));
  }
  set_tokens(tokens.first(wanted - 1), tokens.last(wanted - 1));
}

void StepRun::set_tokens(std::span<const std::int32_t> inputs, std::span<const std::int32_t> targets) {
  const BatchSpec& batch = step_.batch;
  const auto wanted      = static_cast<std::size_t>(batch.global) * static_cast<std::size_t>(batch.seq);
  if (inputs.size() != wanted || targets.size() != wanted) {
    throw Error(ErrorKind::config, str("step: ", inputs.size(), " inputs and ", targets.size(), " targets given (",
                                       wanted, " of both: ", batch.global, " sequences of ", batch.seq, ")"));
  }
  const std::int64_t num_ignored = std::ranges::count(targets, ignored_target);
  num_counted_                   = std::ssize(targets) - num_ignored;
  const std::size_t rows         = static_cast<std::size_t>(batch.micro) * static_cast<std::size_t>(batch.seq);
  const std::size_t per_rank     = rows * static_cast<std::size_t>(step_.num_microbatches);
  for (const StepRank& rank : step_.ranks) {
    const auto fill = [&](const std::vector<Buffer>& buffers, std::span<const std::int32_t> tokens) {
      for (std::size_t mb = 0; mb < buffers.size(); ++mb) {
        const std::size_t begin = static_cast<std::size_t>(rank.coord.dp) * per_rank + mb * rows;
        memory().write(buffers[mb], tokens.subspan(begin, rows));
      }
    };
    fill(rank.tokens, inputs);
    fill(rank.targets, targets);
    if (rank.num_ignored != Buffer{}) memory().set_first(rank.num_ignored, num_ignored);
  }
}

// An update with a clip factor that is not a number changes nothing.
void StepRun::set_nothing_left() const {
  update_left_ = false;
  if (!step_.update_first) return;
  for (const StepRank& rank : step_.ranks) memory().set_first(rank.factor, std::numeric_limits<double>::quiet_NaN());
}

void StepRun::require_intact() const {
  if (failure_.empty()) return;
  throw Error(ErrorKind::run, str("step: weights and optimizer states may be wrong, because a run has failed: ",
                                  failure_, " (load a checkpoint, or set the weights)"));
}

// The updates of an asynchronous window change optimizer states at once, and the weights at its end.
void StepRun::note_failure(const Error& error) const {
  const bool trains = step_.ranks.front().grad_norm != Buffer{};
  if (trains && (!step_.homes.empty() || !step_.window.empty())) failure_ = error.what();
}

void StepRun::flush() const {
  require_intact();
  if (!update_left_) return;
  if (!updates_) {
    std::unique_ptr<Program> made;
    in_all(peers_, "the program of the update that was left", [&] {
      const StepGraph updates = updates_of(step_);
      const RunnableGraph runnable(updates.graph, *world_, {.reuse = plan().reuse});
      verify(runnable);
      made = std::make_unique<Program>(runnable, *world_,
                                       std::make_shared<Memory>(updates.graph, *runnable.memory(), memory()));
    });
    updates_ = std::move(made);  // all processes have it, or none
  }
  update_left_ = false;  // if this fails, some weights have it: it must not be repeated
  try {
    in_all(peers_, "the update that was left", [&] {
      execute(*updates_);
      set_nothing_left();
    });
  } catch (const Error& error) {
    note_failure(error);
    throw;
  }
}

void StepRun::prepare_run() {
  values_->flush();
  if (!update_left_) set_nothing_left();
  update_left_       = false;  // if this run fails, it may have updated some weights
  const Buffer scale = step_.ranks.front().loss_scale;
  if (scale != Buffer{}) loss_scale_ = memory().first<double>(scale);
  outcome_.reset();  // if this run fails, the results of the run before are not those of the last run
}

void StepRun::run(Recorder* recorder) {
  if (owner_ != nullptr) owner_->flush();
  require_intact();
  if (peers_ == nullptr) prepare_run();  // nothing has changed if it fails
  try {
    run_prepared(recorder);
  } catch (const Error& error) {
    note_failure(error);
    throw;
  }
  update_left_ = step_.update_first;
}

void StepRun::run_prepared(Recorder* recorder) {
  if (peers_ == nullptr) return executor_->run(*program_, recorder);
  Outcome mine;
  std::optional<Error> error;
  try {
    prepare_run();
    executor_->run(*program_, recorder);
    mine = local_outcome();
  } catch (const Error& caught) {
    error = caught;
    mine  = {.failed_in = peers_->process(), .kind = caught.kind()};
  }
  try {
    share_outcome(mine, error);
  } catch (const Error&) {
    if (!error) throw;
  }
  if (error) throw *error;
}

StepRun::Outcome StepRun::local_outcome() const {
  Outcome found;
  for (const StepRank& rank : step_.ranks) {
    if (rank.loss == Buffer{}) continue;
    found.loss     = memory().first<double>(rank.loss);
    found.has_loss = true;
    break;
  }
  const StepRank& first = step_.ranks.front();
  if (first.grad_norm != Buffer{}) found.grad_norm = memory().first<double>(first.grad_norm);
  found.skipped = first.skipped != Buffer{} && memory().first<std::int64_t>(first.skipped) != 0;
  return found;
}

// All ranks of the last stage have the loss, and all ranks the norm: what the lowest rank has is told to all. A process
// whose run has failed takes part too: other processes, whose runs have ended well, wait here. Their error is the first
// one of the processes that failed.
void StepRun::share_outcome(Outcome outcome, const std::optional<Error>& error) {
  std::string why = error ? error->what() : "";
  for (const Bytes& bytes : peers_->gather("results of a step", Packer().add(outcome).add_text(why).take())) {
    Unpacker received(bytes);
    const auto other = received.get<Outcome>();
    if (outcome.failed_in < 0 && other.failed_in >= 0) {
      outcome.failed_in = other.failed_in;
      outcome.kind      = other.kind;
      why               = received.get_text();
    }
    if (outcome.has_loss || !other.has_loss) continue;
    outcome.loss     = other.loss;
    outcome.has_loss = true;
  }
  const Bytes told =
      peers_->broadcast("results of a step", is_first() ? Packer().add(outcome).add_text(why).take() : Bytes());
  Unpacker received(told);
  outcome = received.get<Outcome>();
  if (outcome.failed_in < 0) {
    outcome_ = outcome;
  } else if (!error) {
    throw Error(outcome.kind, str("step: failed in process ", outcome.failed_in, ": ", received.get_text()));
  }
}

Program StepRun::beside(const Graph& graph, std::span<const SameBytes> same) const {
  return beside(RunnableGraph(graph, *world_, {.reuse = plan().reuse}), same);
}

Program StepRun::beside(const RunnableGraph& runnable, std::span<const SameBytes> same) const {
  std::vector<Loan> loans;
  for (const SameBytes& each : same) loans.push_back(memory().loan(each.of_step, each.here));
  verify(runnable);
  return Program(runnable, *world_,
                 std::make_shared<Memory>(runnable.graph(), *runnable.memory(), loans, memory().device()));
}

void StepRun::run(const Program& program) {
  flush();
  execute(program);
}

void StepRun::run_window(const Program& program, Recorder* recorder) {
  flush();
  try {
    execute(program, recorder);
  } catch (const Error& error) {
    note_failure(error);
    throw;
  }
}

void StepRun::execute(const Program& program, Recorder* recorder) const {
  values_->flush();
  const int lanes = static_cast<int>(program.num_waiting_lanes());
  if (lanes <= executor_->waiting_lanes()) return executor_->run(program, recorder);
  ExecutorOptions more = options_;
  more.waiting_lanes   = lanes;
  Executor(more).run(program, recorder);
}

double StepRun::loss() const {
  const Outcome last = outcome_ ? *outcome_ : local_outcome();
  if (!last.has_loss) throw Error(ErrorKind::config, "step: computes no loss");
  return last.loss;
}

double StepRun::grad_norm() const { return outcome_ ? outcome_->grad_norm : local_outcome().grad_norm; }
bool StepRun::skipped() const { return outcome_ ? outcome_->skipped : local_outcome().skipped; }

}  // namespace stepgraph
