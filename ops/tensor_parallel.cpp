#include "ops/tensor_parallel.hpp"

namespace stepgraph {
namespace {

// Reads `from` and writes `to`, which may be one buffer.
void add_part(Tape& tape, const Tensor& from, const Tensor& to, std::string_view name, Reduction reduction) {
  NodeSpec node{.name   = tape.name(name),
                .lane   = tape.graph().lane(tape.rank(), LaneKind::tp),
                .kind   = NodeKind::communicate,
                .op     = "all_reduce",
                .labels = tape.labels()};
  if (from.buffer == to.buffer) {
    node.accumulates = from;
  } else {
    node.reads  = from;
    node.writes = to;
  }
  const auto bytes = static_cast<double>(from.num_bytes());
  node.cost        = {.bytes_moved = 2 * bytes, .bytes_sent = bytes * (tape.tp().size - 1)};
  node.part        = {.group     = tape.tp().group,
                      .op        = PartOp::all_reduce,
                      .reduction = reduction,
                      .type      = from.type,
                      .message   = node.name};
  tape.graph().add(node);
}

}  // namespace

void tp_all_reduce(Tape& tape, const Tensor& x, std::string_view name, Reduction reduction) {
  if (tape.tp().size > 1) add_part(tape, x, x, name, reduction);
}

Tensor tp_copy(Tape& tape, const Tensor& x) {
  if (tape.tp().size == 1) return x;
  const Tensor y = tape.same_bytes(x);
  tape.on_backward({.outputs = {y}, .input_gradients = [x, y](Tape& back) {
                      if (!back.needs_gradient(x)) return;
                      const Tensor dy = back.gradient(y);
                      if (back.owns_gradient(y)) {
                        add_part(back, dy, dy, "all_reduce gradient", Reduction::sum);
                        back.hand_over_gradient(x, y);
                        return;
                      }
                      const Tensor sum = back.tensor("gradient sum", dy.shape, dy.type);
                      add_part(back, dy, sum, "all_reduce gradient", Reduction::sum);
                      back.replace_gradient(y, sum);
                      back.hand_over_gradient(x, y);
                    }});
  return y;
}

Tensor tp_sum(Tape& tape, const Tensor& x) {
  if (tape.tp().size == 1) return x;
  add_part(tape, x, x, "all_reduce", Reduction::sum);
  const Tensor y = tape.same_bytes(x);
  tape.on_backward({.outputs = {y}, .input_gradients = [x, y](Tape& back) { back.pass_gradient(x, y); }});
  return y;
}

}  // namespace stepgraph
