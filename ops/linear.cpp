#include "ops/linear.hpp"

#include "ops/cpu/column_sums.hpp"
#include "ops/cpu/gemm.hpp"
#include "ops/op_checks.hpp"

namespace stepgraph {
namespace {

struct Sizes {
  std::int64_t rows, in, out;
  bool out_in;
};

// The weight as [in, out], whichever way it lies.
template <class T>
Matrix<T> in_by_out(const T* weight, const Sizes& sizes) {
  if (sizes.out_in) return {weight, 1, sizes.in};
  return {weight, sizes.out, 1};
}

// Of a row-major matrix.
template <class T>
Matrix<T> matrix(std::span<const T> elements, std::int64_t cols) {
  return {elements.data(), cols, 1};
}

// Over idle threads, where there is more than one tile: such a node is declared parallel.
template <class T>
void multiply(const Context& context, const Gemm<T>& problem) {
  const std::int64_t tiles = num_gemm_tiles(problem.m, problem.n);
  if (tiles <= 1) {
    gemm(problem);
  } else {
    context.parallel_for(tiles, [&](std::int64_t tile) { gemm_tile(problem, tile); });
  }
}

OpNode product(const Tape& tape, std::string op, std::int64_t m, std::int64_t n, std::int64_t k) {
  const double element = static_cast<double>(size_bytes(tape.type()));
  const auto size      = [](std::int64_t rows, std::int64_t cols) { return static_cast<double>(rows * cols); };
  return {.op       = std::move(op),
          .cost     = {.flops       = 2 * size(m, n) * static_cast<double>(k),
                       .bytes_moved = element * (size(m, k) + size(k, n) + size(m, n))},
          .parallel = num_gemm_tiles(m, n) > 1};
}

void check(const Tape& tape, const Linear& spec) {
  check_tensor(tape, spec.name, "x", spec.x);
  const bool out_in = spec.layout == WeightLayout::out_in;
  const auto& shape = spec.weight.shape;
  if (shape.size() != 2 || shape[out_in ? 1 : 0] != spec.x.cols()) {
    throw Error(ErrorKind::config,
                str(spec.name, ": weight is ", to_string(shape), " for x of ", to_string(spec.x.shape),
                    out_in ? str(" (OUTx", spec.x.cols(), ")") : str(" (", spec.x.cols(), "xOUT)")));
  }
  if (spec.bias) check_same_shape(spec.name, "bias", spec.bias->shape, {shape[out_in ? 0 : 1]});
}

void add_weight_gradients(Tape& tape, const Linear& spec, const Tensor& y, const Sizes& sizes) {
  const Tensor dy = tape.gradient(y);
  OpNode node     = sizes.out_in ? product(tape, "linear_weight_gradient", sizes.out, sizes.in, sizes.rows)
                                 : product(tape, "linear_weight_gradient", sizes.in, sizes.out, sizes.rows);
  node.reads      = {spec.x, dy};
  tape.add_weight_gradient(spec.weight, node, [sizes]<class T>(const Context& context, Into<T> into) {
    const Matrix<T> x = matrix(context.read<T>(0), sizes.in), of_y = matrix(context.read<T>(1), sizes.out);
    multiply(context, sizes.out_in ? Gemm<T>{.m        = sizes.out,
                                             .n        = sizes.in,
                                             .k        = sizes.rows,
                                             .a        = transposed(of_y),
                                             .b        = x,
                                             .c        = into,
                                             .c_stride = sizes.in}
                                   : Gemm<T>{.m        = sizes.in,
                                             .n        = sizes.out,
                                             .k        = sizes.rows,
                                             .a        = transposed(x),
                                             .b        = of_y,
                                             .c        = into,
                                             .c_stride = sizes.out});
  });
  if (!spec.bias) return;
  const Cost cost{.flops = static_cast<double>(dy.num_elements()), .bytes_moved = static_cast<double>(dy.num_bytes())};
  tape.add_weight_gradient(*spec.bias, {.op = "bias_gradient", .reads = dy, .cost = cost},
                           [sizes]<class T>(const Context& context, Into<T> into) {
                             column_sums(context.read<T>().data(), sizes.rows, sizes.out, into);
                           });
}

}  // namespace

Tensor linear(Tape& tape, const Linear& spec) {
  check(tape, spec);
  const bool out_in = spec.layout == WeightLayout::out_in;
  const Sizes sizes{spec.x.rows(), spec.x.cols(), spec.weight.shape[out_in ? 0 : 1], out_in};
  TensorShape shape = spec.x.shape;
  shape.back()      = sizes.out;
  const Tensor y    = tape.tensor(spec.name, shape);

  OpNode node = product(tape, "linear", sizes.rows, sizes.out, sizes.in);
  node.reads  = {spec.x, spec.weight};
  if (spec.bias) node.reads.push_back(*spec.bias);
  node.writes = y;
  tape.add(node, [sizes, biased = spec.bias.has_value()]<class T>(const Context& context, T) {
    const std::span<T> out = context.write<T>();
    multiply(context, Gemm<T>{.m        = sizes.rows,
                              .n        = sizes.out,
                              .k        = sizes.in,
                              .a        = matrix(context.read<T>(0), sizes.in),
                              .b        = in_by_out(context.read<T>(1).data(), sizes),
                              .c        = {out.data(), nullptr, static_cast<std::int64_t>(out.size())},
                              .c_stride = sizes.out,
                              .bias     = biased ? context.read<T>(2).data() : nullptr});
  });

  tape.on_backward({.outputs = {y},
                    .input_gradients =
                        [spec, y, sizes](Tape& back) {
                          OpNode of_x = product(back, "linear_input_gradient", sizes.rows, sizes.in, sizes.out);
                          of_x.reads  = {back.gradient(y), spec.weight};
                          back.add_gradient(spec.x, of_x, [sizes]<class T>(const Context& context, Into<T> dx) {
                            multiply(context, Gemm<T>{.m = sizes.rows,
                                                      .n = sizes.in,
                                                      .k = sizes.out,
                                                      .a = matrix(context.read<T>(0), sizes.out),
                                                      .b = transposed(in_by_out(context.read<T>(1).data(), sizes)),
                                                      .c = dx,
                                                      .c_stride = sizes.in});
                          });
                        },
                    .weight_gradients = [spec, y, sizes](Tape& back) { add_weight_gradients(back, spec, y, sizes); }});
  return y;
}

}  // namespace stepgraph
