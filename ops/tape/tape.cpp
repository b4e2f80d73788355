#include "ops/tape/tape.hpp"

#include <algorithm>

#include "engine/base/nearest.hpp"
#include "engine/base/words.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/layers/residual.hpp"

namespace stepgraph {

void WeightTable::add(Entry entry) {
  if (!by_name_.emplace(entry.name, static_cast<int>(entries_.size())).second) {
    throw Error(ErrorKind::config, str("weight '", entry.name, "': declared twice"));
  }
  entries_.push_back(std::move(entry));
}

Weight WeightTable::at(int id) const {
  const Entry& entry = entries_[static_cast<std::size_t>(id)];
  return {.value = entry.value, .shape = entry.shape, .id = id};
}

Weight WeightTable::find(std::string_view name) const { return find(name, {}); }

Weight WeightTable::find(std::string_view name, std::string_view block) const {
  const auto of_block = [&](const std::string& full) -> std::optional<int> {
    const auto found = by_name_.find(full);
    if (found == by_name_.end()) return std::nullopt;
    const std::string& owner = entries_[static_cast<std::size_t>(found->second)].block;
    return block.empty() || owner.empty() || owner == block ? std::optional(found->second) : std::nullopt;
  };
  if (const auto id = of_block(std::string(name))) return at(*id);
  if (!block.empty()) {
    if (const auto id = of_block(str(block, ".", name))) return at(*id);
  }
  refuse(name, block);
  return {};
}

void WeightTable::refuse(std::string_view name, std::string_view block) const {
  const auto throw_why = [&](const std::string& why) {
    throw Error(ErrorKind::config, str("weight '", name, "': ", why));
  };
  if (const auto found = by_name_.find(std::string(name)); found != by_name_.end())
    throw_why(str("belongs to block '", entries_[static_cast<std::size_t>(found->second)].block, "', not to '", block,
                  "' (a weight of its own, which may be tied to it)"));
  const std::string prefix = str(block, ".");
  std::vector<std::string_view> own;  // as the block calls them
  for (const Entry& entry : entries_) {
    if (!block.empty() && !entry.block.empty() && entry.block != block) continue;
    const bool is_long = !block.empty() && entry.name.starts_with(prefix);
    own.push_back(std::string_view(entry.name).substr(is_long ? prefix.size() : 0));
  }
  constexpr std::size_t most          = 3;  // names in the message
  std::vector<std::string_view> shown = nearest_names(name, own, most);
  const bool near                     = !shown.empty();
  if (!near) shown.assign(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(std::min(most, own.size())));
  const std::string list = join_text(shown, ", ", [](std::string_view one) { return std::string(one); });
  throw_why(str("not declared", block.empty() ? "" : str(" by block '", block, "'"), " (",
                near ? "near: " : "declared: ", list.empty() ? "none" : list,
                near || own.size() <= most ? "" : str(" and ", own.size() - most, " more"), ")"));
}

Tape::Tape(TapeSpec spec) : spec_(std::move(spec)) {
  if (spec_.graph == nullptr || spec_.weights == nullptr) {
    throw Error(ErrorKind::config, "tape: needs a graph and a weight table");
  }
  if (!is_float(spec_.type)) {
    throw Error(ErrorKind::config, str("tape: elements of ", spec_.type, " (f32, f64, bf16 or f16)"));
  }
}

Labels Tape::labels() const {
  return {.stage = spec_.stage, .microbatch = spec_.microbatch, .layer = layer_, .phase = phase_};
}

std::string Tape::name(std::string_view op) const {
  std::string text(op);
  if (layer_ >= 0) text += str(" layer", layer_);
  if (spec_.stage >= 0) text += str(" s", spec_.stage);
  if (spec_.microbatch >= 0) text += str(" mb", spec_.microbatch);
  return text;
}

Tensor Tape::tensor(std::string_view name, TensorShape shape, std::optional<DType> type) {
  check_shape(shape, name);
  Tensor made{.shape = std::move(shape), .type = type.value_or(spec_.type), .id = static_cast<int>(states_.size())};
  made.buffer = spec_.graph->buffer(
      {.name = this->name(name), .rank = spec_.rank, .size_bytes = made.num_bytes(), .type = made.type});
  states_.push_back({.buffer = made.buffer, .needed = spec_.records});
  return made;
}

Tensor Tape::input(Buffer buffer, TensorShape shape, DType type, bool needs_gradient) {
  check_shape(shape, "tape");
  const BufferSpec& spec = spec_.graph->spec(buffer);
  const auto wanted      = num_elements(shape) * static_cast<std::int64_t>(size_bytes(type));
  if (spec.size_bytes != wanted || spec.type != type) {
    throw Error(ErrorKind::config, str("tape: ", to_string(shape), " of ", type, " has ", wanted, " bytes, but ",
                                       spec_.graph->describe(buffer), " has ", spec.size_bytes, " of ", spec.type));
  }
  const Tensor made{.buffer = buffer, .shape = std::move(shape), .type = type, .id = static_cast<int>(states_.size())};
  states_.push_back({.buffer = buffer, .needed = spec_.records && needs_gradient});
  return made;
}

Tensor Tape::same_bytes(const Tensor& of) {
  Tensor made = of;
  made.id     = static_cast<int>(states_.size());
  states_.push_back({.buffer = of.buffer, .needed = state(of).needed});
  return made;
}

Node Tape::add_node(const OpNode& node, Body body) {
  return spec_.graph->add({.name            = name(node.op),
                           .lane            = spec_.graph->lane(spec_.rank, LaneKind::compute),
                           .reads           = node.reads,
                           .writes          = node.writes,
                           .accumulates     = node.accumulates,
                           .op              = node.op,
                           .parallel        = node.parallel,
                           .device          = node.device,
                           .workspace_bytes = node.workspace_bytes,
                           .cost            = node.cost,
                           .labels          = labels()},
                          std::move(body));
}

void Tape::on_backward(Backward backward) {
  if (emitting_) throw Error(ErrorKind::config, "tape: an op's backward may add nodes but not apply ops");
  if (!spec_.records) return;
  if (backward.takes_gradients) {
    for (const Tensor& output : backward.outputs) state(output).taken = true;
  }
  records_.push_back({std::move(backward), layer_});
}

Tape::State& Tape::state(const Tensor& of) {
  return const_cast<State&>(std::as_const(*this).state(of));  // NOLINT: both are this tape's
}

const Tape::State& Tape::state(const Tensor& of) const {
  const bool known = of.id >= 0 && static_cast<std::size_t>(of.id) < states_.size();
  if (!known || states_[static_cast<std::size_t>(of.id)].buffer != of.buffer) {
    throw Error(ErrorKind::config,
                str("tape: tensor ", of.id, " does not belong to this tape (which has ", states_.size(), " tensors)"));
  }
  return states_[static_cast<std::size_t>(of.id)];
}

bool Tape::has_gradient(const Tensor& of) const { return state(of).gradient || state(of).left; }
bool Tape::owns_gradient(const Tensor& of) const { return state(of).own || state(of).left; }

Tensor Tape::gradient(const Tensor& of) {
  add_left(of);
  const State& found = state(of);
  if (!found.gradient) throw Error(ErrorKind::config, str("tape: tensor ", of.id, " has no gradient yet"));
  if (found.gone) {
    throw Error(ErrorKind::config,
                str("tape: the gradient of tensor ", of.id, " was handed over and may have changed"));
  }
  return *found.gradient;
}

Tape::Target Tape::target(const Tensor& of) {
  add_left(of);
  State& found = state(of);
  if (found.gradient && found.own) return {.out = found.gradient->buffer, .in_place = true};
  const std::optional<Tensor> before = found.gradient;
  Tensor made                        = tensor("gradient", of.shape, of.type);
  State& after                       = state(of);  // creating a tensor may have moved the state
  after.gradient                     = made;
  after.own                          = true;
  return {.out = made.buffer, .base = before ? std::optional(before->buffer) : std::nullopt};
}

Tape::Target Tape::target(const Weight& of) {
  WeightTable::Entry& entry = (*spec_.weights)[of];
  const bool first          = !std::exchange(entry.has_gradient, true);
  return {.out = entry.gradient, .in_place = !first};
}

bool Tape::begins_gradient(const Weight& of) const { return !(*spec_.weights)[of].has_gradient; }

void Tape::pass_gradient(const Tensor& of, const Tensor& from) {
  if (!needs_gradient(of)) return;
  const Tensor gradient_of_from = gradient(from);
  if (has_gradient(of)) {
    const auto elements = static_cast<double>(of.num_elements()), bytes = static_cast<double>(of.num_bytes());
    add_gradient<AllTypes>(
        of,
        {.op       = "add",
         .reads    = gradient_of_from,
         .cost     = {.flops = elements, .bytes_moved = 3 * bytes},
         .parallel = true,
         .device   = true},
        []<class T>(const Context& context, Into<T> into) {
          const T* more = context.read<T>().data();
          if constexpr (cuda::built) {
            if (const DeviceQueue* queue = context.device()) return cuda::put(*queue, more, into);
          }
          cpu::for_tiles(context, into.size, cpu::elements_per_tile, [&](std::int64_t begin, std::int64_t end) {
            cpu::put(into, begin, end - begin, [at = more + begin](std::int64_t i) { return wide(at[i]); });
          });
        });
    return;
  }
  state(of).gradient = gradient_of_from;
  state(of).own      = false;
  state(from).own    = false;
}

void Tape::hand_over_gradient(const Tensor& of, const Tensor& from) {
  const bool owned = owns_gradient(from), fresh = needs_gradient(of) && !has_gradient(of);
  pass_gradient(of, from);
  if (!needs_gradient(of)) return;
  if (owned && fresh) state(of).own = true;
  state(from).gone = true;
}

void Tape::leave_gradient(const Tensor& of, std::any how, std::function<void(Tape&)> add) {
  if (!needs_gradient(of)) return;
  if (!state(of).taken || has_gradient(of)) return add(*this);
  state(of).left = Left{std::move(how), std::move(add), layer_};
}

void Tape::add_left(const Tensor& of) {
  const std::optional<Left> left = std::exchange(state(of).left, std::nullopt);
  if (!left) return;
  const int layer = std::exchange(layer_, left->layer);
  left->add(*this);
  layer_ = layer;
}

void Tape::set_gradient(const Tensor& of, const Tensor& gradient) {
  add_left(of);
  state(of).gradient = gradient;
  state(of).own      = false;
}

void Tape::replace_gradient(const Tensor& of, const Tensor& gradient) {
  add_left(of);
  state(of).gradient = gradient;
  state(of).own      = true;
}

void Tape::emit(const Record& record, bool inputs, bool weights) {
  bool reached = record.backward.outputs.empty();
  for (const Tensor& output : record.backward.outputs) reached = reached || has_gradient(output);
  if (!reached) return;
  struct Emitting {  // reset even if a backward throws
    bool& flag;
    explicit Emitting(bool& on) : flag(on) { flag = true; }
    ~Emitting() { flag = false; }
  } const emitting(emitting_);
  layer_ = record.layer;
  if (inputs && record.backward.input_gradients) {
    phase_ = "backward";
    record.backward.input_gradients(*this);
  }
  if (weights && record.backward.weight_gradients) {
    phase_ = inputs ? "backward" : "weight";  // emitted together, they count as one phase
    record.backward.weight_gradients(*this);
  }
}

void Tape::emit_input_gradients() {
  for (auto record = records_.rbegin(); record != records_.rend(); ++record) emit(*record, true, false);
}
void Tape::emit_weight_gradients() {
  for (auto record = records_.rbegin(); record != records_.rend(); ++record) emit(*record, false, true);
}
void Tape::emit_gradients() {
  for (auto record = records_.rbegin(); record != records_.rend(); ++record) emit(*record, true, true);
}

}  // namespace stepgraph
