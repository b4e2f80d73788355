#include "graphs/train/step_run.hpp"

#include <algorithm>
#include <tuple>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/models/parallel_ranges.hpp"
#include "graphs/models/weights.hpp"

namespace stepgraph {
namespace {

template <class T>
std::vector<T> rounded(const std::vector<double>& values, int threads) {
  std::vector<T> made(values.size());
  for_ranges(std::ssize(values), threads, [&](std::int64_t begin, std::int64_t end) {
    std::transform(values.begin() + begin, values.begin() + end, made.begin() + begin,
                   [](double value) { return narrow<T>(static_cast<Wide<T>>(value)); });
  });
  return made;
}

// All ranks of the step live in this process.
void check_ranks(const Layout& layout, const World& world) {
  for (int rank = 0; rank < layout.num_ranks(); ++rank) {
    if (world.num_ranks() != layout.num_ranks() || !world.is_local(Rank{rank})) {
      throw Error(
          ErrorKind::config,
          str("step: needs ", layout.num_ranks(), " ranks in this process, but the world has ", world.num_ranks(),
              world.num_ranks() == layout.num_ranks() ? ", some of them in other processes" : ""));
    }
  }
}

}  // namespace

StepRun::StepRun(StepGraph step, World& world, const RunOptions& options)
    : step_(std::move(step)),
      world_(&world),
      runnable_((check_ranks(step_.layout, world), step_.graph), world, {.reuse = options.reuse}) {
  verify(runnable_);
  program_ = std::make_unique<Program>(runnable_, world);
  executor_ =
      std::make_unique<Executor>(ExecutorOptions{.threads       = options.threads,
                                                 .waiting_lanes = static_cast<int>(program_->num_waiting_lanes()),
                                                 .step_timeout  = options.step_timeout});
  step_timeout_ = options.step_timeout;
  find_holders();
  for (const StepRank& rank : step_.ranks) {
    if (rank.loss_scale != Buffer{}) memory().set_first(rank.loss_scale, step_.precision.loss_scale.value);
  }
}

void StepRun::find_holders() {
  const int tp = step_.layout.degree(Axis::tp);
  std::map<std::tuple<std::size_t, std::size_t, int>, std::vector<TpPiece>> pieces;  // by block, weight and tp index
  for (std::size_t r = 0; r < step_.ranks.size(); ++r) {
    const int tp_index = step_.ranks[r].coord.tp;
    for (const StepWeight& weight : step_.ranks[r].weights) {
      const auto [found, fresh] = pieces.try_emplace({weight.block, weight.number, tp_index});
      if (fresh) found->second = tp_pieces(step_.spec(weight), tp, tp_index);  // of a tied weight: its owner's
      for (const TpPiece& piece : found->second)
        holders_[piece.tensor].push_back({Rank{static_cast<int>(r)}, &weight, piece});
    }
  }
}

// The shards of a holder's weight: its own, and those of other data-parallel ranks.
std::vector<StoredRange> StepRun::parts_of(const Holder& holder, StoredRange StepWeight::*which) const {
  std::vector<StoredRange> parts;
  const auto number = static_cast<std::size_t>(
      holder.weight - step_.ranks[static_cast<std::size_t>(index(holder.rank))].weights.data());
  Coord coord        = step_.layout.coord(holder.rank);
  std::int64_t found = 0;
  const std::int64_t wanted =
      num_elements(local_shape(step_.spec(*holder.weight), step_.layout.degree(Axis::tp), coord.tp));
  for (coord.dp = 0; coord.dp < step_.layout.degree(Axis::dp) && found < wanted; ++coord.dp) {
    const StepRank& rank = step_.ranks[static_cast<std::size_t>(index(step_.layout.rank(coord)))];
    parts.push_back(rank.weights[number].*which);
    found += parts.back().size();
    if (parts.back().empty()) parts.pop_back();
  }
  return parts;
}

void StepRun::set_weights(const FillTensor& fill) {
  has_weights_ = true;
  std::vector<double> whole;
  const int tp                       = step_.layout.degree(Axis::tp);
  const ParameterInventory inventory = step_.model.parameters();
  for (const Parameter& parameter : inventory.parameters()) {
    whole.assign(static_cast<std::size_t>(parameter.num_elements()), 0);
    const std::vector<Holder>& all = holders_.at(parameter.name);
    fill(parameter.name, parameter.shape, step_.spec(*all.front().weight).init, whole);
    const auto set = [&](DType type, StoredRange StepWeight::*which) {
      dispatch_float(type, [&]<class T>(T) {
        const std::vector<T> typed = rounded<T>(whole, executor_->threads());
        std::vector<T> local;
        for (const Holder& holder : all) {
          const StoredRange& part = holder.weight->*which;
          if (part.empty()) continue;
          const WeightSpec& spec = step_.spec(*holder.weight);
          const auto elements    = num_elements(local_shape(spec, tp, step_.layout.coord(holder.rank).tp));
          local.resize(static_cast<std::size_t>(part.size()));
          // Elements of other pieces stay as they are.
          if (spec.sections.size() > 1) memory().read(part.buffer, std::span<T>(local), part.offset);
          take_piece<T>(spec, holder.piece, typed, elements, part.begin, local);
          memory().write(part.buffer, std::span<const T>(local), part.offset);
        }
      });
    };
    const DType type = step_.value_type(step_.spec(*all.front().weight));
    set(type, &StepWeight::value);
    if (wide_type(type) != type) set(wide_type(type), &StepWeight::master);
  }
}

template <class T>
void StepRun::read(Which which, const std::string& name, std::span<T> out) const {
  const auto wanted = static_cast<std::size_t>(step_.model.parameters().find(name).num_elements());
  if (out.size() != wanted) {
    throw Error(ErrorKind::config,
                str("tensor '", name, "': a span of ", out.size(), " elements (the tensor has ", wanted, ")"));
  }
  // The master where there is one: training continues with it, not with the rounded value.
  const std::vector<Holder>& all = holders_.at(name);
  const DType type               = step_.value_type(step_.spec(*all.front().weight));
  const bool rounds              = step_.ranks.front().grad_norm != Buffer{} && wide_type(type) != type;
  const auto member              = which == Which::gradient ? &StepWeight::gradient
                                   : rounds                 ? &StepWeight::master
                                                            : &StepWeight::value;
  const double scale             = which == Which::gradient ? loss_scale_.value_or(1) : 1;
  for (const Holder& holder : all) {
    if (holder.weight->tied || !holder.piece.first_holder || step_.layout.coord(holder.rank).dp != 0) continue;
    const WeightSpec& spec = step_.spec(*holder.weight);
    const int tp = step_.layout.degree(Axis::tp), tp_index = step_.layout.coord(holder.rank).tp;
    std::vector<T> local(static_cast<std::size_t>(num_elements(local_shape(spec, tp, tp_index))));
    for (const StoredRange& part : parts_of(holder, member)) {
      dispatch_float(step_.graph.spec(part.buffer).type, [&]<class Stored>(Stored) {
        std::vector<Stored> values(static_cast<std::size_t>(part.size()));
        memory().read(part.buffer, std::span(values), part.offset);
        std::transform(values.begin(), values.end(), local.begin() + static_cast<std::ptrdiff_t>(part.begin),
                       [scale](Stored value) { return static_cast<T>(static_cast<double>(wide(value)) / scale); });
      });
    }
    put_piece<T>(spec, holder.piece, local, out);
  }
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
  const std::size_t rows     = static_cast<std::size_t>(batch.micro) * static_cast<std::size_t>(batch.seq);
  const std::size_t per_rank = rows * static_cast<std::size_t>(step_.num_microbatches);
  for (const StepRank& rank : step_.ranks) {
    const auto fill = [&](const std::vector<Buffer>& buffers, std::size_t shift) {
      for (std::size_t mb = 0; mb < buffers.size(); ++mb) {
        const std::size_t begin = static_cast<std::size_t>(rank.coord.dp) * per_rank + mb * rows + shift;
        memory().write(buffers[mb], tokens.subspan(begin, rows));
      }
    };
    fill(rank.tokens, 0);
    fill(rank.targets, 1);
  }
}

void StepRun::run(Recorder* recorder) {
  const Buffer scale = step_.ranks.front().loss_scale;
  if (scale != Buffer{}) loss_scale_ = memory().first<double>(scale);
  executor_->run(*program_, recorder);
}

Program StepRun::beside(const Graph& graph, std::span<const SameBytes> same) const {
  std::vector<Loan> loans;
  for (const SameBytes& each : same) loans.push_back({.buffer = each.here, .bytes = memory().loan(each.of_step)});
  const RunnableGraph runnable(graph, *world_, {.reuse = plan().reuse});
  verify(runnable);
  return Program(runnable, *world_, std::make_shared<Memory>(graph, *runnable.memory(), loans, memory().device()));
}

void StepRun::run(const Program& program) {
  const int lanes = static_cast<int>(program.num_waiting_lanes());
  if (lanes <= executor_->waiting_lanes()) return executor_->run(program);
  Executor({.threads = executor_->threads(), .waiting_lanes = lanes, .step_timeout = step_timeout_}).run(program);
}

double StepRun::loss() const {
  for (const StepRank& rank : step_.ranks) {
    if (rank.loss != Buffer{}) return memory().first<double>(rank.loss);
  }
  throw Error(ErrorKind::config, "step: computes no loss");
}

}  // namespace stepgraph
