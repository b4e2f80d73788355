#include "tools/examples/sharded_step.hpp"

#include <cmath>
#include <span>

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "ops/transfers/collectives.hpp"

namespace stepgraph {
namespace {

// y = tanh(x w), x: rows x width, w: width x width.
void forward_kernel(std::span<const float> x, std::span<const float> w, std::span<float> y, std::size_t width) {
  const std::size_t rows = x.size() / width;
  for (std::size_t r = 0; r < rows; ++r) {
    float* out = y.data() + r * width;
    std::fill(out, out + width, 0.0f);
    for (std::size_t k = 0; k < width; ++k) {
      const float a = x[r * width + k];
      for (std::size_t c = 0; c < width; ++c) out[c] += a * w[k * width + c];
    }
    for (std::size_t c = 0; c < width; ++c) out[c] = std::tanh(out[c]);
  }
}

// dz = dy (1 - y^2); dw = x^T dz; dx = dz w^T. dx may be empty.
void backward_kernel(std::span<const float> x, std::span<const float> w, std::span<const float> y,
                     std::span<const float> dy, std::span<float> dx, std::span<float> dw, std::size_t width) {
  const std::size_t rows = x.size() / width;
  std::vector<float> dz(width);
  std::fill(dw.begin(), dw.end(), 0.0f);
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < width; ++c) {
      const float out = y[r * width + c];
      dz[c]           = dy[r * width + c] * (1.0f - out * out);
    }
    for (std::size_t k = 0; k < width; ++k) {
      const float a = x[r * width + k];
      float sum     = 0.0f;
      for (std::size_t c = 0; c < width; ++c) {
        dw[k * width + c] += a * dz[c];
        sum += dz[c] * w[k * width + c];
      }
      if (!dx.empty()) dx[r * width + k] = sum;
    }
  }
}

// A number in [-1, 1) from a counter: splitmix64.
float uniform(std::uint64_t counter) {
  std::uint64_t z = counter + 0x9e3779b97f4a7c15ull;
  z               = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z               = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return static_cast<float>(static_cast<double>(z >> 11) * 0x1.0p-52 - 1.0);
}

class Builder {
 public:
  explicit Builder(const ShardedStepSpec& spec) : spec_(spec), step_{.spec = spec, .graph = Graph(spec.ranks)} {
    std::vector<Rank> everyone;
    for (int rank = 0; rank < spec.ranks; ++rank) everyone.push_back(Rank{rank});
    weights_group_   = graph().group({.name = "gather", .ranks = everyone});
    gradients_group_ = graph().group({.name = "reduce", .ranks = everyone});
    loss_group_      = graph().group({.name = "loss", .ranks = everyone});
  }

  ShardedStep build() {
    add_buffers();
    for (int layer = 0; layer < spec_.layers; ++layer) {
      gather(layer, "forward");
      for (int rank = 0; rank < spec_.ranks; ++rank) forward(rank, layer);
    }
    for (int rank = 0; rank < spec_.ranks; ++rank) loss(rank);
    all_reduce(graph(), {.name      = "loss over ranks",
                         .group     = loss_group_,
                         .lane      = LaneKind::tp,
                         .in        = [&](Rank rank) { return at(step_.loss, rank); },
                         .reduction = Reduction::average,
                         .labels    = {.phase = "loss"}});
    for (int layer = spec_.layers - 1; layer >= 0; --layer) {
      gather(layer, "backward");
      for (int rank = 0; rank < spec_.ranks; ++rank) backward(rank, layer);
      reduce_scatter(graph(),
                     {.name  = str("reduce_scatter layer", layer),
                      .group = gradients_group_,
                      .lane  = LaneKind::reduce,
                      .in    = [&](Rank rank) { return gradient_slot(rank, layer); },
                      .out   = [&](Rank rank) { return at(gradient_shards_, rank)[static_cast<std::size_t>(layer)]; },
                      .reduction = Reduction::average,
                      .labels    = {.layer = layer, .phase = "backward"}});
      for (int rank = 0; rank < spec_.ranks; ++rank) update(rank, layer);
    }
    return std::move(step_);
  }

 private:
  Graph& graph() { return step_.graph; }
  template <class T>
  static const T& at(const std::vector<T>& list, Rank rank) {
    return list[static_cast<std::size_t>(index(rank))];
  }

  [[nodiscard]] std::int64_t weight_bytes() const { return std::int64_t{4} * spec_.width * spec_.width; }
  [[nodiscard]] std::int64_t activation_bytes() const { return std::int64_t{4} * spec_.batch * spec_.width; }
  [[nodiscard]] double layer_flops() const { return 2.0 * spec_.batch * spec_.width * spec_.width; }

  Buffer make(Rank rank, const std::string& name, std::int64_t size, Lifetime lifetime = Lifetime::step) {
    return graph().buffer({.name = name, .rank = rank, .size_bytes = size, .type = DType::f32, .lifetime = lifetime});
  }

  void add_buffers() {
    for (int r = 0; r < spec_.ranks; ++r) {
      const Rank rank{r};
      step_.inputs.push_back(make(rank, "inputs", activation_bytes(), Lifetime::persistent));
      step_.targets.push_back(make(rank, "targets", activation_bytes(), Lifetime::persistent));
      step_.loss.push_back(make(rank, "loss", 4, Lifetime::persistent));
      auto& shards     = step_.shards.emplace_back();
      auto& gradients  = gradient_shards_.emplace_back();
      auto& activation = activations_.emplace_back();
      auto& d_output   = d_activations_.emplace_back();
      activation.push_back(step_.inputs.back());
      for (int layer = 0; layer < spec_.layers; ++layer) {
        shards.push_back(
            make(rank, str("weights", layer, " shard"), weight_bytes() / spec_.ranks, Lifetime::persistent));
        gradients.push_back(make(rank, str("gradient", layer, " shard"), weight_bytes() / spec_.ranks));
        activation.push_back(make(rank, str("activation", layer), activation_bytes()));
        d_output.push_back(make(rank, str("d_activation", layer), activation_bytes()));
      }
      auto& weights = weight_slots_.emplace_back();
      auto& dw      = gradient_slots_.emplace_back();
      for (int slot = 0; slot < spec_.slots; ++slot) {
        weights.push_back(make(rank, str("weight slot ", slot), weight_bytes()));
        dw.push_back(make(rank, str("gradient slot ", slot), weight_bytes()));
      }
    }
    step_.gathers.resize(static_cast<std::size_t>(spec_.ranks));
    step_.forwards.resize(static_cast<std::size_t>(spec_.ranks));
  }

  [[nodiscard]] Buffer weight_slot(Rank rank) const {
    return at(weight_slots_, rank)[static_cast<std::size_t>((num_gathers_ - 1) % spec_.slots)];
  }
  [[nodiscard]] Buffer gradient_slot(Rank rank, int layer) const {
    return at(gradient_slots_, rank)[static_cast<std::size_t>(layer % spec_.slots)];
  }

  void gather(int layer, const std::string& phase) {
    ++num_gathers_;
    const auto nodes =
        all_gather(graph(), {.name  = str("all_gather ", phase == "forward" ? "F" : "B", " layer", layer),
                             .group = weights_group_,
                             .lane  = LaneKind::gather,
                             .in  = [&](Rank rank) { return at(step_.shards, rank)[static_cast<std::size_t>(layer)]; },
                             .out = [&](Rank rank) { return weight_slot(rank); },
                             .labels = {.layer = layer, .phase = phase}});
    if (phase != "forward") return;
    for (std::size_t rank = 0; rank < nodes.size(); ++rank) step_.gathers[rank].push_back(nodes[rank]);
  }

  void forward(int rank, int layer) {
    const auto& activation = at(activations_, Rank{rank});
    const auto l           = static_cast<std::size_t>(layer);
    const Node node =
        graph().add({.name   = str("F layer", layer),
                     .lane   = graph().lane(Rank{rank}, LaneKind::compute),
                     .reads  = {activation[l], weight_slot(Rank{rank})},
                     .writes = {activation[l + 1]},
                     .op     = "tanh_layer",
                     .cost   = {.flops = layer_flops()},
                     .labels = {.layer = layer, .phase = "forward"}},
                    [width = static_cast<std::size_t>(spec_.width)](const Context& context) {
                      forward_kernel(context.read<float>(0), context.read<float>(1), context.write<float>(), width);
                    });
    step_.forwards[static_cast<std::size_t>(rank)].push_back(node);
  }

  // Mean squared error, and its gradient.
  void loss(int rank) {
    graph().add({.name   = "loss",
                 .lane   = graph().lane(Rank{rank}, LaneKind::compute),
                 .reads  = {at(activations_, Rank{rank}).back(), at(step_.targets, Rank{rank})},
                 .writes = {at(step_.loss, Rank{rank}), at(d_activations_, Rank{rank}).back()},
                 .op     = "mean_squared_error",
                 .labels = {.phase = "loss"}},
                [](const Context& context) {
                  const auto out = context.read<float>(0), target = context.read<float>(1);
                  const auto gradient = context.write<float>(1);
                  const auto scale    = 1.0f / static_cast<float>(out.size());
                  float sum           = 0.0f;
                  for (std::size_t i = 0; i < out.size(); ++i) {
                    const float error = out[i] - target[i];
                    sum += error * error;
                    gradient[i] = 2.0f * error * scale;
                  }
                  context.write<float>(0)[0] = sum * scale;
                });
  }

  void backward(int rank, int layer) {
    const auto l = static_cast<std::size_t>(layer);
    const Rank r{rank};
    NodeSpec node{
        .name   = str("B layer", layer),
        .lane   = graph().lane(r, LaneKind::compute),
        .reads  = {at(activations_, r)[l], weight_slot(r), at(activations_, r)[l + 1], at(d_activations_, r)[l]},
        .writes = {gradient_slot(r, layer)},
        .op     = "tanh_layer_backward",
        .cost   = {.flops = 2 * layer_flops()},
        .labels = {.layer = layer, .phase = "backward"}};
    if (layer > 0) node.writes.push_back(at(d_activations_, r)[l - 1]);
    graph().add(node, [width = static_cast<std::size_t>(spec_.width), layer](const Context& context) {
      backward_kernel(context.read<float>(0), context.read<float>(1), context.read<float>(2), context.read<float>(3),
                      layer > 0 ? context.write<float>(1) : std::span<float>(), context.write<float>(0), width);
    });
  }

  void update(int rank, int layer) {
    const auto l = static_cast<std::size_t>(layer);
    graph().add({.name        = str("update layer", layer),
                 .reads       = {at(gradient_shards_, Rank{rank})[l]},
                 .accumulates = {at(step_.shards, Rank{rank})[l]},
                 .op          = "sgd",
                 .labels      = {.layer = layer, .phase = "update"}},
                [rate = spec_.learning_rate](const Context& context) {
                  const auto gradient = context.read<float>();
                  const auto weights  = context.accumulate<float>();
                  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= rate * gradient[i];
                });
  }

  ShardedStepSpec spec_;
  ShardedStep step_;
  Group weights_group_, gradients_group_, loss_group_;
  int num_gathers_ = 0;
  std::vector<std::vector<Buffer>> gradient_shards_, activations_, d_activations_, weight_slots_,
      gradient_slots_;  // [rank]
};

}  // namespace

ShardedStep sharded_step(const ShardedStepSpec& spec) {
  const auto refuse = [](const std::string& why) { throw Error(ErrorKind::config, "sharded_step: " + why); };
  if (spec.ranks < 1 || spec.layers < 1 || spec.width < 1 || spec.batch < 1 || spec.slots < 1) {
    refuse(str("ranks ", spec.ranks, ", layers ", spec.layers, ", width ", spec.width, ", batch ", spec.batch,
               ", slots ", spec.slots, " (each at least 1)"));
  }
  if (spec.width * spec.width % spec.ranks != 0) {
    refuse(
        str("a weight of ", spec.width, " x ", spec.width, " does not divide over ", spec.ranks, " ranks (a divisor)"));
  }
  return Builder(spec).build();
}

void fill(const ShardedStep& step, Memory& memory, std::uint64_t seed) {
  const ShardedStepSpec& spec = step.spec;
  const auto width = static_cast<std::size_t>(spec.width), weights = width * width;
  const float scale = std::sqrt(3.0f / static_cast<float>(spec.width));
  for (std::size_t rank = 0; rank < step.inputs.size(); ++rank) {
    const auto inputs  = memory.span<float>(step.inputs[rank]);
    const auto targets = memory.span<float>(step.targets[rank]);
    for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = uniform(seed + 1 + rank * inputs.size() + i);
    std::vector<float> layer_in(inputs.begin(), inputs.end()), layer_out(inputs.size()), teacher(weights);
    for (std::size_t layer = 0; layer < step.shards[rank].size(); ++layer) {
      for (std::size_t i = 0; i < weights; ++i)
        teacher[i] = scale * uniform((seed << 32) + (2 * layer + 1) * weights + i);
      forward_kernel(layer_in, teacher, layer_out, width);
      layer_in.swap(layer_out);
      const auto shard = memory.span<float>(step.shards[rank][layer]);
      for (std::size_t i = 0; i < shard.size(); ++i) {
        shard[i] = scale * uniform((seed << 32) + 2 * layer * weights + rank * shard.size() + i);
      }
    }
    std::copy(layer_in.begin(), layer_in.end(), targets.begin());
  }
}

}  // namespace stepgraph
