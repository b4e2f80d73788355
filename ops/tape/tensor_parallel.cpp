#include "ops/tape/tensor_parallel.hpp"

#include <algorithm>

#include "ops/tape/op_checks.hpp"

namespace stepgraph {
namespace {

// Adds a part that reads `from` and writes `to`; both may be the same buffer.
void add_part(Tape& tape, PartOp op, const Tensor& from, const Tensor& to, std::string_view name,
              Reduction reduction = Reduction::sum) {
  const bool moves_twice = op == PartOp::all_reduce;
  NodeSpec node{.name   = tape.name(name),
                .lane   = tape.graph().lane(tape.rank(), LaneKind::tp),
                .kind   = NodeKind::communicate,
                .op     = std::string(to_string(op)),
                .labels = tape.labels()};
  if (from.buffer == to.buffer) {
    node.accumulates = from;
  } else {
    node.reads  = from;
    node.writes = to;
  }
  const auto larger = static_cast<double>(std::max(from.num_bytes(), to.num_bytes()));
  const int others  = tape.tp().size - 1;
  node.cost         = {.bytes_moved = moves_twice ? 2 * larger : larger,
                       .bytes_sent  = moves_twice ? larger * others : larger * others / tape.tp().size};
  node.part         = {.group     = tape.tp().group,
                       .op        = op,
                       .reduction = reduces(op) ? reduction : Reduction::sum,
                       .type      = from.type,
                       .message   = node.name};
  tape.graph().add(node);
}

Tensor with_rows(Tape& tape, std::string_view name, const Tensor& of, std::int64_t rows) {
  return tape.tensor(name, {rows, of.cols()}, of.type);
}

void check_rows(const Tape& tape, std::string_view op, const Tensor& x, std::int64_t rows) {
  check_same_shape(op, "x", {x.rows(), x.cols()}, {rows, x.cols()});
  check_tensor(tape, op, "x", x);
}

// Adds a gradient that no other tensor shares to the gradient of `of`.
void add_own_gradient(Tape& back, const Tensor& of, const Tensor& gradient) {
  const Tensor user = back.same_bytes(of);
  back.replace_gradient(user, gradient);
  back.hand_over_gradient(of, user);
}

Tensor gather_rows(Tape& tape, const Tensor& x) {
  check_rows(tape, "tp_copy", x, tape.shared_rows());
  const Tensor y = with_rows(tape, "gathered", x, tape.rows());
  add_part(tape, PartOp::all_gather, x, y, "all_gather");
  tape.on_backward({.outputs = {y}, .input_gradients = [x, y](Tape& back) {
                      if (!back.needs_gradient(x)) return;
                      const Tensor sum = with_rows(back, "gradient share", x, x.rows());
                      add_part(back, PartOp::reduce_scatter, back.gradient(y), sum, "reduce_scatter gradient");
                      add_own_gradient(back, x, sum);
                    }});
  return y;
}

Tensor scatter_rows(Tape& tape, const Tensor& x) {
  check_rows(tape, "tp_sum", x, tape.rows());
  const Tensor y = with_rows(tape, "share", x, tape.shared_rows());
  add_part(tape, PartOp::reduce_scatter, x, y, "reduce_scatter");
  tape.on_backward({.outputs = {y}, .input_gradients = [x, y](Tape& back) {
                      if (!back.needs_gradient(x)) return;
                      const Tensor whole = with_rows(back, "gathered gradient", x, x.rows());
                      add_part(back, PartOp::all_gather, back.gradient(y), whole, "all_gather gradient");
                      add_own_gradient(back, x, whole);
                    }});
  return y;
}

}  // namespace

void tp_all_reduce(Tape& tape, const Tensor& x, std::string_view name, Reduction reduction) {
  if (tape.tp().size > 1) add_part(tape, PartOp::all_reduce, x, x, name, reduction);
}

Tensor tp_copy(Tape& tape, const Tensor& x) {
  if (tape.tp().size == 1) return x;
  if (tape.tp().sequence) return gather_rows(tape, x);
  const Tensor y = tape.same_bytes(x);
  tape.on_backward({.outputs = {y}, .input_gradients = [x, y](Tape& back) {
                      if (!back.needs_gradient(x)) return;
                      const Tensor dy = back.gradient(y);
                      if (back.owns_gradient(y)) {
                        add_part(back, PartOp::all_reduce, dy, dy, "all_reduce gradient");
                        back.hand_over_gradient(x, y);
                        return;
                      }
                      const Tensor sum = back.tensor("gradient sum", dy.shape, dy.type);
                      add_part(back, PartOp::all_reduce, dy, sum, "all_reduce gradient");
                      back.replace_gradient(y, sum);
                      back.hand_over_gradient(x, y);
                    }});
  return y;
}

Tensor tp_sum(Tape& tape, const Tensor& x) {
  if (tape.tp().size == 1) return x;
  if (tape.tp().sequence) return scatter_rows(tape, x);
  add_part(tape, PartOp::all_reduce, x, x, "all_reduce");
  const Tensor y = tape.same_bytes(x);
  tape.on_backward({.outputs = {y}, .input_gradients = [x, y](Tape& back) { back.pass_gradient(x, y); }});
  return y;
}

}  // namespace stepgraph
