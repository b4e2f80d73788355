#pragma once
#include <optional>
#include <string>

#include "ops/cpu/into.hpp"
#include "ops/cpu/lanes.hpp"
#include "ops/cpu/residual.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/common/device_drop.hpp"
#include "ops/cuda/common/workspace_bytes.hpp"
#include "ops/cuda/layers/column_sum.hpp"
#include "ops/layers/residual.hpp"
#include "ops/tape/op_checks.hpp"

// Shared by `residual` and `residual_norm`. Internal to ops/.
namespace stepgraph {

struct ResidualParts {
  Tensor x, branch;
  std::optional<Weight> bias;
  DropoutSite site;
  std::int64_t num_rows, width, first_element;

  ResidualParts(Tape& tape, std::string_view op, const Residual& spec)
      : x(spec.x), branch(spec.branch), bias(spec.bias), num_rows(spec.x.rows()), width(spec.x.cols()) {
    check_tensor(tape, op, "x", x);
    check_tensor(tape, op, "branch", branch);
    check_same_shape(op, "branch", branch.shape, x.shape);
    if (bias) check_same_shape(op, "bias", bias->shape, {width});
    site          = dropout_site(tape, spec.dropout);
    first_element = tape.first_row(x) * width;
  }

  [[nodiscard]] double num_elements() const { return static_cast<double>(x.num_elements()); }
  [[nodiscard]] double num_bytes() const { return static_cast<double>(x.num_bytes()); }

  // Reads x, branch, then the bias and the step if present. Callers may add more reads.
  [[nodiscard]] OpNode forward_node(std::string op) const {
    OpNode node{.op       = std::move(op),
                .reads    = {x, branch},
                .cost     = {.flops = (bias ? 2 : 1) * num_elements(), .bytes_moved = 3 * num_bytes()},
                .parallel = true,
                .device   = true};
    if (bias) node.reads.push_back(*bias);
    if (site.active) node.reads.push_back(site.step);
    return node;
  }
  [[nodiscard]] std::size_t num_reads() const { return 2 + (bias ? 1 : 0) + (site.active ? 1 : 0); }
  template <class T>
  [[nodiscard]] cpu::ResidualRows<T> rows(const Context& context) const {
    return {.width  = width,
            .x      = context.read<T>(0).data(),
            .branch = context.read<T>(1).data(),
            .bias   = bias ? context.read<T>(2).data() : nullptr,
            .y      = context.write<T>(0).data(),
            .drop   = drop(context, num_reads() - 1)};
  }

  template <class T>
  [[nodiscard]] cuda::ResidualRows<T> device_rows(const Context& context) const {
    return {.rows   = num_rows,
            .width  = width,
            .x      = context.read<T>(0).data(),
            .branch = context.read<T>(1).data(),
            .bias   = bias ? context.read<T>(2).data() : nullptr,
            .y      = context.write<T>(0).data(),
            .drop   = device_drop(context, num_reads() - 1)};
  }

  // The dropout of the step that is the node's read number `step`; none if nothing is dropped.
  [[nodiscard]] std::optional<cpu::Drop> drop(const Context& context, std::size_t step) const {
    if (!site.active) return std::nullopt;
    return cpu::Drop{.mask = site.mask(context, step), .first = first_element};
  }
  [[nodiscard]] std::optional<cuda::Drop> device_drop(const Context& context, std::size_t step) const {
    if (!site.active) return std::nullopt;
    return cuda::device_drop(site, context, step, first_element);
  }
  // A node that reads the gradient of y and, with dropout, the step.
  [[nodiscard]] OpNode gradient_node(std::string op, const Tensor& dy) const {
    OpNode node{.op       = std::move(op),
                .reads    = dy,
                .cost     = {.flops = num_elements(), .bytes_moved = num_bytes()},
                .parallel = true,
                .device   = true};
    if (site.active) node.reads.push_back(site.step);
    return node;
  }

  // Passes the gradient of y to x and to the branch. Both share its tensor, except for a branch with dropout.
  void add_input_gradients(Tape& back, const Tensor& y) const {
    if (site.active) {
      OpNode node           = gradient_node("dropout_backward", back.gradient(y));
      node.cost.bytes_moved = 2 * num_bytes();
      back.add_gradient<AllTypes>(branch, node, [*this]<class T>(const Context& context, Into<T> into) {
        const T* dy = context.read<T>(0).data();
        if constexpr (cuda::built) {
          if (const DeviceQueue* queue = context.device())
            return cuda::put_dropped(*queue, *device_drop(context, 1), dy, into);
        }
        const cpu::Drop mask = *drop(context, 1);
        cpu::for_tiles(context, into.size, cpu::elements_per_tile,
                       [&](std::int64_t begin, std::int64_t end) { cpu::put_dropped(mask, dy, into, begin, end); });
      });
    } else {
      back.pass_gradient(branch, y);
    }
    back.pass_gradient(x, y);
  }
  // The workspace of the bias gradient.
  [[nodiscard]] std::int64_t bias_workspace() const {
    return cuda::column_sum_workspace(num_rows, width, static_cast<std::int64_t>(size_bytes(x.type)), site.active);
  }
  // Does nothing without a bias.
  void add_bias_gradient(Tape& back, const Tensor& y) const {
    if (!bias) return;
    OpNode node          = gradient_node("bias_gradient", back.gradient(y));
    node.workspace_bytes = bias_workspace();
    back.add_weight_gradient<AllTypes>(*bias, node, [*this]<class T>(const Context& context, Into<T, Wide<T>> into) {
      const T* dy = context.read<T>(0).data();
      if constexpr (cuda::built) {
        if (const DeviceQueue* queue = context.device())
          return cuda::column_sum(*queue, dy, num_rows, width, device_drop(context, 1), into);
      }
      const auto mask = drop(context, 1);
      cpu::for_columns(context, width, [&](std::int64_t begin, std::int64_t end) {
        cpu::column_sum(dy, width, mask, into, num_rows, begin, end);
      });
    });
  }
};

}  // namespace stepgraph
