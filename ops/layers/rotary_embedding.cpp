#include <cmath>
#include <memory>

#include "ops/cpu/rotary_embedding.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/common/workspace_bytes.hpp"
#include "ops/cuda/layers/rotary_embedding.hpp"
#include "ops/shared/heads.hpp"

namespace stepgraph {

void check_heads(const Tape& tape, std::string_view op, const Tensor& qkv, const Heads& heads) {
  const auto refuse          = [&](const std::string& what) { throw Error(ErrorKind::config, str(op, ": ", what)); };
  const auto [num, kv, size] = heads;
  if (num < 1 || kv < 1 || size < 1 || kv > num || num % kv != 0) {
    refuse(str("heads(", num, "), kv_heads(", kv, "), head_size(", size,
               ") (each at least 1, and heads a multiple of kv_heads)"));
  }
  if (qkv.type != tape.type()) {
    refuse(str("qkv must have the tape's type ", tape.type(), ", not ", qkv.type));
  }
  const TensorShape wanted{tape.sequences() * tape.seq(), (num + 2 * kv) * size};
  if (qkv.shape != wanted) {
    refuse(str("qkv is ", to_string(qkv.shape), ", but ", tape.sequences(), " sequences of ", tape.seq(), " with ", num,
               " heads and 2 x ", kv, " kv_heads of ", size, " are ", to_string(wanted)));
  }
}

namespace {

// Rotates `from` into `to`; both may be the same buffer.
void add_rotation(Tape& tape, const Tensor& from, const Tensor& to, cpu::Rotation rotation) {
  const bool in_place = from.buffer == to.buffer;
  const Tensor angles = tape.tensor("rotary_embedding angles", {4, rotation.head_size / 2}, DType::f64);
  OpNode node{.op     = rotation.backward ? "rotary_embedding_backward" : "rotary_embedding",
              .writes = angles,
              .cost   = {.flops       = 3 * static_cast<double>(from.rows() * rotation.turned_heads * rotation.head_size),
                         .bytes_moved = 2 * static_cast<double>(from.num_bytes())},
              .device = true,
              .workspace_bytes = cuda::rotary_workspace(rotation.seq, rotation.head_size,
                                                        static_cast<std::int64_t>(size_bytes(tape.wide_type())))};
  if (in_place) {
    node.accumulates = to;
  } else {
    node.reads = from;
    node.writes.push_back(to);
  }
  tape.add<AllTypes>(node, [rotation, in_place, rows = from.rows()]<class T>(const Context& context, T) {
    T* out        = in_place ? context.accumulate<T>().data() : context.write<T>(1).data();
    const T* data = in_place ? out : context.read<T>().data();
    if constexpr (cuda::built) {
      if (const DeviceQueue* queue = context.device()) {
        return cuda::rotate(*queue,
                            {.seq          = rotation.seq,
                             .row          = rotation.row,
                             .turned_heads = rotation.turned_heads,
                             .head_size    = rotation.head_size,
                             .backward     = rotation.backward,
                             .frequencies  = *rotation.frequencies},
                            rows, data, out);
      }
    }
    cpu::rotate(rotation, rows, data, out, context.write<double>(0).data());
  });
}

}  // namespace

Tensor rotary_embedding(Tape& tape, const RotaryEmbedding& spec) {
  check_heads(tape, "rotary_embedding", spec.qkv, spec.heads);
  const auto [num, kv, size] = spec.heads;
  if (size % 2 != 0 || static_cast<std::int64_t>(spec.frequencies.size()) != size / 2) {
    throw Error(ErrorKind::config, str("rotary_embedding: ", spec.frequencies.size(), " frequencies for head_size(",
                                       size, ") (an even head_size, and head_size / 2 frequencies)"));
  }
  cpu::Rotation rotation{.seq          = tape.seq(),
                         .row          = spec.qkv.cols(),
                         .turned_heads = num + kv,
                         .head_size    = size,
                         .backward     = false,
                         .frequencies  = std::make_shared<const std::vector<double>>(spec.frequencies)};
  add_rotation(tape, spec.qkv, spec.qkv, rotation);
  const Tensor x = spec.qkv, y = tape.same_bytes(x);
  rotation.backward = true;
  tape.on_backward({.outputs = {y}, .input_gradients = [x, y, rotation](Tape& back) {
                      if (!back.needs_gradient(x)) return;
                      const Tensor dy = back.gradient(y);
                      if (back.owns_gradient(y)) {
                        add_rotation(back, dy, dy, rotation);
                      } else {
                        const Tensor turned = back.tensor("gradient", dy.shape, dy.type);
                        add_rotation(back, dy, turned, rotation);
                        back.replace_gradient(y, turned);
                      }
                      back.hand_over_gradient(x, y);
                    }});
  return y;
}

std::vector<double> rotary_frequencies(std::int64_t head_size, double theta) {
  if (head_size < 2 || head_size % 2 != 0 || !(theta > 0)) {
    throw Error(ErrorKind::config, str("rotary_frequencies: head_size(", head_size, "), theta(", theta,
                                       ") (an even head_size, a positive theta)"));
  }
  std::vector<double> frequencies(static_cast<std::size_t>(head_size / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_size));
  }
  return frequencies;
}

}  // namespace stepgraph
