#pragma once
#include <any>
#include <array>
#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/graph.hpp"
#include "engine/run/context.hpp"
#include "ops/tape/tensor.hpp"
#include "ops/tape/weight_table.hpp"

namespace stepgraph {

// The ranks that share one copy of a stage's weights.
struct TensorParallel {
  int size      = 1;
  int index     = 0;
  Group group   = {};     // unset if size is 1
  bool sequence = false;  // sequence parallelism: outside the blocks, each rank holds its share of the rows
};

// Source of the random bits of a microbatch: the same in every layout, schedule and recomputation.
struct RandomStream {
  Buffer step                 = {};  // i64, persistent: the step number; unset: nothing is random
  std::uint64_t seed          = 0;
  std::int64_t first_sequence = 0;  // index of the microbatch's first sequence in the global batch
};

// The declaration of one node of an op. The tape adds rank, lane, labels and name.
struct OpNode {
  std::string op         = {};  // "gelu"
  AccessList reads       = {};
  AccessList writes      = {};
  AccessList accumulates = {};
  Cost cost              = {};
  bool parallel          = false;  // the kernel may call Context::parallel_for
  bool device            = false;  // the kernel can enqueue its work on a device: Context::device
  // The most bytes of DeviceQueue::workspace that the kernel uses; and how many more if it adds to its output in place.
  std::int64_t workspace_bytes          = 0;
  std::int64_t in_place_workspace_bytes = 0;
};

// The element types a kernel supports: `tape.add<AllTypes>(...)` adds a kernel that also supports bf16 and f16.
struct FullTypes {  // f32 and f64
  static constexpr bool half = false;
};
struct AllTypes {
  static constexpr bool half = true;
};

namespace detail {
// The number type in a kernel's signature; void if the kernel is generic or overloaded.
template <class Call>
struct KernelNumber {
  using type = void;
};
template <class Kernel, class Result, class Number>
struct KernelNumber<Result (Kernel::*)(const Context&, Number) const> {
  using type = std::remove_cvref_t<Number>;
};
// Whether a kernel is meant for T. Invocability alone is not enough: float converts to double.
template <class Kernel, class T>
[[nodiscard]] constexpr bool is_kernel_for() {
  if constexpr (!std::invocable<Kernel&, const Context&, T>) {
    return false;
  } else if constexpr (requires { &Kernel::operator(); }) {
    using Number = typename KernelNumber<decltype(&Kernel::operator())>::type;
    return std::is_void_v<Number> || std::is_same_v<Number, T>;
  } else {
    return true;
  }
}
}  // namespace detail

struct TapeSpec {
  Graph* graph           = nullptr;  // receives the nodes, in the order of the calls
  WeightTable* weights   = nullptr;
  Rank rank              = {};
  DType type             = DType::f32;  // of activations, their gradients and weights: f32, f64, bf16 or f16
  TensorParallel tp      = {};
  std::int64_t sequences = 1;  // in this microbatch
  std::int64_t seq       = 1;  // tokens per sequence
  int stage              = -1;
  int microbatch         = -1;
  RandomStream random    = {};
  bool records           = true;  // false: forward only, backward is never emitted
};

// The forward pass of one stage for one microbatch on one rank. An op adds its forward nodes at once and registers how
// to emit its backward. The tape stores these records and emits input gradients and weight gradients when the schedule
// asks for them: together (B) or apart (I, then W).
//
// Each tensor's gradient is the sum of the contributions of its users, in the reverse order of use. `Into` tells a
// kernel whether to add to an existing gradient or to write the first contribution.
class Tape {
 public:
  explicit Tape(TapeSpec spec);
  Tape(const Tape&)            = delete;
  Tape& operator=(const Tape&) = delete;
  Tape(Tape&&)                 = default;

  // --- for models --------------------------------------------------------------------------------------------------
  // A weight of the block that is being recorded.
  [[nodiscard]] Weight weight(std::string_view name) const { return spec_.weights->find(name, block_); }
  [[nodiscard]] const TensorParallel& tp() const noexcept { return spec_.tp; }
  [[nodiscard]] std::int64_t sequences() const noexcept { return spec_.sequences; }
  [[nodiscard]] std::int64_t seq() const noexcept { return spec_.seq; }
  void set_layer(int layer) { layer_ = layer; }               // label of the following nodes; -1: no layer
  void set_block(std::string_view block) { block_ = block; }  // whose weights are read from now on; empty: any block's

  // --- for ops: forward ----------------------------------------------------------------------------------------------
  [[nodiscard]] Graph& graph() const noexcept { return *spec_.graph; }
  [[nodiscard]] Rank rank() const noexcept { return spec_.rank; }
  [[nodiscard]] DType type() const noexcept { return spec_.type; }
  [[nodiscard]] DType wide_type() const noexcept { return stepgraph::wide_type(spec_.type); }  // the compute type
  [[nodiscard]] const RandomStream& random() const noexcept { return spec_.random; }
  [[nodiscard]] bool is_random() const noexcept { return spec_.random.step != Buffer{}; }
  // Rows of a tensor with all tokens of the microbatch, and rows of a tensor with this rank's share of them.
  [[nodiscard]] std::int64_t rows() const noexcept { return spec_.sequences * spec_.seq; }
  [[nodiscard]] std::int64_t shared_rows() const noexcept {
    return spec_.tp.sequence ? rows() / spec_.tp.size : rows();
  }
  // Index of a tensor's first row among the tokens of the global batch.
  [[nodiscard]] std::int64_t first_row(const Tensor& of) const noexcept {
    const bool partial = spec_.tp.sequence && of.rows() == shared_rows();
    return spec_.random.first_sequence * spec_.seq + (partial ? spec_.tp.index * shared_rows() : 0);
  }
  [[nodiscard]] bool records() const noexcept { return spec_.records; }
  [[nodiscard]] Labels labels() const;
  [[nodiscard]] std::string name(std::string_view op) const;  // of a node: the op and its place in the model

  // Creates a step buffer, of the tape's type by default. The tape adds stage, microbatch and layer to its name.
  [[nodiscard]] Tensor tensor(std::string_view name, TensorShape shape, std::optional<DType> type = {});
  // A tensor on a buffer created elsewhere: tokens, or data from another stage.
  [[nodiscard]] Tensor input(Buffer buffer, TensorShape shape, DType type, bool needs_gradient);
  // A new tensor on the same bytes: the output of an op that works in place or does nothing.
  [[nodiscard]] Tensor same_bytes(const Tensor& of);

  // Adds a node on the rank's compute lane. The kernel is called with the context, or with the context and a value of
  // the tape's element type, from which it deduces T. A kernel for float only is refused on a tape of f64:
  //   tape.add({...}, []<class T>(const Context& context, T zero) { ... });
  template <class Types = FullTypes, class Kernel>
  Node add(const OpNode& node, Kernel kernel) {
    if constexpr (std::invocable<Kernel&, const Context&>) {
      return add_node(node, Body(std::move(kernel)));
    } else {
      return add_node(node, typed<Types>(
                                node.op, [kernel]<class T>(const Context& context, T zero) { kernel(context, zero); },
                                std::bool_constant<detail::is_kernel_for<Kernel, float>()>(),
                                std::bool_constant<detail::is_kernel_for<Kernel, double>()>()));
    }
  }

  // How to emit an op's backward once the gradients of its outputs are complete. It is skipped if no output has a
  // gradient; an op without outputs (a loss) is where gradients start. `input_gradients` adds to the gradients of its
  // inputs, `weight_gradients` to those of its weights; either may be empty. Both get this tape, with the layer label
  // of the forward pass.
  struct Backward {
    std::vector<Tensor> outputs                 = {};
    std::function<void(Tape&)> input_gradients  = {};
    std::function<void(Tape&)> weight_gradients = {};
    bool takes_gradients                        = false;  // it applies deferred gradients: see leave_gradient
  };
  void on_backward(Backward backward);

  // --- for ops: backward ---------------------------------------------------------------------------------------------
  [[nodiscard]] bool has_gradient(const Tensor& of) const;
  [[nodiscard]] Tensor gradient(const Tensor& of);  // throws if there is none

  // Adds a node whose kernel adds to the gradient of `of`. The kernel is called with the context and an Into<T>. Does
  // nothing if that gradient is not needed. Weight gradients are summed in the wide type: Into<T, Wide<T>>.
  //   tape.add_gradient(x, {.op = "gelu_backward", .reads = {x, dy}}, [](const Context& context, auto dx) { ... });
  template <class Types = FullTypes, class Kernel>
  void add_gradient(const Tensor& of, const OpNode& node, Kernel kernel) {
    if (needs_gradient(of)) {
      add_sum<Types>(node, target(of), std::move(kernel), []<class T>(T) { return T{}; });
    }
  }
  template <class Types = FullTypes, class Kernel>
  void add_weight_gradient(const Weight& of, const OpNode& node, Kernel kernel) {
    add_sum<Types>(node, target(of), std::move(kernel), []<class T>(T) { return Wide<T>{}; });
  }
  // Adds to the gradients of several weights in one node. The kernel gets them in this order, as a std::span<const
  // Into<T, Wide<T>>>.
  template <class Types = FullTypes, class Kernel>
  void add_weight_gradients(const std::vector<Weight>& of, OpNode node, Kernel kernel) {
    struct Place {
      bool in_place;
      std::size_t position;
    };
    std::vector<Place> places;
    for (const Weight& each : of) {
      const Target to  = target(each);
      AccessList& list = to.in_place ? node.accumulates : node.writes;
      places.push_back({to.in_place, list.view().size()});
      list.push_back(to.out);
    }
    const auto call = [=]<class T>(const Context& context, T) {
      using Sum = Wide<T>;
      std::array<Into<T, Sum>, max_weights> into{};
      for (std::size_t i = 0; i < places.size(); ++i) {
        const auto [in_place, position] = places[i];
        const std::span<Sum> out        = in_place ? context.accumulate<Sum>(position) : context.write<Sum>(position);
        into[i] = {out.data(), in_place ? out.data() : nullptr, static_cast<std::int64_t>(out.size())};
      }
      kernel(context, std::span<const Into<T, Sum>>(into.data(), places.size()));
    };
    if (of.size() > max_weights)
      throw Error(ErrorKind::config, str("op '", node.op, "': ", of.size(), " weights (at most ", max_weights, ")"));
    using Floats  = std::span<const Into<float>>;
    using Doubles = std::span<const Into<double>>;
    add_node(node, typed<Types>(node.op, call, std::bool_constant<std::invocable<Kernel&, const Context&, Floats>>(),
                                std::bool_constant<std::invocable<Kernel&, const Context&, Doubles>>()));
  }
  static constexpr std::size_t max_weights = 4;  // per node
  // Whether the gradient has no sum yet: the next one that is added writes all of it.
  [[nodiscard]] bool begins_gradient(const Weight& of) const;

  // Makes the gradient of `from` the gradient of `of`, bit for bit. Adds a node only if `of` already has a gradient.
  void pass_gradient(const Tensor& of, const Tensor& from);
  // The same, but the gradient of `from` is given up: later ops may overwrite it in place, and it cannot be requested
  // again. For ops that work in place on it. Not for ops with weight gradients, which may be emitted later.
  void hand_over_gradient(const Tensor& of, const Tensor& from);
  // Whether the gradient of `of` is shared with no other tensor, so that it may be changed in place.
  [[nodiscard]] bool owns_gradient(const Tensor& of) const;

  // Replaces the gradient of `of` by another tensor, which `of` then owns.
  void replace_gradient(const Tensor& of, const Tensor& gradient);

  // Defers an op's contribution to the gradient of `of`, so that the op that made `of` can fuse it into its own
  // backward node. This needs an op that takes deferred gradients (Backward::takes_gradients) and no other contribution
  // to that gradient; otherwise the tape calls `add` at once, which adds the node. `how` describes the deferred work.
  // If another op requests the gradient or adds to it, the tape calls `add` first, so the gradient is the same either
  // way.
  void leave_gradient(const Tensor& of, std::any how, std::function<void(Tape&)> add);
  // For the op that made `of`: takes over the contribution that an op of the same layer deferred. `of` then has no
  // gradient.
  template <class How>
  [[nodiscard]] std::optional<How> take_left_gradient(const Tensor& of) {
    std::optional<Left>& left = state(of).left;
    const How* const found    = left && left->layer == layer_ ? std::any_cast<How>(&left->how) : nullptr;
    if (found == nullptr) return std::nullopt;
    std::optional<How> taken = *found;
    left.reset();
    return taken;
  }

  // --- for schedules -------------------------------------------------------------------------------------------------
  void set_gradient(const Tensor& of, const Tensor& gradient);  // received from the next stage
  void emit_input_gradients();                                  // I
  void emit_weight_gradients();                                 // W, after I
  void emit_gradients();                                        // B: both, op by op

  [[nodiscard]] bool needs_gradient(const Tensor& of) const { return state(of).needed; }

 private:
  struct Left {
    std::any how;
    std::function<void(Tape&)> add;
    int layer;
  };
  struct State {
    Buffer buffer                  = {};  // detects a tensor of another tape with the same id
    bool needed                    = true;
    std::optional<Tensor> gradient = {};
    bool own                       = false;  // shared with no other tensor: may be changed in place
    bool gone                      = false;  // given up by hand_over_gradient
    bool taken                     = false;  // the op that made the tensor takes deferred gradients
    std::optional<Left> left       = {};     // deferred contribution; then it is the whole gradient
  };
  struct Record {
    Backward backward;
    int layer;
  };
  // Where a node stores a sum.
  struct Target {
    Access out;
    std::optional<Buffer> base = {};  // the previous value, if in another buffer
    bool in_place              = false;
  };

  [[nodiscard]] State& state(const Tensor& of);
  [[nodiscard]] const State& state(const Tensor& of) const;
  [[nodiscard]] Target target(const Tensor& of);
  [[nodiscard]] Target target(const Weight& of);
  Node add_node(const OpNode& node, Body body);
  void add_left(const Tensor& of);
  void emit(const Record& record, bool inputs, bool weights);

  template <class Types, class Kernel, bool f32, bool f64>
  Body typed(const std::string& op, Kernel kernel, std::bool_constant<f32>, std::bool_constant<f64>) const {
    return dispatch_float(spec_.type, [&]<class T>(T) -> Body {
      constexpr bool known = std::is_same_v<T, float> ? f32 : std::is_same_v<T, double> ? f64 : Types::half;
      if constexpr (known) {
        return Body([kernel](const Context& context) { kernel(context, T{}); });
      } else {
        throw Error(ErrorKind::config, str("op '", op, "': has no kernel for ", spec_.type));
      }
    });
  }

  // The type of sum_type(T{}) is the type in which the sum is stored.
  template <class Types, class Kernel, class SumType>
  void add_sum(OpNode node, const Target& to, Kernel kernel, SumType sum_type) {
    const std::size_t read = node.reads.view().size(), written = node.writes.view().size(),
                      accumulated = node.accumulates.view().size();
    if (to.in_place) {
      node.accumulates.push_back(to.out);
      node.workspace_bytes += node.in_place_workspace_bytes;
    } else {
      node.writes.push_back(to.out);
      if (to.base) node.reads.push_back(*to.base);
    }
    const bool in_place = to.in_place, based = to.base.has_value();
    const auto call = [=]<class T>(const Context& context, T zero) {
      using Sum                = decltype(sum_type(zero));
      const std::span<Sum> out = in_place ? context.accumulate<Sum>(accumulated) : context.write<Sum>(written);
      const Sum* base          = in_place ? out.data() : based ? context.read<Sum>(read).data() : nullptr;
      kernel(context, Into<T, Sum>{out.data(), base, static_cast<std::int64_t>(out.size())});
    };
    add_node(node,
             typed<Types>(node.op, call, std::bool_constant<std::invocable<Kernel&, const Context&, Into<float>>>(),
                          std::bool_constant<std::invocable<Kernel&, const Context&, Into<double>>>()));
  }

  TapeSpec spec_;
  int layer_         = -1;
  std::string block_ = {};
  const char* phase_ = "forward";
  bool emitting_     = false;
  std::vector<State> states_;  // by tensor
  std::vector<Record> records_;
};

}  // namespace stepgraph
